"""The settings tree: sources, the last word, checks that name the setting, defaults by device."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from cluster.autoscaling.policy import AutoscalingOptions
from cluster.errors import ConfigError
from cluster.settings.source import ResolvedSettings, resolve
from cluster.settings.tree import (
    PARSERS,
    Device,
    Settings,
    autoscaling_options,
    engine_settings,
    frontend_settings,
    value_of,
)
from workers.config import ModelLimits

CPU = Device()
GIB = 1 << 30


def of_file(tmp_path: Path, text: str, *words: str) -> ResolvedSettings:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return resolve(CPU, path, words)


def settings(*words: str, device: Device = CPU) -> Settings:
    return resolve(device, None, words).settings


def test_defaults_without_a_gpu() -> None:
    tree = settings()
    assert (tree.server.host, tree.server.port, tree.server.num_frontends) == ("127.0.0.1", 8000, 1)
    assert (tree.scheduler.max_num_batched_tokens, tree.scheduler.max_num_seqs) == (256, 32)
    assert (tree.cache.memory_gb, tree.scheduler.overlap_depth) == (2.0, 2)
    assert tree.scheduler.enable_chunked_prefill
    assert tree.cache.enable_prefix_caching
    assert tree.parallel.num_replicas == 1
    assert autoscaling_options(tree) is None
    assert tree.model.max_len is None


@pytest.mark.parametrize(("memory_gib", "budget"), [(24, 2048), (69.9, 2048), (70, 8192), (139, 8192), (0, 2048)])
def test_defaults_on_a_gpu(memory_gib: float, budget: int) -> None:
    tree = settings(device=Device("cuda", memory_gib))
    assert (tree.scheduler.max_num_batched_tokens, tree.scheduler.max_num_seqs) == (budget, 256)


def test_a_device_that_is_named_decides_and_not_the_machine() -> None:
    """The memory of GPUs that are on other machines is not known."""
    resolved = resolve(CPU, None, ["model.device=cuda"])
    assert resolved.device == Device("cuda")
    assert resolved.settings.scheduler.max_num_batched_tokens == 2048
    here = Device("cuda", 80)
    assert resolve(here, None, ["model.device=cuda"]).device == here
    assert resolve(here, None, ["model.device=cpu"]).device == CPU
    assert resolve(here, None, ["model.device=auto"]).device == here


@pytest.mark.parametrize(
    ("tree", "what"),
    [
        ({"server": {"prt": 1}}, "did you mean 'server.port'"),
        ({"servr": {}}, "did you mean 'server'"),
        ({"server": 1}, "server must be a mapping"),
        ({"server": {"port": "x"}}, "server.port is 'x'"),
    ],
)
def test_a_wrong_tree_is_named(tree: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        resolve(CPU, tree=tree)


def test_a_tree_means_what_a_file_means(tmp_path: Path) -> None:
    text = "server:\n  port: 9000\nparallel:\n  num_replicas: 3\n"
    assert resolve(CPU, tree=yaml.safe_load(text)).settings == of_file(tmp_path, text).settings


def test_the_last_word_wins_and_every_value_knows_its_source(tmp_path: Path) -> None:
    text = "server:\n  port: 9000\n  num_frontends: 2\nmodel:\n  name: from-file\n"
    resolved = of_file(tmp_path, text, "server.port=9001", "server.port=9002")
    assert (resolved.settings.server.port, resolved.settings.server.num_frontends) == (9002, 2)
    assert resolved.sources["server.port"] == "command line"
    assert resolved.sources["server.num_frontends"] == f"{tmp_path}/settings.yaml:3"
    assert resolved.sources["model.name"] == f"{tmp_path}/settings.yaml:5"
    assert resolved.sources["server.host"] == "default"
    assert resolved.sources["scheduler.max_num_seqs"] == "default (no GPU)"


def test_an_empty_file_and_an_empty_section_are_the_defaults(tmp_path: Path) -> None:
    assert of_file(tmp_path, "# nothing yet\n").settings == settings()
    assert of_file(tmp_path, "server:\n  # port: 1\nmodel:\n  name: x\n").settings.model.name == "x"


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("scheduler.max_num_seq=4", ["'scheduler.max_num_seq'", "'scheduler.max_num_seqs'"]),
        ("max_num_seqs=4", ["'max_num_seqs'", "'scheduler.max_num_seqs'"]),
        ("server.prot=4", ["'server.prot'", "'server.port'"]),
        ("sever.port=4", ["'sever.port'", "'server.port'"]),
        ("server=4", ["'server'"]),
        ("zzz=4", ["'zzz'", "model.*"]),
        ("server.port", ["'server.port'", "key=value"]),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(word: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(word)
    for name in names:
        assert name in str(caught.value)


def test_a_section_given_as_a_setting_is_told_its_settings() -> None:
    with pytest.raises(ConfigError, match=r"'cache' is a section, not a setting; .*cache\.num_blocks"):
        settings("cache=3")


@pytest.mark.parametrize(
    "word",
    [
        "server.port=0",
        "server.port=65536",
        "server.port=true",
        "server.port=80.5",
        "server.port=",
        "server.port=eighty",
        "server.host=",
        "server.drain_seconds=-1",
        "server.drain_seconds=.nan",
        "server.max_body_mb=0",
        "scheduler.overlap_depth=3",
        "scheduler.policy=lifo",
        "scheduler.enable_chunked_prefill=1",
        "scheduler.max_num_seqs=0",
        "model.dtype=int8",
        "model.max_len=1",
        "cache.gpu_memory_utilization=1.1",
        "cache.memory_gb=.inf",
        "parallel.num_replicas=0",
        "parallel.num_replicas=1..3",
        "parallel.router=prefix_affinity",
        "parallel.num_replicas=true",
        "autoscaling.min_replicas=-1",
        "autoscaling.max_replicas=1.5",
        "autoscaling.target_queue_seconds=0",
        "autoscaling.target_kv_usage=1.1",
        "autoscaling.up_seconds=-1",
        "autoscaling.down_seconds=-1",
        "autoscaling.wake_seconds=0",
        "parallel.tensor_parallel_size=0",
    ],
)
def test_a_bad_value_is_named(word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word.split("=")[0]) + ".* must be"):
        settings(word)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("server:\n  port: x\n", 2, "server.port"),
        ("server:\n  port: 1\n  port: 2\n", 3, "twice"),
        ("servers:\n  port: 1\n", 2, "'server'"),
        ("server: 3\n", 1, "mapping"),
        ("- a\n", 1, "mapping"),
        ("model:\n  name: 3\n", 2, "model.name"),
        ("model:\n  name: [a]\n", 2, "model.name"),
        ("server:\n  port: 1\n  hots: a\n", 3, "'server.host'"),
    ],
)
def test_an_error_in_the_file_names_its_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_file(tmp_path, text)
    assert f"settings.yaml:{line}: " in str(caught.value)
    assert what in str(caught.value)


def test_a_file_that_is_no_yaml_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        of_file(tmp_path, "server: [\n")
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.yaml"):
        resolve(CPU, tmp_path / "missing.yaml")


def test_words_are_read_by_type() -> None:
    tree = settings(
        "model.name=1e5", "model.path=2024", "cache.memory_gb=5e-1", "model.max_len=auto", "server.api_key=none",
        "parallel.num_replicas=3", "scheduler.enable_chunked_prefill=true",
    )  # fmt: skip
    assert (tree.model.name, tree.model.path, tree.cache.memory_gb) == ("1e5", "2024", 0.5)
    assert (tree.model.max_len, tree.server.api_key) == (None, None)
    assert tree.parallel.num_replicas == 3


def test_auto_asks_the_device_again(tmp_path: Path) -> None:
    resolved = of_file(tmp_path, "scheduler:\n  max_num_seqs: 8\n", "scheduler.max_num_seqs=auto")
    assert resolved.settings.scheduler.max_num_seqs == 32
    assert resolved.sources["scheduler.max_num_seqs"] == "command line: auto (no GPU)"


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["scheduler.max_num_batched_tokens=16"], ["max_num_batched_tokens (16)", "max_num_seqs (32)"]),
        (
            ["scheduler.enable_chunked_prefill=false", "model.max_len=512"],
            ["max_num_batched_tokens (256)", "max_model_len (512)"],
        ),
        (
            ["cache.num_blocks=4", "cache.block_size=16", "model.max_len=65"],
            ["model.max_len (65)", "cache.num_blocks * cache.block_size"],
        ),
        (
            ["autoscaling.min_replicas=3", "autoscaling.max_replicas=2"],
            ["autoscaling.min_replicas (3)", "autoscaling.max_replicas (2)"],
        ),
        (
            ["parallel.num_replicas=2", "autoscaling.max_replicas=4"],
            ["parallel.num_replicas (2)", "autoscaling.max_replicas (4)"],
        ),
    ],
)
def test_contradictions_are_refused_with_both_values(words: list[str], numbers: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*words)
    for number in numbers:
        assert number in str(caught.value)


def test_without_chunking_the_models_own_length_is_checked_when_known() -> None:
    engine = engine_settings(settings("scheduler.enable_chunked_prefill=false"), "/models/x", CPU)
    fits = ModelLimits(num_blocks=100, block_size=16, max_model_len=256, vocab_size=1000)
    assert engine.scheduler_config(fits).max_num_batched_tokens == 256
    with pytest.raises(ValueError, match="max_model_len"):
        engine.scheduler_config(replace(fits, max_model_len=257))


@pytest.mark.parametrize("word", ["scheduler.itl_slo_ms=50"])
def test_settings_that_nothing_obeys_yet_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word.split("=")[0]) + " is not supported yet"):
        settings(word)


def test_the_rooms_get_their_share() -> None:
    tree = settings(
        "scheduler.policy=priority", "scheduler.overlap_depth=1", "cache.enable_prefix_caching=false",
        "cache.memory_gb=0.5", "cache.num_blocks=100", "parallel.tensor_parallel_size=2", "model.dtype=float32",
        "model.max_len=128", "cache.block_size=8", "attention.backend=torch", "scheduler.max_num_partial_prefills=2",
    )  # fmt: skip
    engine = engine_settings(tree, "/models/x", CPU)
    limits = ModelLimits(num_blocks=100, block_size=32, max_model_len=100, vocab_size=1000)
    scheduler = engine.scheduler_config(limits)
    assert (scheduler.policy, scheduler.overlap_depth, scheduler.block_size) == ("priority", 1, 32)
    assert (scheduler.max_model_len, scheduler.enable_prefix_caching) == (100, False)
    assert scheduler.long_prefill_token_threshold == 4
    worker = engine.worker
    assert (worker.model_path, worker.device, worker.tensor_parallel_size) == ("/models/x", "cpu", 2)
    assert (worker.kv_memory_bytes, worker.num_blocks, worker.block_size) == (GIB // 2, 100, 8)
    assert (worker.dtype, worker.max_model_len, worker.attention_backend) == ("float32", 128, "torch")
    assert engine_settings(settings(), "/models/x", CPU).worker.num_blocks == 0


def test_a_rank_takes_a_gpu_where_there_is_one() -> None:
    device = Device("cuda", 80)
    engine = engine_settings(settings("parallel.tensor_parallel_size=2", device=device), "/models/x", device)
    assert engine.worker.device == "cuda"
    assert engine.strategy == "STRICT_PACK"
    assert engine.placement_bundles() == [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert engine_settings(settings(), "/models/x", CPU).placement_bundles() == [{"CPU": 1.0}, {"CPU": 1.0}]


def test_front_ends_get_their_share() -> None:
    tree = settings("server.api_key=secret", "server.max_body_mb=0.5", "model.name=mine")
    frontend = frontend_settings(tree, "/models/x")
    assert (frontend.model_path, frontend.model_name) == ("/models/x", "mine")
    assert (frontend.api_key, frontend.api_key_file, frontend.max_body_mb) == ("secret", None, 0.5)
    named = frontend_settings(settings("server.api_key_file=keys"), "/models/x").api_key_file
    assert named == str(Path.cwd() / "keys")


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], None),
        (["autoscaling.min_replicas=0"], None),  # off
        (["autoscaling.max_replicas=2"], None),
        (["autoscaling.max_replicas=2", "autoscaling.min_replicas=0"], 77.0),
    ],
)
def test_front_ends_wait_for_an_engine_to_load_only_where_there_may_be_none(
    words: list[str], seconds: float | None
) -> None:
    tree = settings("autoscaling.wake_seconds=77", *words)
    assert frontend_settings(tree, "/models/x").wake_seconds == seconds


def test_the_autoscaling_policy_gets_its_share() -> None:
    names = [item.name for item in fields(AutoscalingOptions)]
    values = (0, 9, 3.0, 0.5, 4.0, 5.0)
    tree = settings(*(f"autoscaling.{name}={value}" for name, value in zip(names, values, strict=True)))
    assert autoscaling_options(tree) == AutoscalingOptions(*values)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (["model.path=/data/llama-3/"], "llama-3"),
        (["model.path=./llama"], "llama"),
        (["model.path=/data/x", "model.name=mine"], "mine"),
    ],
)
def test_the_served_name(words: list[str], name: str) -> None:
    assert settings(*words).served_name == name


def test_the_printed_tree_reads_back_as_the_same_tree(tmp_path: Path) -> None:
    first = resolve(CPU, None, ["server.port=9000", "model.name=a: b", "parallel.num_replicas=2"])
    printed = "\n".join(first.lines())
    again = of_file(tmp_path, printed)
    assert again.settings == first.settings
    assert "# command line" in printed
    assert set(first.sources) == set(PARSERS)
    assert all(value_of(again.settings, name) == value_of(first.settings, name) for name in PARSERS)


def test_secrets_are_never_shown() -> None:
    resolved = resolve(CPU, None, ["server.api_key=hunter2"])
    assert resolved.settings.server.api_key == "hunter2"
    assert "hunter2" not in "\n".join(resolved.lines())
    with pytest.raises(ConfigError) as caught:
        settings("server.api_key=  ")
    assert "'  '" not in str(caught.value)


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_the_shipped_files_are_valid(file: Path) -> None:
    assert any(source.startswith(str(file)) for source in resolve(CPU, file).sources.values())


def test_batches_of_the_service_must_not_delay_others() -> None:
    with pytest.raises(ConfigError, match=r"batch\.directory needs scheduler\.policy=priority"):
        settings("batch.directory=b")
    chosen = settings("batch.directory=b", "scheduler.policy=priority", "batch.max_file_mb=0.5")
    frontend = frontend_settings(chosen, "/models/x")
    assert (frontend.batch_directory, frontend.max_file_mb) == (str(Path("b").absolute()), 0.5)
    assert frontend_settings(settings(), "/models/x").batch_directory is None

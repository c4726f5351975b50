"""A whole rank on a GPU: the same tokens as transformers in float32 on the CPU, however the work is cut."""

from dataclasses import replace

import pytest
import torch
from plan_driver import PlanDriver
from tiny_models import KINDS, VOCAB_SIZE, reference_logits, tiny_model

from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers.config import ModelLimits, WorkerConfig
from workers.worker import Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
TIE = 1e-3
"""Logits of the reference closer than this may come out in either order on another device."""


def started(kind: str, **changes: object) -> tuple[Worker, ModelLimits]:
    config = WorkerConfig(
        model_path=tiny_model(kind),
        max_num_seqs=8,
        max_num_batched_tokens=256,
        dtype="float32",
        device="cuda",
        num_blocks=64,
        block_size=16,
        attention_backend="torch",
    )
    worker = Worker(replace(config, **changes))  # type: ignore[arg-type]
    worker.load()
    limits = worker.measure()
    worker.allocate(limits)
    return worker, limits


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def assert_greedy(path: str, prompt: list[int], output: list[int], tie: float = TIE) -> None:
    """Each token is the reference's best for the tokens before it, or within `tie` of the best."""
    rows = reference_logits(path, [*prompt, *output])[len(prompt) - 1 : len(prompt) - 1 + len(output)]
    lost = rows.max(dim=-1).values - rows[torch.arange(len(output)), torch.tensor(output)]
    assert lost.max() <= tie, f"{output} loses {lost.tolist()} to the reference"


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(kind: str, chunk: int) -> None:
    worker, limits = started(kind)
    asked = prompts([1, 33, 60, 17])
    driven = PlanDriver(worker.execute_step, limits, chunk).run(
        [(prompt, GREEDY) for prompt in asked], preempt_every=11
    )
    for prompt, request in zip(asked, driven, strict=True):
        assert len(request.output) == GREEDY.max_tokens
        assert_greedy(tiny_model(kind), prompt, request.output)


def test_a_step_launched_before_the_last_result_gives_the_same_tokens() -> None:
    worker, _ = started("llama")
    (prompt,) = prompts([30])
    new = NewRequest("a", prompt, len(prompt), GREEDY, [0, 1, 2], 0)
    plans = [StepPlan(1, 0, {"a": len(prompt)}, new_requests=[new])]
    plans += [StepPlan(1, step, {"a": 1}) for step in range(1, 12)]
    output: list[int] = []
    pending = worker.launch_step(plans[0])
    for plan in plans[1:]:
        following = worker.launch_step(plan)
        output += worker.collect_step(pending).sampled_token_ids["a"]
        pending = following
    output += worker.collect_step(pending).sampled_token_ids["a"]
    assert len(output) == 12
    assert_greedy(tiny_model("llama"), prompt, output)


def test_a_launch_never_waits_for_the_device() -> None:
    worker, _ = started("llama")
    costly = SamplingParams(
        max_tokens=12, min_tokens=4, temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
        stop_token_ids=(5,), logit_bias=((7, 1.0),), num_logprobs=3, num_prompt_logprobs=3,
    )  # fmt: skip
    asked = prompts([30, 20])
    first = [
        NewRequest("greedy", asked[0], 30, GREEDY, [0, 1, 2], 0),
        NewRequest("costly", asked[1], 20, costly, [3, 4], 0),
    ]
    plans = [
        StepPlan(1, 0, {"greedy": 30, "costly": 20}, new_requests=first),
        StepPlan(1, 1, {"greedy": 1, "costly": 1}),
        StepPlan(1, 2, {"greedy": 3, "costly": 1}, spec_token_ids={"greedy": [5, 6]}),
    ]
    torch.cuda.set_sync_debug_mode("error")  # whatever makes the host wait for the device raises
    try:
        pending = [worker.launch_step(plan) for plan in plans]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all({"greedy", "costly"} == worker.collect_step(step).sampled_token_ids.keys() for step in pending)


def test_a_seed_gives_the_same_tokens_alone_and_beside_others() -> None:
    worker, limits = started("llama")
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    asked = prompts([20, 40, 9])
    alone = PlanDriver(worker.execute_step, limits, 64).run([(asked[0], params)])[0].output
    worker.allocate(limits)
    others = [(prompt, SamplingParams(max_tokens=12, temperature=1.0, seed=8)) for prompt in asked[1:]]
    beside = PlanDriver(worker.execute_step, limits, 64).run([(asked[0], params), *others])[0].output
    assert alone == beside


def test_the_kv_cache_is_measured_from_free_memory_and_fits() -> None:
    small, large = (started("llama", num_blocks=0, gpu_memory_utilization=share)[1].num_blocks for share in (0.05, 0.1))
    assert 0 < small < large
    worker, limits = started("llama", num_blocks=0, gpu_memory_utilization=0.1)
    (prompt,) = prompts([50])
    (request,) = PlanDriver(worker.execute_step, limits, 64).run([(prompt, GREEDY)])
    assert_greedy(tiny_model("llama"), prompt, request.output)


def test_bfloat16_with_the_best_backend_stays_near_the_reference() -> None:
    worker, limits = started("llama", dtype="bfloat16", attention_backend="auto", block_size=0, num_blocks=0)
    (prompt,) = prompts([100])
    (request,) = PlanDriver(worker.execute_step, limits, 64).run([(prompt, GREEDY)])
    # The tiny model's logits spread over tens; bfloat16 keeps three digits.
    assert_greedy(tiny_model("llama"), prompt, request.output, tie=1.0)

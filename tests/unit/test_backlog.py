"""What lies before a new request, against a scheduler that then computes it."""

import random

from scheduler.backlog import Backlog, measure
from scheduler.config import SchedulerConfig
from scheduler.plan import StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler


def scheduler(*, enable_prefix_caching: bool = True) -> Scheduler:
    config = SchedulerConfig(1024, 64, 16, 16, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(config, 256)


def add(target: Scheduler, name: str, prompt: list[int]) -> None:
    target.add_request(Request(name, prompt, SamplingParams(max_tokens=50)))


def step(target: Scheduler) -> None:
    plan = target.schedule()
    assert plan is not None
    sampled = {name: [1] for name in plan.num_scheduled_tokens if not target.requests[name].is_partial
               or target.requests[name].num_output_placeholders}  # fmt: skip
    target.update_from_result(plan, StepResult(plan.epoch, plan.step_id, sampled))


def test_chunks_owe_their_rest_and_waiting_requests_what_they_will_not_find() -> None:
    target = scheduler()
    assert measure(target) == Backlog(0, 0, 0)
    prompt = list(range(200))
    add(target, "a", prompt)
    add(target, "b", [*prompt[:160], 9, 9, 9])
    add(target, "c", prompt)
    add(target, "d", [7] * 10)
    # The first computes all; the others find whole blocks of it, less the last token at least.
    assert measure(target).num_tokens == 200 + 3 + (200 - 192) + 10
    step(target)
    assert measure(target).num_tokens == (200 - 64) + 3 + 8 + 10
    while target.waiting or any(not request.is_decoding for request in target.running):
        step(target)
    backlog = measure(target)
    assert (backlog.num_tokens, backlog.num_decodes) == (0, 4)
    assert backlog.decode_context == sum(request.num_computed_tokens for request in target.running)


def test_without_a_cache_everything_is_owed() -> None:
    target = scheduler(enable_prefix_caching=False)
    add(target, "a", [1] * 100)
    add(target, "b", [1] * 100)
    assert measure(target).num_tokens == 200
    step(target)
    assert measure(target).num_tokens == 136


def test_the_queue_is_what_is_then_computed() -> None:
    """Up to first tokens, while nothing is evicted; requests admitted in one step do not find each other's blocks."""
    rng = random.Random(1)
    for _ in range(20):
        target, prefix = scheduler(), [rng.randrange(99) for _ in range(200)]
        for index in range(rng.randrange(1, 8)):
            add(target, f"r{index}", prefix[: rng.randrange(200)] + [index] * rng.randrange(1, 40))
        expected, computed = measure(target).num_tokens, 0
        while any(request.num_computed_tokens < request.num_prompt_tokens for request in target.requests.values()):
            owing = {name for name, request in target.requests.items()
                     if request.num_computed_tokens < request.num_prompt_tokens}  # fmt: skip
            plan = target.schedule()
            assert plan is not None
            computed += sum(tokens for name, tokens in plan.num_scheduled_tokens.items() if name in owing)
            sampled = {name: [1] for name in plan.num_scheduled_tokens if not target.requests[name].is_partial
                       or target.requests[name].num_output_placeholders}  # fmt: skip
            target.update_from_result(plan, StepResult(plan.epoch, plan.step_id, sampled))
        assert expected <= computed <= expected + 64

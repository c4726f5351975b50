"""A result counts only for the stay in RUNNING that its plan was made for."""

from dataclasses import replace

import pytest
from scheduler_workloads import RequestSpec, Workload
from simulated_worker import expected_output
from test_scheduler_against_reference import ComparingLoop

from scheduler.config import SchedulerConfig
from scheduler.plan import StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

CONFIG = SchedulerConfig(max_model_len=32, max_num_batched_tokens=32, max_num_seqs=4, block_size=4, overlap_depth=2)


def spec(request_id: str, length: int, has_grammar: bool = False, error_at: int | None = None) -> RequestSpec:
    prompt = [100 * ord(request_id) + i for i in range(length)]
    return RequestSpec(
        request_id, prompt, SamplingParams(max_tokens=9), ord(request_id), 0, None, None, has_grammar, error_at
    )


def readmit_with_a_plan_in_flight(b: RequestSpec) -> ComparingLoop:
    """Ends with two plans in flight that sample `b`: one of its first stay and one of its second.

    `a` (a grammar: it waits for each of its results) holds five of eight blocks, `b` three. When `b` needs a fourth
    it preempts itself, nothing is left to plan, `a` is aborted, and `b` is admitted again.
    """
    loop = ComparingLoop(Workload(CONFIG, 8, None, 0, [spec("a", 16, has_grammar=True), b], []))
    for kind, index in [("add", 0), ("ready", 0), ("add", 1), ("schedule", 0), ("deliver", 0), ("schedule", 0)]:
        loop.perform(kind, index)
    assert loop.in_flight[-1].plan.num_scheduled_tokens == {"a": 1, "b": 1}
    assert not loop.schedule()
    assert loop.engine.scheduler.requests["b"].status.name == "PREEMPTED"
    loop.perform("abort", 0)
    assert loop.schedule()
    plan = loop.in_flight[-1].plan
    assert plan.preempted_request_ids == ["b"]
    assert plan.num_scheduled_tokens == {"b": 4}  # 12 tokens known, 8 of them cached
    assert len(loop.in_flight) == 2
    return loop


def test_a_token_of_an_earlier_stay_is_dropped() -> None:
    b = spec("b", 11)
    loop = readmit_with_a_plan_in_flight(b)
    assert loop.deliver() == []
    assert loop.engine.scheduler.requests["b"].num_output_placeholders == 1
    assert [o.request_id for o in loop.deliver()] == ["b"]
    loop.drain()
    assert (loop.outputs["b"], loop.reasons["b"]) == expected_output(b.prompt, b.params, CONFIG.max_model_len)


def test_an_error_of_an_earlier_stay_is_dropped() -> None:
    loop = readmit_with_a_plan_in_flight(spec("b", 11, error_at=1))
    assert loop.deliver() == []
    assert loop.engine.scheduler.requests["b"].status.name == "RUNNING"
    assert [o.finish_reason for o in loop.deliver()] == ["error"]


def test_a_result_after_an_abort_is_dropped() -> None:
    loop = ComparingLoop(Workload(CONFIG, 8, None, 0, [spec("a", 6), spec("b", 6)], []))
    for kind, index in [("add", 0), ("add", 1), ("schedule", 0), ("schedule", 0), ("abort", 0)]:
        loop.perform(kind, index)
    assert [o.request_id for o in loop.deliver()] == ["b"]
    assert [o.request_id for o in loop.deliver()] == ["b"]
    assert loop.engine.scheduler.stats().num_used_blocks == 2


@pytest.mark.parametrize(("overlap_depth", "expected"), [(1, {"a": [5, 6]}), (2, {})])
def test_drafts_of_an_overtaken_result_are_dropped(overlap_depth: int, expected: dict[str, list[int]]) -> None:
    """With an output still in flight, a draft continues a token that is no longer the last one."""
    scheduler = Scheduler(replace(CONFIG, overlap_depth=overlap_depth), 8)
    scheduler.add_request(Request("a", [1, 2, 3], SamplingParams(max_tokens=9)))
    plans = [scheduler.schedule() for _ in range(overlap_depth)]
    oldest = plans[0]
    assert oldest is not None
    result = StepResult(oldest.epoch, oldest.step_id, {"a": [4]}, draft_token_ids={"a": [5, 6]})
    scheduler.update_from_result(oldest, result)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.spec_token_ids == expected

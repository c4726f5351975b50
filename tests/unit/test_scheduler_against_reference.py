"""The scheduler and the slow reference make the same plans and outputs, step by step, on random workloads."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scheduler_engines import RealEngine, ReferenceEngine
from scheduler_workloads import Loop, RequestSpec, Workload, make_workload, seeded

from scheduler.plan import RequestOutput, StepPlan


def shape(plan: StepPlan | None) -> dict[str, object] | None:
    """What must agree of a plan: everything but which block ids were taken."""
    if plan is None:
        return None
    return {
        "epoch": plan.epoch,
        "num_scheduled_tokens": list(plan.num_scheduled_tokens.items()),
        "new_requests": [
            (n.request_id, n.token_ids, n.num_prompt_tokens, len(n.block_ids), n.num_computed_tokens, n.lora_id)
            for n in plan.new_requests
        ],
        "new_block_ids": {request_id: len(block_ids) for request_id, block_ids in plan.new_block_ids.items()},
        "spec_token_ids": plan.spec_token_ids,
        "preempted": sorted(plan.preempted_request_ids),
    }


def meaning(outputs: list[RequestOutput]) -> dict[str, tuple[object, ...]]:
    return {
        o.request_id: (o.new_token_ids, o.finish_reason, o.num_cached_tokens)
        for o in outputs
        if o.new_token_ids or o.finish_reason
    }


class ComparingLoop(Loop):
    """Drives the real scheduler; the reference sees the same events and must answer the same."""

    def __init__(self, load: Workload) -> None:
        super().__init__(load, RealEngine(load))
        self.reference = ReferenceEngine(load)
        self.reference_plans: list[StepPlan] = []

    def compare_state(self) -> None:
        real, reference = self.engine.scheduler, self.reference.scheduler
        assert [r.request_id for r in real.running] == [r.request_id for r in reference.running]
        assert set(real.requests) == set(reference.requests)
        for request_id, expected in reference.requests.items():
            request = real.requests[request_id]
            assert request.status.name == expected.status, request_id
            assert request.num_computed_tokens == expected.computed, request_id
            assert request.num_output_placeholders == expected.placeholders, request_id
            assert list(request.all_token_ids) == expected.tokens, request_id
        stats = real.stats()
        assert stats.num_used_blocks == reference.num_blocks - len(reference.free)
        assert stats.num_requests_running == len(reference.running)
        assert stats.num_requests_waiting == len(reference.waiting)
        assert {k: v for k, v in stats.num_preemptions.items() if v} == {
            k: v for k, v in reference.num_preemptions.items() if v
        }

    def add(self, spec: RequestSpec) -> None:
        super().add(spec)
        assert self.reference.add(spec) == (spec.request_id not in self.refused)

    def ready(self, request_id: str) -> None:
        super().ready(request_id)
        self.reference.mark_grammar_ready(request_id)

    def finish(self, request_id: str, aborted: bool) -> None:
        super().finish(request_id, aborted)
        self.reference.finish(request_id, aborted)
        self.compare_state()

    def hold(self, request_ids: set[str]) -> None:
        super().hold(request_ids)
        self.reference.hold(request_ids)
        self.compare_state()

    def end_epoch(self) -> None:
        self.reference.end_epoch()
        self.reference_plans.clear()
        super().end_epoch()
        self.compare_state()

    def schedule(self) -> bool:
        expected = self.reference.schedule()
        planned = super().schedule()
        plan = self.in_flight[-1].plan if planned else None
        assert shape(plan) == shape(expected)
        if expected is not None:
            self.reference_plans.append(expected)
        self.compare_state()
        return planned

    def deliver(self) -> list[RequestOutput]:
        result = self.in_flight[0].result
        plan = self.reference_plans.pop(0)
        expected = self.reference.update_from_result(plan, replace(result, step_id=plan.step_id))
        outputs = super().deliver()
        assert meaning(outputs) == meaning(expected)
        self.compare_state()
        return outputs


@given(st.data())
@settings(max_examples=150, phases=[Phase.generate])  # to look into a failure add Phase.shrink: it takes minutes
def test_same_plans_and_outputs(data: st.DataObject) -> None:
    load = make_workload(lambda low, high: data.draw(st.integers(low, high)))
    ComparingLoop(load).run()


@pytest.mark.parametrize("start", range(0, 1500, 250))
def test_same_plans_and_outputs_by_seed(start: int) -> None:
    for seed in range(start, start + 250):
        ComparingLoop(make_workload(seeded(seed))).run()


@pytest.mark.full
@pytest.mark.parametrize("start", range(10_000, 20_000, 1000))
def test_same_plans_and_outputs_at_length(start: int) -> None:
    for seed in range(start, start + 1000):
        ComparingLoop(make_workload(seeded(seed), scale=1 + seed % 3)).run()

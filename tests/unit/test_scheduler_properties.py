"""What must hold after every step of the real scheduler, whatever the workload."""

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scheduler_engines import RealEngine
from scheduler_workloads import Loop, RequestSpec, Workload, make_workload, seeded
from simulated_worker import expected_output

from scheduler.plan import RequestOutput, StepLoad, StepPlan
from scheduler.request import Request


class CheckedLoop(Loop):
    """Drives the real scheduler and checks the rules against the worker's mirror after every event."""

    def __init__(self, load: Workload) -> None:
        super().__init__(load, RealEngine(load))
        self.scheduler = self.engine.scheduler
        self.specs = {s.request_id: s for s in load.specs}
        self.first_hits: dict[str, int] = {}
        self.admission_order: list[str] = []
        self.held: set[str] = set()

    def limit(self, request: Request) -> int:
        """Positions that are ever computed: the last token is sampled, never computed."""
        spec = self.specs[request.request_id]
        return min(self.workload.config.max_model_len, len(spec.prompt) + spec.params.max_tokens) - 1

    def is_decoding(self, request: Request) -> bool:
        known = len(request.all_token_ids) + request.num_output_placeholders
        return request.num_computed_tokens >= known - 1

    def must_decode(self, request: Request) -> bool:
        depends = self.specs[request.request_id].has_grammar or self.workload.config.uses_drafter
        waits = depends and request.num_output_placeholders > 0
        return self.is_decoding(request) and not waits and request.num_computed_tokens < self.limit(request)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        stats, config = self.scheduler.stats(), self.workload.config
        assert stats.num_requests_running == len(self.scheduler.running) <= config.max_num_seqs
        assert stats.num_requests_running + stats.num_requests_waiting == len(self.scheduler.requests)
        assert 0 <= stats.num_used_blocks <= self.workload.num_blocks

    def add(self, spec: RequestSpec) -> None:
        super().add(spec)
        self.check_integrity()

    def finish(self, request_id: str, aborted: bool) -> None:
        super().finish(request_id, aborted)
        assert request_id not in self.scheduler.requests
        self.check_integrity()

    def hold(self, request_ids: set[str]) -> None:
        super().hold(request_ids)
        self.held = request_ids
        assert not request_ids & {r.request_id for r in self.scheduler.running}
        self.check_integrity()

    def end_epoch(self) -> None:
        running = [r.request_id for r in self.scheduler.running]
        super().end_epoch()
        assert self.scheduler.running == []
        assert self.scheduler.stats().num_used_blocks == 0
        assert all(self.scheduler.requests[i].num_computed_tokens == 0 for i in running)
        self.admission_order.clear()
        self.check_integrity()

    def deliver(self) -> list[RequestOutput]:
        outputs = super().deliver()
        assert len({o.request_id for o in outputs}) == len(outputs), "two outputs for one request and step"
        for output in outputs:
            assert output.num_cached_tokens == self.first_hits[output.request_id]
        self.check_integrity()
        return outputs

    def schedule(self) -> bool:
        must_decode = [r.request_id for r in self.scheduler.running if self.must_decode(r)]
        held = set(self.worker.requests)
        by_priority = self.scheduler.stats().num_preemptions.get("priority", 0)
        planned = super().schedule()
        evictions = self.scheduler.stats().num_preemptions.get("priority", 0) - by_priority
        still_running = {r.request_id for r in self.scheduler.running}
        self.check_integrity()
        if not planned:
            assert not still_running & set(must_decode), "a decode waits although nothing else runs"
            assert evictions == 0, "evicted in vain"
            return False
        plan = self.in_flight[-1].plan
        self.check_plan(plan)
        # Nothing pending outlives the workers it was meant for.
        assert held.issuperset([*plan.finished_request_ids, *plan.preempted_request_ids])
        for request_id in must_decode:
            assert request_id not in still_running or request_id in plan.num_scheduled_tokens, "a decode waits"
        self.check_row_order(plan, must_decode)
        self.check_mirror(plan)
        self.check_partial_limits()
        self.check_evictions(plan, evictions)
        return True

    def check_plan(self, plan: StepPlan) -> None:
        config = self.workload.config
        numbers = plan.num_scheduled_tokens
        assert numbers
        assert not self.held & set(numbers), "a held request runs"
        assert self.load(plan) == self.scheduler.load_of(plan)
        assert all(n > 0 for n in numbers.values())
        assert sum(numbers.values()) <= config.max_num_batched_tokens, "over budget"
        assert set(plan.spec_token_ids) <= set(numbers)
        assert not set(plan.new_block_ids) & {n.request_id for n in plan.new_requests}
        threshold = config.long_prefill_token_threshold if config.enable_chunked_prefill else 0
        for request_id, number in numbers.items():
            assert not threshold or number <= threshold
            request = self.scheduler.requests[request_id]
            assert request.num_computed_tokens <= self.limit(request)
        for new in plan.new_requests:
            self.first_hits.setdefault(new.request_id, min(new.num_computed_tokens, new.num_prompt_tokens))
            if not config.enable_chunked_prefill:
                assert numbers[new.request_id] == len(new.token_ids) - new.num_computed_tokens

    def load(self, plan: StepPlan) -> StepLoad:
        """Counted token by token."""
        decodes = chunks = context = pairs = 0
        for request_id, number in plan.num_scheduled_tokens.items():
            end = self.scheduler.requests[request_id].num_computed_tokens
            if number == 1 + len(plan.spec_token_ids.get(request_id, [])):
                decodes += number
                context += end
            else:
                chunks += number
                pairs += sum(range(end - number + 1, end + 1))
        return StepLoad(decodes, chunks, context, pairs)

    def check_row_order(self, plan: StepPlan, must_decode: list[str]) -> None:
        rows = [request_id in must_decode for request_id in plan.num_scheduled_tokens]
        assert rows == sorted(rows, reverse=True), "a chunk stands before a decode"

    def check_mirror(self, plan: StepPlan) -> None:
        """Worker and scheduler hold the same requests, in as many blocks, counted as often."""
        mirror = self.worker.requests
        assert set(mirror) == {r.request_id for r in self.scheduler.running}
        assert self.scheduler.stats().num_used_blocks == len({b for r in mirror.values() for b in r.blocks})
        for request_id, row in mirror.items():
            needed = -(-self.scheduler.requests[request_id].num_computed_tokens // self.workload.config.block_size)
            assert len(row.blocks) >= needed
            assert len(set(row.blocks)) == len(row.blocks)
        self.admission_order = [i for i in self.admission_order if i in mirror and not self.is_new(plan, i)]
        self.admission_order += [n.request_id for n in plan.new_requests]
        assert [r.request_id for r in self.scheduler.running] == self.admission_order

    def is_new(self, plan: StepPlan, request_id: str) -> bool:
        return any(new.request_id == request_id for new in plan.new_requests)

    def check_partial_limits(self) -> None:
        config = self.workload.config
        if not config.enable_chunked_prefill:
            return
        partial = [row.new for row in self.worker.requests.values() if row.is_partial]
        assert len(partial) <= config.max_num_partial_prefills
        owed_at_admission = [len(new.token_ids) - new.num_computed_tokens for new in partial]
        num_long = sum(owed > config.long_prefill_token_threshold for owed in owed_at_admission)
        assert num_long <= config.max_long_partial_prefills

    def check_evictions(self, plan: StepPlan, evictions: int) -> None:
        """Who is evicted for its priority makes room for a request of strictly higher priority, in the same plan."""
        if not evictions:
            return
        assert self.workload.config.policy == "priority"
        best = min(self.specs[n.request_id].priority for n in plan.new_requests)
        lower = [i for i in plan.preempted_request_ids if self.specs[i].priority > best]
        assert len(lower) >= evictions, "evicted in vain"

    def check_end(self) -> None:
        """Every request has ended once, with the tokens that it gives alone."""
        config = self.workload.config
        assert self.scheduler.stats().num_used_blocks == 0
        assert not self.scheduler.requests
        for request_id, spec in self.specs.items():
            if request_id in self.refused:
                assert len(spec.prompt) >= config.max_model_len
                continue
            assert (request_id in self.reasons) != (request_id in self.ended_by_caller)
            tokens, reason = expected_output(spec.prompt, spec.params, config.max_model_len)
            given_tokens = spec.output + self.outputs.get(request_id, [])
            if request_id in self.ended_by_caller or self.reasons[request_id] == "error":
                assert given_tokens == tokens[: len(given_tokens)]
                assert request_id in self.ended_by_caller or spec.error_at is not None
            else:
                assert (given_tokens, self.reasons[request_id]) == (tokens, reason)
        stats = self.scheduler.stats()
        assert stats.generation_tokens == sum(len(tokens) for tokens in self.outputs.values())
        new = [request_id for request_id in self.first_hits if not self.specs[request_id].output]
        assert stats.prompt_tokens == sum(len(self.specs[request_id].prompt) for request_id in new)
        assert stats.prompt_tokens_cached == sum(self.first_hits[request_id] for request_id in new)
        assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens


def check(load: Workload) -> CheckedLoop:
    loop = CheckedLoop(load)
    loop.run()
    loop.check_end()
    return loop


@given(st.data())
@settings(max_examples=150, phases=[Phase.generate])  # to look into a failure add Phase.shrink: it takes minutes
def test_rules_hold_after_every_step(data: st.DataObject) -> None:
    check(make_workload(lambda low, high: data.draw(st.integers(low, high))))


@pytest.mark.parametrize("start", range(0, 1500, 250))
def test_rules_hold_after_every_step_by_seed(start: int) -> None:
    for seed in range(start, start + 250):
        check(make_workload(seeded(seed)))


def test_both_depths_give_the_same_outputs() -> None:
    for seed in range(300):
        one = check(make_workload(seeded(seed), faults=False, overlap_depth=1))
        two = check(make_workload(seeded(seed), faults=False, overlap_depth=2))
        assert one.outputs == two.outputs
        assert one.reasons == two.reasons


def test_the_workloads_reach_the_rules() -> None:
    """A check that never meets a preemption, a hit or an accepted draft proves nothing about them."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        loop = check(make_workload(seeded(seed)))
        stats = loop.scheduler.stats()
        seen.update(stats.num_preemptions)
        seen.update(loop.reasons.values())
        seen["resubmitted"] += sum(bool(spec.output) for spec in loop.specs.values())
        seen["hits"] += stats.prefix_cache_hits
        seen["recomputed"] += stats.recomputed_tokens
        seen["accepted"] += stats.num_accepted_tokens
        seen["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
        seen["ended by caller"] += len(loop.ended_by_caller)
    reached = ["blocks", "priority", "epoch", "stop", "length", "error", "hits", "recomputed", "accepted", "rejected"]
    for name in [*reached, "ended by caller", "hold", "resubmitted"]:
        assert seen[name] >= 10, f"{name} is hardly reached: {seen}"


@pytest.mark.full
@pytest.mark.parametrize("start", range(100_000, 110_000, 1000))
def test_rules_hold_at_length(start: int) -> None:
    for seed in range(start, start + 1000):
        check(make_workload(seeded(seed), scale=1 + seed % 3))

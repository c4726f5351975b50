"""Requests that come with output, requests that are held, and what is told of plans in flight."""

import pytest
from step_table import Rig

from scheduler.first_token import num_queued_tokens
from scheduler.plan import StepLoad
from scheduler.request import RequestRefused, RequestStatus


def waiting_ids(rig: Rig) -> list[str]:
    return [request.request_id for request in rig.scheduler.waiting]


# Resubmission


def test_output_counts_as_output_and_only_new_tokens_come_out() -> None:
    rig = Rig()
    rig.add("r", 5, max_tokens=4, output_token_ids=[7, 7])
    plan = rig.plan()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"r": 7}
    assert (plan.new_requests[0].num_prompt_tokens, len(plan.new_requests[0].token_ids)) == (5, 7)
    assert [output.new_token_ids for output in rig.take()] == [[7]]
    rig.plan()
    (last,) = rig.take()
    assert (last.new_token_ids, last.finish_reason) == ([7], "length")
    assert rig.scheduler.stats().generation_tokens == 2


@pytest.mark.parametrize("output", [[], [7, 7]])
def test_the_prompt_of_the_resubmitted_was_counted_before(output: list[int]) -> None:
    rig = Rig()
    rig.add("again", 5, output_token_ids=output, resubmitted=True)
    rig.add("new", 6)
    rig.plan()
    assert rig.scheduler.stats().prompt_tokens == 6


def test_the_resubmitted_wait_behind_the_preempted_and_before_the_new() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("preempted", 5)
    rig.plan()
    rig.add("new", 5, arrival_time=1.0)
    rig.add("late", 5, arrival_time=3.0, output_token_ids=[7])
    rig.add("early", 5, arrival_time=2.0, resubmitted=True)
    rig.add("as early", 5, arrival_time=2.0, output_token_ids=[7])
    rig.scheduler.end_epoch()
    rig.add("earliest", 5, arrival_time=0.0, output_token_ids=[7])
    assert waiting_ids(rig) == ["preempted", "earliest", "early", "as early", "late", "new"]


def test_by_priority_the_resubmitted_go_first_within_their_priority() -> None:
    rig = Rig(policy="priority")
    rig.add("new", 5, priority=1, arrival_time=1.0)
    rig.add("again", 5, priority=1, arrival_time=2.0, output_token_ids=[7])
    rig.add("urgent", 5, priority=0, arrival_time=3.0)
    assert waiting_ids(rig) == ["urgent", "again", "new"]


def test_what_is_complete_is_refused() -> None:
    rig = Rig()
    with pytest.raises(RequestRefused, match="complete at 2") as refusal:
        rig.add("r", 5, max_tokens=2, output_token_ids=[7, 7])
    assert refusal.value.param == "max_tokens"
    with pytest.raises(RequestRefused, match="complete at 4"):
        rig.add("long", 60, max_tokens=32, output_token_ids=[7, 7, 7, 7])
    assert not rig.scheduler.has_unfinished_requests()


def test_cached_tokens_are_those_of_the_prompt() -> None:
    rig = Rig()
    prompt = list(range(500, 505))
    rig.add("first", [*prompt, 7, 7, 7, 7])
    rig.step()
    again = rig.add("again", prompt, output_token_ids=[7, 7, 7, 7])
    rig.plan()
    assert again.num_cached_tokens == 5


# Hold


def test_the_held_compute_nothing_and_leave_their_seat_and_blocks() -> None:
    rig = Rig(max_num_seqs=1, overlap_depth=2)
    rig.add("held", 5, max_tokens=3)
    rig.add("tested", 5, max_tokens=3)
    rig.plan()
    rig.plan()
    rig.scheduler.hold({"held"})
    rig.scheduler.check_integrity()
    assert rig.scheduler.stats().num_used_blocks == 0
    assert rig.scheduler.stats().num_preemptions["hold"] == 1
    assert rig.take() == []
    assert rig.take() == []
    plan = rig.plan()
    assert plan is not None
    assert list(plan.num_scheduled_tokens) == ["tested"]
    assert plan.preempted_request_ids == ["held"]
    rig.scheduler.hold(())
    assert waiting_ids(rig) == ["held"]
    rig.take()
    for _ in range(6):
        rig.plan()
        if rig.in_flight:
            rig.take()
    assert rig.outputs == {"held": [7, 7, 7], "tested": [7, 7, 7]}


def test_when_all_are_held_there_is_no_plan() -> None:
    rig = Rig()
    rig.add("a", 5)
    rig.add("b", 5)
    rig.scheduler.hold({"a", "b"})
    assert rig.plan() is None
    rig.scheduler.hold({"b"})
    plan = rig.plan()
    assert plan is not None
    assert list(plan.num_scheduled_tokens) == ["a"]


# Looking in


def test_positions_are_past_when_all_in_flight_has_come_back() -> None:
    rig = Rig(overlap_depth=2, max_num_batched_tokens=8)
    rig.add("decode", 5)
    rig.plan()
    rig.add("chunk", 20)
    rig.plan()
    assert rig.scheduler.positions_in_flight() == {"decode": 6, "chunk": 20}
    rig.take()
    assert rig.scheduler.positions_in_flight() == {"decode": 6, "chunk": 20}
    rig.scheduler.finish_request("chunk", RequestStatus.FINISHED_ABORTED)
    assert rig.scheduler.positions_in_flight() == {"decode": 6}
    rig.take()
    assert rig.scheduler.requests["decode"].num_tokens == 7
    assert rig.scheduler.positions_in_flight() == {}


def test_load_of_a_plan_while_it_is_in_flight() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("decode", 5)
    rig.plan()
    rig.take()
    rig.add("chunk", 20)
    plan = rig.plan()
    assert plan is not None
    assert rig.scheduler.load_of(plan) == StepLoad(1, 7, 6, 28)
    rig.take()
    with pytest.raises(LookupError, match="not in flight"):
        rig.scheduler.load_of(plan)


def test_queued_tokens_are_those_of_prompts_not_of_decodes() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("decode", 5)
    rig.plan()
    rig.take()
    assert num_queued_tokens(rig.scheduler) == 0
    rig.add("chunk", 20)
    rig.add("waits", 8)
    assert num_queued_tokens(rig.scheduler) == 28
    rig.plan()
    assert num_queued_tokens(rig.scheduler) == 21

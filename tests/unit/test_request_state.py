"""The mirror: random lawful plans against a naive picture, and every unlawful one is an error."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from counting_model import VOCAB_SIZE, CountingModel, next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_planner import NaivePlanner, NaiveStep

from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers.model_runner import ModelRunner, PendingStep
from workers.request_state import PlanError, RequestState
from workers.tensor_parallel import TensorParallel
from workers.vocab import VocabShards

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
CPU = torch.device("cpu")


def make_runner(state: RequestState, num_blocks: int) -> ModelRunner:
    cache = torch.full((num_blocks * state.block_size,), -1, dtype=torch.int64)
    return ModelRunner(CountingModel(state.block_size), [cache], state, VocabShards(TensorParallel(), [VOCAB_SIZE]))


def assert_mirrors(state: RequestState, planner: NaivePlanner) -> None:
    assert set(state.request_ids) == {r.request_id for r in planner.running} | set(
        planner.pending_finished + planner.pending_preempted
    )
    for request in planner.running:
        slot = int(state.slots_of([request.request_id])[0])
        assert state.num_tokens[slot] == len(request.tokens)
        assert state.num_computed[slot] == request.computed
        assert state.token_ids[slot, : len(request.tokens)].tolist() == request.tokens
        assert state.block_table[slot, : len(request.blocks)].tolist() == request.blocks
        assert state.num_blocks[slot] == len(request.blocks)


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=40)
@given(seed=st.integers(0, 10**9), block_size=st.sampled_from([1, 3, 4]), max_num_seqs=st.integers(1, 5))
def test_random_plans_give_the_tokens_of_the_naive_picture(
    depth: int, seed: int, block_size: int, max_num_seqs: int
) -> None:
    num_blocks = 60 // block_size
    planner = NaivePlanner(seed, max_num_seqs, 40, block_size, num_blocks)
    state = RequestState(max_num_seqs, 40, block_size, CPU)
    runner = make_runner(state, num_blocks)
    in_flight: list[tuple[NaiveStep, PendingStep]] = []

    def collect_oldest() -> None:
        step, pending = in_flight.pop(0)
        result = runner.collect(pending)
        assert result.sampled_token_ids == step.expected
        assert list(result.sampled_token_ids) == list(step.expected)
        assert not result.errors
        planner.show_result(step)

    for _ in range(30):
        step = planner.next_step()
        if step is not None:
            in_flight.append((step, runner.launch(step.plan)))
        while len(in_flight) >= (depth if step is not None else 1):
            collect_oldest()
    while in_flight:
        collect_oldest()
    assert_mirrors(state, planner)


def new(request_id: str = "a", length: int = 5, **changes: object) -> NewRequest:
    request = NewRequest(request_id, list(range(length)), length, GREEDY, [0, 1, 2], 0)
    return replace(request, **changes)  # type: ignore[arg-type]


def fresh_state() -> RequestState:
    return RequestState(max_num_seqs=2, max_model_len=12, block_size=4, device=CPU, num_kv_blocks=12)


def test_ids_that_leave_go_before_those_that_come() -> None:
    state = fresh_state()
    state.apply_plan(StepPlan(0, 0, {}, new_requests=[new("a"), new("b")]))
    state.apply_plan(
        StepPlan(
            0,
            1,
            {},
            new_requests=[new("b", length=6), new("c")],
            finished_request_ids=["a"],
            preempted_request_ids=["b"],
        )
    )
    assert state.request_ids == ("b", "c")
    assert state.num_tokens[state.slots_of(["b"])].tolist() == [6]


def test_blocks_are_appended() -> None:
    state = fresh_state()
    state.apply_plan(StepPlan(0, 0, {}, new_requests=[new("a", block_ids=[7])]))
    state.apply_plan(StepPlan(0, 1, {}, new_block_ids={"a": [5, 3]}))
    slot = state.slots_of(["a"])
    assert state.block_table[slot, :3].tolist() == [[7, 5, 3]]
    assert state.num_blocks[slot].tolist() == [3]


def test_a_later_epoch_starts_from_an_empty_mirror() -> None:
    state = fresh_state()
    state.apply_plan(StepPlan(0, 5, {}, new_requests=[new("a"), new("b")]))
    state.apply_plan(StepPlan(1, 0, {}, new_requests=[new("b"), new("c")]))
    assert state.request_ids == ("b", "c")


def test_a_verification_of_an_ended_epoch_leaves_the_new_one_alone() -> None:
    state = fresh_state()
    runner = make_runner(state, num_blocks=3)
    verifying = runner.launch(StepPlan(0, 0, {"a": 6}, new_requests=[new("a")], spec_token_ids={"a": [1]}))
    chunk = runner.launch(StepPlan(1, 0, {"a": 2}, new_requests=[new("a")]))
    runner.collect(verifying)
    runner.collect(chunk)
    slot = state.slots_of(["a"])
    assert (state.num_tokens[slot].tolist(), state.num_computed[slot].tolist()) == ([5], [2])


def test_a_late_verification_leaves_a_reused_slot_alone() -> None:
    state = fresh_state()
    runner = make_runner(state, num_blocks=3)
    prompt = [1, 2, 3]
    draft = [next_token(prompt)]
    plan = StepPlan(0, 0, {"a": 4}, new_requests=[new("a", token_ids=prompt, num_prompt_tokens=3)])
    plan.spec_token_ids["a"] = draft
    verifying = runner.launch(plan)
    again = StepPlan(0, 1, {"a": 2}, new_requests=[new("a", length=5)], preempted_request_ids=["a"])
    chunk = runner.launch(again)
    assert runner.collect(verifying).sampled_token_ids["a"][:1] == draft
    assert runner.collect(chunk).sampled_token_ids == {}
    slot = state.slots_of(["a"])
    assert (state.num_tokens[slot].tolist(), state.num_computed[slot].tolist()) == ([5], [2])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(0, 9, {}), "epoch 1 has begun"),
        (StepPlan(1, 3, {}), "came after plan 3"),
        (StepPlan(1, 2, {}), "came after plan 3"),
        (StepPlan(1, 4, {}, finished_request_ids=["b"]), "'b' is not held"),
        (StepPlan(1, 4, {}, preempted_request_ids=["b"]), "'b' is not held"),
        (StepPlan(1, 4, {}, new_block_ids={"b": [1]}), "'b' is not held"),
        (StepPlan(1, 4, {"b": 1}, spec_token_ids={"b": [1]}), "'b' is not held"),
        (StepPlan(1, 4, {}, spec_token_ids={"a": [1]}), "is not scheduled"),
        (StepPlan(1, 4, {"a": 7}, spec_token_ids={"a": [1] * 7}), "max_model_len is 12"),
        (StepPlan(1, 4, {}, new_block_ids={"a": [1]}), "block table of 4 blocks"),
        (StepPlan(1, 4, {}, new_requests=[new("a")]), "is held already"),
        (StepPlan(1, 4, {}, new_requests=[new("b", length=12)]), "max_model_len is 12"),
        (StepPlan(1, 4, {}, new_requests=[new("b", num_computed_tokens=5)]), "5 computed of 5"),
        (StepPlan(1, 4, {}, new_requests=[new("b", num_prompt_tokens=6)]), "5 tokens, 6 of them its prompt"),
        (StepPlan(1, 4, {}, new_requests=[new("b", block_ids=[0, 12])]), "not all below 12"),
        (StepPlan(1, 4, {}, new_requests=[new("b", block_ids=[-1])]), "not all below 12"),
        (StepPlan(1, 4, {}, new_requests=[new("b", lora_id="x")]), "adapter 'x'"),
        (StepPlan(1, 4, {}, new_requests=[new("b"), new("c")]), r"max_num_seqs \(2\)"),
    ],
)
def test_a_plan_that_contradicts_the_mirror_is_an_error(plan: StepPlan, message: str) -> None:
    state = fresh_state()
    state.apply_plan(StepPlan(1, 3, {}, new_requests=[new("a")]))
    with pytest.raises(PlanError, match=message):
        state.apply_plan(plan)


def test_drafts_before_the_last_ones_are_verified_are_an_error() -> None:
    state = fresh_state()
    state.apply_plan(StepPlan(0, 0, {"a": 6}, new_requests=[new("a")], spec_token_ids={"a": [1]}))
    with pytest.raises(PlanError, match="unverified"):
        state.apply_plan(StepPlan(0, 1, {"a": 1}, spec_token_ids={"a": [2]}))


def test_slots_are_reused_for_ever() -> None:
    state = fresh_state()
    for step in range(20):
        leaving = [f"r{step - 2}"] if step >= 2 else []
        state.apply_plan(StepPlan(0, step, {}, new_requests=[new(f"r{step}")], finished_request_ids=leaving))
    assert state.request_ids == ("r18", "r19")
    assert np.unique(state.slots_of(state.request_ids)).tolist() == [0, 1]

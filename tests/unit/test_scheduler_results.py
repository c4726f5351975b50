"""What results do: tokens, drafts, ends, errors, stays that are over, overlap and epochs."""

import pytest
from step_table import ORDINARY, STOP, Rig

from scheduler.plan import PromptLogprobs, StepResult, TokenLogprobs
from scheduler.request import RequestStatus
from scheduler.sampling_params import SamplingParams


def num_used_blocks(rig: Rig) -> int:
    return rig.scheduler.stats().num_used_blocks


def cached_tokens(rig: Rig, prompt: list[int]) -> int:
    """How much of a prompt the prefix cache holds now, one token less than the whole at most."""
    probe = rig.add("probe", prompt, max_tokens=1)
    hit = rig.scheduler.kv_cache_manager.find_hit(probe)
    rig.scheduler.finish_request("probe", RequestStatus.FINISHED_ABORTED)
    return len(hit) * rig.scheduler.config.block_size


# Overlap: results of a stay that is over


def test_depth_two_plans_ahead_and_no_further() -> None:
    rig = Rig(overlap_depth=2)
    request = rig.add("r", 3, max_tokens=4)
    assert rig.plan() is not None
    assert rig.plan() is not None
    assert (request.num_computed_tokens, request.num_output_placeholders) == (4, 2)
    assert rig.plan() is None
    rig.take()
    assert rig.plan() is not None


def test_depth_one_waits_for_the_result() -> None:
    rig = Rig(overlap_depth=1)
    rig.add("r", 3)
    assert rig.plan() is not None
    assert rig.plan() is None


def test_an_abort_voids_both_results_in_flight() -> None:
    rig = Rig(overlap_depth=2)
    rig.add("gone", 5)
    rig.add("stays", 5)
    rig.plan()
    rig.plan()
    rig.scheduler.finish_request("gone", RequestStatus.FINISHED_ABORTED)
    rig.scheduler.check_integrity()
    assert num_used_blocks(rig) == 2
    assert [output.request_id for output in rig.take()] == ["stays"]
    assert [output.request_id for output in rig.take()] == ["stays"]
    plan = rig.plan()
    assert plan is not None
    assert plan.finished_request_ids == ["gone"]
    assert rig.scheduler.stats().generation_tokens == 2


def test_a_preemption_voids_the_result_of_the_stay_before() -> None:
    rig = Rig(overlap_depth=2, policy="priority", max_num_seqs=1)
    victim = rig.add("victim", 5, priority=1)
    rig.plan()
    rig.add("urgent", 3, max_tokens=1, priority=0)
    plan = rig.plan()
    assert plan is not None
    assert plan.preempted_request_ids == ["victim"]
    assert rig.take() == []  # the victim's token of its first stay
    assert victim.num_tokens == 5
    assert rig.finish_reasons == {}
    rig.take()
    assert rig.finish_reasons == {"urgent": "length"}
    rig.step()
    assert rig.outputs["victim"] == [ORDINARY]


def test_a_result_of_an_earlier_stay_does_not_count_for_a_later_one() -> None:
    """Preempted and admitted again while the first plan is still in flight."""
    rig = Rig(num_blocks=4, max_model_len=16, overlap_depth=2)
    rig.add("grammar", 4, has_grammar=True)
    rig.scheduler.mark_grammar_ready("grammar")
    request = rig.add("r", 8)  # 1 + 2 blocks; the last one is for the first token of either
    rig.plan()
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == 1
    pool.allocate(1)
    assert rig.scheduler.schedule() is None  # one waits for its result, the other preempts itself
    assert request.status is RequestStatus.PREEMPTED
    pool.release([pool.num_blocks - 1])
    rig.scheduler.finish_request("grammar", RequestStatus.FINISHED_ABORTED)
    rig.plan()
    assert (request.status, request.num_output_placeholders) == (RequestStatus.RUNNING, 1)
    assert rig.take() == []
    assert (request.num_output_placeholders, request.num_tokens) == (1, 8)
    rig.take()
    assert rig.outputs["r"] == [ORDINARY]


def test_a_stop_found_late_leaves_no_trace() -> None:
    rig = Rig(overlap_depth=2)
    rig.worker.outputs["r"] = [5, STOP, 6]
    prompt = [100, 101]
    rig.add("r", prompt)
    rig.plan()
    rig.plan()
    rig.take()
    rig.plan()  # computes the stop token, which nobody knows to be one yet
    rig.take()
    assert rig.finish_reasons == {"r": "stop"}
    assert num_used_blocks(rig) == 0
    assert rig.take() == []
    assert rig.outputs["r"] == [5, STOP]
    assert rig.scheduler.stats().generation_tokens == 2
    # Three tokens were known and computed: no full block, so the fourth, the stop token, is not cached.
    assert cached_tokens(rig, [*prompt, 5, STOP, 9]) == 0


def test_a_request_with_a_grammar_runs_in_every_second_plan() -> None:
    rig = Rig(overlap_depth=2)
    rig.add("grammar", 3, has_grammar=True)
    rig.scheduler.mark_grammar_ready("grammar")
    rig.add("free", 3)
    for _ in range(4):
        rig.plan()
        rig.plan()
        rig.take()
    while rig.in_flight:
        rig.take()
    rig.expect("""
        grammar  free
        3+       3+
        .        1+
        1+       1+
        .        1+
        1+       1+
    """)


# Drafts


def test_accepted_drafts_count_and_rejected_ones_are_rolled_back() -> None:
    rig = Rig(uses_drafter=True)
    rig.worker.outputs["r"] = [11, 12, 13, 14, 15, 16]
    rig.worker.drafts["r"] = [[12, 13, 99], [15, 16]]
    request = rig.add("r", 3, max_tokens=6)
    rig.step()
    plan = rig.step()
    assert plan.spec_token_ids == {"r": [12, 13, 99]}
    assert list(request.output_token_ids) == [11, 12, 13, 14]
    assert request.num_computed_tokens == 6  # the rejected draft's place is to be computed again
    rig.step()
    rig.expect("""
        r
        3+
        4+++
        2++
    """)
    assert rig.finish_reasons == {"r": "length"}
    stats = rig.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 4, 3)


def test_everything_after_the_stopping_token_is_dropped() -> None:
    rig = Rig(uses_drafter=True)
    rig.worker.outputs["r"] = [11, 12, STOP, 14, 15]
    rig.worker.drafts["r"] = [[12, STOP, 14]]
    prompt = [100, 101]
    rig.add("r", prompt)
    rig.run(2)
    assert rig.outputs["r"] == [11, 12, STOP]
    assert rig.finish_reasons == {"r": "stop"}
    # Its five tokens fill one block; the draft after the stop token was computed but is in no answer.
    assert cached_tokens(rig, [*prompt, 11, 12, STOP]) == 4


def test_drafts_are_not_published_before_they_are_verified() -> None:
    rig = Rig(uses_drafter=True)
    rig.worker.outputs["r"] = [11, 12, 13]
    rig.worker.drafts["r"] = [[12, 99]]
    prompt = [100, 101]
    rig.add("r", prompt)
    rig.step()
    rig.plan()
    assert cached_tokens(rig, [*prompt, 11, 12, 0]) == 0
    rig.take()
    assert cached_tokens(rig, [*prompt, 11, 12, 0]) == 4
    assert cached_tokens(rig, [*prompt, 11, 99, 0]) == 0


def test_the_place_of_a_rejected_draft_is_not_published() -> None:
    rig = Rig(uses_drafter=True)
    rig.worker.outputs["r"] = [11, 12]
    rig.worker.drafts["r"] = [[99]]
    prompt = [100, 101]
    rig.add("r", prompt)
    rig.run(2)
    # The block's fourth token is known, but what was computed in its place is the draft.
    assert rig.outputs["r"] == [11, 12]
    assert cached_tokens(rig, [*prompt, 11, 12, 0]) == 0


def test_drafts_that_come_too_late_are_not_taken() -> None:
    rig = Rig(overlap_depth=2)
    rig.worker.drafts["r"] = [[7], [7]]
    request = rig.add("r", 3)
    rig.plan()
    rig.plan()
    rig.take()  # the next step is planned already
    assert (request.num_output_placeholders, request.spec_token_ids) == (1, [])
    rig.take()
    assert (request.num_output_placeholders, request.spec_token_ids) == (0, [7])


def test_a_drafter_makes_requests_wait_for_results() -> None:
    rig = Rig(overlap_depth=2, uses_drafter=True)
    rig.add("r", 3)
    rig.plan()
    assert rig.plan() is None


# Stop conditions


def test_the_stopping_token_is_part_of_the_output() -> None:
    rig = Rig()
    rig.worker.outputs["r"] = [5, STOP]
    rig.add("r", 3)
    rig.run(2)
    assert rig.outputs["r"] == [5, STOP]
    assert rig.finish_reasons == {"r": "stop"}
    assert not rig.scheduler.has_unfinished_requests()
    assert num_used_blocks(rig) == 0


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    rig = Rig()
    rig.worker.outputs["r"] = [5, STOP]
    rig.add("r", 3, max_tokens=2)
    rig.run(2)
    assert rig.finish_reasons == {"r": "stop"}


@pytest.mark.parametrize(("max_model_len", "max_tokens", "num_outputs"), [(64, 3, 3), (8, 99, 4)])
def test_length_limits_are_not_gated_by_min_tokens(max_model_len: int, max_tokens: int, num_outputs: int) -> None:
    rig = Rig(max_model_len=max_model_len)
    rig.add("r", 4, sampling_params=SamplingParams(max_tokens=max_tokens, min_tokens=99))
    rig.run_to_end()
    assert rig.outputs["r"] == [ORDINARY] * num_outputs
    assert rig.finish_reasons == {"r": "length"}


def test_a_partial_prefill_yields_no_output() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("r", 10)
    plan = rig.plan()
    assert plan is not None
    assert rig.take() == []


def test_logprobs_travel_with_their_tokens() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.worker.outputs["r"] = [5, STOP, 6]
    rig.worker.drafts["r"] = [[STOP, 6]]
    rig.add("r", 10)
    prompt_logprobs = PromptLogprobs(1, [TokenLogprobs(1, -0.5, [])])
    rig.plan()
    rig.in_flight[0][1].prompt_logprobs["r"] = prompt_logprobs
    (output,) = rig.take()
    assert (output.new_token_ids, output.prompt_logprobs) == ([], prompt_logprobs)
    rig.step()
    rig.plan()
    logprobs = [TokenLogprobs(token_id, -0.1, []) for token_id in (STOP, 6, ORDINARY)]
    rig.in_flight[0][1].logprobs["r"] = logprobs
    (output,) = rig.take()
    assert (output.new_token_ids, output.logprobs) == ([STOP], logprobs[:1])


# Errors and ends from outside


def test_an_error_ends_one_request_and_withdraws_its_blocks() -> None:
    rig = Rig()
    prompt = list(range(100, 113))
    rig.add("bad", prompt)
    rig.add("good", 9)
    rig.step()
    assert cached_tokens(rig, prompt) == 12
    rig.worker.errors["bad"] = "NaN logits"
    rig.plan()
    outputs = {output.request_id: output for output in rig.take()}
    assert (outputs["bad"].finish_reason, outputs["bad"].error, outputs["bad"].new_token_ids) == (
        "error",
        "NaN logits",
        [],
    )
    assert outputs["good"].new_token_ids == [ORDINARY]
    assert cached_tokens(rig, prompt) == 0
    assert [request.request_id for request in rig.scheduler.running] == ["good"]
    assert rig.step().finished_request_ids == ["bad"]


def test_an_error_in_a_chunk_ends_the_request() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.worker.errors["r"] = "bad chunk"
    rig.add("r", 20)
    rig.step()
    assert rig.finish_reasons == {"r": "error"}
    assert num_used_blocks(rig) == 0


def test_an_error_for_an_aborted_request_means_nothing() -> None:
    rig = Rig()
    rig.worker.errors["r"] = "NaN logits"
    rig.add("r", 4)
    rig.plan()
    rig.scheduler.finish_request("r", RequestStatus.FINISHED_ABORTED)
    assert rig.take() == []


@pytest.mark.parametrize("state", ["waiting", "grammar", "running", "preempted"])
def test_an_abort_frees_everything_in_any_state(state: str) -> None:
    rig = Rig(policy="priority", max_num_seqs=1)
    request = rig.add("r", 9, has_grammar=state == "grammar", priority=1)
    if state in ("running", "preempted"):
        rig.step()
    if state == "preempted":
        rig.add("urgent", 3, priority=0)
        rig.step()
        rig.scheduler.finish_request("urgent", RequestStatus.FINISHED_ABORTED)
    rig.scheduler.finish_request("r", RequestStatus.FINISHED_ABORTED)
    rig.scheduler.finish_request("r", RequestStatus.FINISHED_ABORTED)  # it may have just ended
    rig.scheduler.check_integrity()
    stats = rig.scheduler.stats()
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert not rig.scheduler.has_unfinished_requests()
    assert (stats.num_used_blocks, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    assert stats.num_requests_waiting_for_grammar == 0
    rig.add("next", 3, priority=2)
    finished = {"waiting": [], "grammar": [], "running": ["r"], "preempted": ["urgent"]}[state]
    assert rig.step().finished_request_ids == finished  # what the workers still hold


def test_a_request_can_only_be_finished_with_a_finished_status() -> None:
    rig = Rig()
    rig.add("r", 4)
    with pytest.raises(ValueError, match="PREEMPTED"):
        rig.scheduler.finish_request("r", RequestStatus.PREEMPTED)


def test_ids_of_a_plan_that_is_not_sent_go_into_the_next() -> None:
    rig = Rig()
    rig.add("r", 4, max_tokens=1)
    rig.step()
    assert rig.plan() is None
    rig.add("next", 4)
    assert rig.step().finished_request_ids == ["r"]
    assert rig.step().finished_request_ids == []


# Publication


def test_blocks_with_sampled_tokens_are_shared_when_the_result_is_there() -> None:
    rig = Rig(overlap_depth=2)
    prompt = [100, 101, 102]
    rig.worker.outputs["r"] = [5, 6]
    rig.add("r", prompt)
    rig.plan()
    rig.plan()  # computes the first output token, which fills the block
    rig.take()
    assert cached_tokens(rig, [*prompt, 5, 0]) == 0
    rig.take()
    assert cached_tokens(rig, [*prompt, 5, 0]) == 4


def test_a_request_preempted_in_its_own_step_publishes_nothing() -> None:
    """Its token, which would fill the block, leaves the plan again."""
    rig = Rig(policy="priority", max_num_seqs=1)
    prompt = [100, 101, 102]
    rig.worker.outputs["r"] = [5, 6]
    rig.add("r", prompt, priority=1)
    rig.step()
    rig.add("urgent", 3, priority=0)
    rig.step()
    assert cached_tokens(rig, [*prompt, 5, 0]) == 0


def test_recomputed_output_is_shared_when_the_result_is_there() -> None:
    rig = Rig(policy="priority", max_num_seqs=1)
    prompt = [100, 101, 102]
    rig.worker.outputs["r"] = [5, 6]
    rig.add("r", prompt, priority=1)
    rig.run(1)
    rig.add("urgent", 3, max_tokens=1, priority=0)
    rig.step()
    rig.plan()  # computes prompt and output again, a whole block
    assert rig.in_flight[0][0].num_scheduled_tokens == {"r": 4}
    assert cached_tokens(rig, [*prompt, 5, 0]) == 0
    rig.take()
    assert cached_tokens(rig, [*prompt, 5, 0]) == 4


# Epochs


def test_the_end_of_an_epoch_starts_everything_over() -> None:
    rig = Rig(overlap_depth=2, max_num_seqs=3)
    prompts = {name: list(range(start, start + 9)) for name, start in (("a", 100), ("b", 200), ("c", 300))}
    for name, prompt in prompts.items():
        rig.add(name, prompt)
    rig.add("waits", 4)
    rig.plan()
    rig.plan()
    rig.take()
    stale = rig.in_flight.popleft()
    rig.plan()
    rig.in_flight.clear()
    rig.scheduler.finish_request("b", RequestStatus.FINISHED_ABORTED)
    rig.scheduler.end_epoch()
    rig.scheduler.check_integrity()
    assert rig.scheduler.epoch == 1
    assert [request.request_id for request in rig.scheduler.waiting] == ["a", "c", "waits"]
    assert rig.scheduler.requests["a"].status is RequestStatus.PREEMPTED
    assert num_used_blocks(rig) == 0
    assert cached_tokens(rig, prompts["a"]) == 0
    assert rig.scheduler.update_from_result(*stale) == []
    rig.worker.num_tokens.clear()
    rig.worker.progress.clear()
    plan = rig.plan()
    assert plan is not None
    assert (plan.epoch, plan.finished_request_ids, plan.preempted_request_ids) == (1, [], [])
    assert [(new.request_id, new.num_computed_tokens) for new in plan.new_requests] == [
        ("a", 0),
        ("c", 0),
        ("waits", 0),
    ]
    assert [len(new.token_ids) for new in plan.new_requests] == [10, 10, 4]
    assert rig.scheduler.stats().num_preemptions["epoch"] == 2
    assert rig.scheduler.stats().recomputed_tokens == 20


# Results that cannot be


def test_results_come_in_the_order_of_the_plans() -> None:
    rig = Rig(overlap_depth=2)
    rig.add("r", 4)
    rig.plan()
    rig.plan()
    plan, result = rig.in_flight[1]
    with pytest.raises(ValueError, match="the oldest in flight is 0"):
        rig.scheduler.update_from_result(plan, result)
    with pytest.raises(ValueError, match="plan 0 came with the result of step 1"):
        rig.scheduler.update_from_result(rig.in_flight[0][0], result)


@pytest.mark.parametrize("token_ids", [[], [1, 2]])
def test_a_sampling_request_brings_the_tokens_it_must(token_ids: list[int]) -> None:
    rig = Rig()
    rig.add("r", 4)
    plan = rig.scheduler.schedule()
    assert plan is not None
    with pytest.raises(ValueError, match=f"{len(token_ids)} tokens for request 'r', which verified 0 drafts"):
        rig.scheduler.update_from_result(plan, StepResult(0, 0, {"r": token_ids}))

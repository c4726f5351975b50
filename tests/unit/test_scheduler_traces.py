"""Worked traces of the scheduler as step tables, and the rules of order, admission and preemption."""

import pytest
from step_table import Rig

from scheduler.budget import StaticBudget, StepBudget
from scheduler.config import SchedulerConfig
from scheduler.plan import SchedulerStats
from scheduler.request import Request, RequestRefused, RequestStatus
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step import Step


def six_decodes(**config: int | bool) -> Rig:
    rig = Rig(block_size=16, **config)
    for index in range(6):
        rig.add(f"d{index}", 1)
    rig.step()
    rig.rows.clear()
    return rig


# Worked traces


def test_a_prompt_shares_the_budget_with_decodes() -> None:
    rig = six_decodes(max_num_batched_tokens=16)
    rig.add("prompt", 40)
    rig.run(5)
    rig.expect("""
        d0  d1  d2  d3  d4  d5  prompt
        1+  1+  1+  1+  1+  1+  10
        1+  1+  1+  1+  1+  1+  10
        1+  1+  1+  1+  1+  1+  10
        1+  1+  1+  1+  1+  1+  10+
        1+  1+  1+  1+  1+  1+  1+
    """)


def test_b_without_chunking_the_budget_must_hold_a_whole_prompt() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(16\) is below max_model_len \(64\)"):
        six_decodes(max_num_batched_tokens=16, enable_chunked_prefill=False)


def test_b_without_chunking_a_prompt_is_one_step() -> None:
    rig = six_decodes(max_num_batched_tokens=64, enable_chunked_prefill=False)
    rig.add("prompt", 40)
    plan = rig.step()
    assert sum(plan.num_scheduled_tokens.values()) == 46
    rig.expect("""
        d0  d1  d2  d3  d4  d5  prompt
        1+  1+  1+  1+  1+  1+  40+
    """)


def test_b_without_chunking_a_prompt_that_does_not_fit_whole_waits() -> None:
    rig = Rig(max_num_batched_tokens=64, enable_chunked_prefill=False, long_prefill_token_threshold=8)
    rig.add("a", 40)
    rig.add("b", 40)
    rig.run(2)
    rig.expect("""
        a    b
        40+  .
        1+   40+
    """)


def test_c_a_short_prompt_overtakes_a_long_one() -> None:
    rig = Rig(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_num_partial_prefills=2)
    rig.add("long", 40)
    rig.add("short", 6)
    rig.run(6)
    rig.expect("""
        long  short
        8     6+
        8     1+
        8     1+
        8     1+
        8+    1+
        1+    1+
    """)


def test_d_a_preempted_request_resumes_where_the_cache_ends() -> None:
    rig = Rig(
        num_blocks=256,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        max_num_seqs=1,
        block_size=16,
        policy="priority",
    )
    victim = rig.add("victim", 2050, priority=1)
    rig.step()
    assert victim.num_computed_tokens == 2048
    # 156 blocks: the 128 that were never used, and the last 28 of the victim's 128 full ones.
    rig.add("urgent", 156 * 16, max_tokens=1, priority=0)
    plan = rig.step()
    assert plan.preempted_request_ids == ["victim"]
    assert (victim.status, victim.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    rig.step()
    plan = rig.step()
    assert [new.num_computed_tokens for new in plan.new_requests] == [1600]
    rig.expect("""
        victim  urgent
        2048    .
        .       2048
        .       448+
        450+    .
    """)
    assert rig.scheduler.stats().recomputed_tokens == 448
    assert victim.num_cached_tokens == 0


def test_e_a_cached_prompt_still_computes_its_last_block() -> None:
    rig = Rig(block_size=16, max_model_len=128)
    prompt = list(range(100, 164))
    rig.add("first", prompt, max_tokens=1)
    rig.step()
    second = rig.add("second", prompt, max_tokens=1)
    plan = rig.step()
    assert plan.new_requests[0].num_computed_tokens == second.num_cached_tokens == 48
    rig.expect("""
        first  second
        64+    .
        .      16+
    """)


def test_f_adapters_share_blocks_with_themselves_only() -> None:
    rig = Rig(num_blocks=512, max_model_len=2048, max_num_batched_tokens=8192, block_size=16)
    prefix = list(range(1024))
    rig.add("a1", [*prefix, 5001], lora_id="A")
    rig.plan()
    rig.take()
    rig.add("a2", [*prefix, 5002, 5003], lora_id="A")
    rig.add("b", [*prefix, 5004], lora_id="B")
    rig.step()
    rig.expect("""
        a1     a2  b
        1025+  .   .
        1+     2+  1025+
    """)
    tables = rig.scheduler.kv_cache_manager.tables
    assert tables["a1"][:64] == tables["a2"][:64]
    assert not set(tables["a1"]) & set(tables["b"])


def test_a_burst_shares_prompt_blocks_from_the_next_plan_on() -> None:
    rig = Rig(overlap_depth=2)
    prompt = list(range(100, 117))
    rig.add("first", prompt)
    rig.plan()  # its result has not come when the others are planned
    rig.add("second", prompt)
    rig.add("third", prompt)
    rig.plan()
    rig.take()
    rig.take()
    rig.expect("""
        first  second  third
        17+    .       .
        1+     1+      1+
    """)


def test_requests_of_one_plan_do_not_share_yet() -> None:
    rig = Rig()
    prompt = list(range(100, 109))
    rig.add("first", prompt)
    rig.add("second", prompt)
    rig.add("salted", prompt, cache_salt="s")
    rig.step()
    rig.add("third", prompt)
    rig.add("salted again", prompt, cache_salt="s")
    rig.add("other salt", prompt, cache_salt="t")
    plan = rig.step()
    assert {new.request_id: new.num_computed_tokens for new in plan.new_requests} == {
        "third": 8,
        "salted again": 8,
        "other salt": 0,
    }


# Order within a step


def test_decodes_come_before_a_chunk_that_was_admitted_first() -> None:
    rig = Rig(max_num_batched_tokens=8, max_num_partial_prefills=2, long_prefill_token_threshold=4)
    rig.add("long", 30)
    rig.add("short", 3)
    rig.run(3)
    rig.expect("""
        long  short
        4     3+
        4     1+
        4     1+
    """)
    plan = rig.step()
    assert list(plan.num_scheduled_tokens) == ["short", "long"]


def test_every_decode_gets_its_token_when_the_budget_is_just_enough() -> None:
    rig = Rig(max_num_batched_tokens=4, max_num_seqs=4)
    rig.add("d0", 1)
    rig.add("d1", 1)
    rig.add("d2", 1)
    rig.step()
    rig.add("chunk", 9)
    rig.run(2)
    rig.expect("""
        d0  d1  d2  chunk
        1+  1+  1+  .
        1+  1+  1+  1
        1+  1+  1+  1
    """)


def test_the_last_token_is_never_computed() -> None:
    rig = Rig(max_model_len=16, overlap_depth=2)
    rig.add("r", 14, max_tokens=99)
    rig.plan()
    rig.plan()
    assert rig.plan() is None
    rig.take()
    assert rig.plan() is None  # the token that reaches the limit is on its way
    rig.take()
    rig.expect("""
        r
        14+
        1+
    """)
    assert rig.finish_reasons == {"r": "length"}


def test_drafts_leave_a_block_of_the_budget_to_prompts() -> None:
    rig = Rig(max_num_batched_tokens=10, uses_drafter=True)
    rig.worker.drafts["d"] = [[7] * 8, [7] * 8]
    rig.add("d", 3)
    rig.step()
    rig.add("prompt", 20)
    rig.step()
    rig.expect("""
        d         prompt
        3+        .
        6++++++   4
    """)


def test_drafts_take_the_whole_budget_when_no_prompt_wants_it() -> None:
    rig = Rig(max_num_batched_tokens=8, uses_drafter=True)
    rig.worker.drafts["d"] = [[7] * 12]
    rig.add("d", 3)
    rig.add("compiling", 20, has_grammar=True)  # competes for nothing
    rig.run(2)
    rig.expect("""
        d          compiling
        3+         .
        8++++++++  .
    """)


def test_drafts_take_free_blocks_only() -> None:
    rig = Rig(num_blocks=4, max_model_len=16, uses_drafter=True)
    rig.worker.drafts["a"] = [[7] * 8]
    rig.add("a", 3)
    rig.add("b", 6)  # 1 + 2 blocks, 1 left
    rig.step()
    plan = rig.step()
    assert plan.spec_token_ids == {"a": [7] * 4}
    rig.expect("""
        a       b
        3+      6+
        5+++++  1+
    """)
    assert sum(rig.scheduler.stats().num_preemptions.values()) == 0


def test_drafts_obey_the_threshold_and_the_length() -> None:
    rig = Rig(long_prefill_token_threshold=3, uses_drafter=True)
    rig.worker.drafts["a"] = [[7] * 8]
    rig.worker.drafts["b"] = [[7] * 8]
    rig.add("a", 2)
    rig.add("b", 2, max_tokens=3)
    rig.run(2)
    rig.expect("""
        a     b
        2+    2+
        3+++  2++
    """)
    assert rig.finish_reasons == {"b": "length"}


# Admission


def test_the_first_that_does_not_fit_ends_admission() -> None:
    rig = Rig(num_blocks=16, max_num_batched_tokens=60)
    rig.add("running", 30)
    rig.step()
    rig.add("big", 40)  # 10 blocks; 8 are free, less one for the running request
    rig.add("small", 1)
    rig.run(2)
    rig.expect("""
        running  big  small
        30+      .    .
        1+       .    .
        1+       .    .
    """)
    assert [request.request_id for request in rig.scheduler.waiting] == ["big", "small"]


def test_no_seat_ends_admission() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("a", 4, max_tokens=2)
    rig.add("b", 4)
    rig.run(3)
    rig.expect("""
        a   b
        4+  .
        1+  .
        .   4+
    """)


@pytest.mark.parametrize(("num_prompt_tokens", "scheduled"), [(20, "4"), (21, ".")])
def test_blocks_that_running_chunks_owe_are_not_given_away(num_prompt_tokens: int, scheduled: str) -> None:
    rig = Rig(
        num_blocks=16,
        max_num_batched_tokens=12,
        max_num_partial_prefills=2,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=8,
    )
    rig.add("chunk", 40)  # 10 blocks, of which this step takes 2
    rig.add("next", num_prompt_tokens)  # 14 blocks are free - 8 owed - 1 for the running request = 5
    rig.step()
    rig.expect(f"""
        chunk  next
        8      {scheduled}
    """)


def test_held_back_prompts_keep_their_place_and_let_short_ones_pass() -> None:
    rig = Rig(max_num_batched_tokens=24, max_num_partial_prefills=1, long_prefill_token_threshold=8)
    rig.add("long1", 24)
    rig.add("long2", 20)
    rig.add("long3", 20)
    rig.add("short", 6)
    rig.step()
    assert [request.request_id for request in rig.scheduler.waiting] == ["long2", "long3"]
    rig.run(4)
    rig.expect("""
        long1  long2  long3  short
        8      .      .      6+
        8      .      .      1+
        8+     8      .      1+
        1+     8      .      1+
        1+     4+     8      1+
    """)


def test_a_short_partial_prompt_may_join_a_long_one_but_not_a_second_long_one() -> None:
    rig = Rig(
        max_num_batched_tokens=12,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
    )
    rig.add("long1", 40)
    rig.add("long2", 40)
    rig.add("short", 7)
    rig.run(2)
    rig.expect("""
        long1  long2  short
        8      .      4
        8      .      3+
    """)


def test_a_prompt_as_long_as_the_threshold_is_not_long() -> None:
    rig = Rig(max_num_batched_tokens=12, long_prefill_token_threshold=8, max_num_partial_prefills=2)
    rig.add("long", 40)
    rig.add("nine", 9)
    rig.add("eight", 8)
    rig.step()
    rig.expect("""
        long  nine  eight
        8     .     4
    """)


def test_long_stays_long_until_its_prompt_is_done() -> None:
    rig = Rig(
        max_num_batched_tokens=12,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=3,
        max_long_partial_prefills=1,
    )
    rig.add("d", 1)
    rig.step()
    rig.add("long1", 20)
    rig.run(2)  # it owes 4 now, below the threshold
    rig.add("chunk", 7)
    rig.add("long2", 20)
    rig.step()
    rig.expect("""
        d   long1  chunk  long2
        1+  .      .      .
        1+  8      .      .
        1+  8      .      .
        1+  4+     7+     .
    """)


def test_running_chunks_still_run_when_admission_has_ended() -> None:
    rig = Rig(
        policy="priority",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_num_partial_prefills=2,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=4,
    )
    rig.add("first", 30, priority=1)
    rig.add("chunk", 30, priority=1, arrival_time=2.0)
    rig.step()
    rig.add("between", 30, priority=1, arrival_time=1.0)  # ready, but there is no seat
    rig.step()
    rig.expect("""
        first  chunk  between
        4      4      .
        4      4      .
    """)


def test_a_request_whose_grammar_compiles_is_skipped_in_place() -> None:
    rig = Rig(max_num_seqs=2)
    rig.add("grammar", 4, has_grammar=True)
    rig.add("a", 4)
    rig.step()
    assert rig.scheduler.stats().num_requests_waiting_for_grammar == 1
    rig.add("b", 4)
    rig.scheduler.mark_grammar_ready("grammar")
    rig.scheduler.mark_grammar_ready("nobody")
    rig.step()
    rig.expect("""
        grammar  a   b
        .        4+  .
        4+       1+  .
    """)
    assert rig.scheduler.stats().num_requests_waiting_for_grammar == 0


def test_prompt_logprobs_skip_the_cache() -> None:
    rig = Rig()
    prompt = list(range(100, 110))
    rig.add("plain", prompt)
    rig.step()
    rig.add("echo", prompt, sampling_params=SamplingParams(max_tokens=4, num_prompt_logprobs=0))
    plan = rig.step()
    assert plan.num_scheduled_tokens["echo"] == 10
    assert rig.scheduler.stats().prefix_cache_queries == 10  # of the plain one alone


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param", "message"),
    [
        (16, 1, "prompt", "the prompt has 16 tokens; the model length of 16 tokens leaves room for at most 15"),
        (0, 1, "prompt", "the prompt is empty"),
        (4, 0, "max_tokens", "max_tokens is 0"),
    ],
)
def test_what_can_never_be_served_is_refused(num_prompt_tokens: int, max_tokens: int, param: str, message: str) -> None:
    rig = Rig(max_model_len=16)
    with pytest.raises(RequestRefused, match=message) as refusal:
        rig.add("r", num_prompt_tokens, max_tokens=max_tokens)
    assert refusal.value.param == param
    assert not rig.scheduler.has_unfinished_requests()


def test_an_id_in_use_is_refused() -> None:
    rig = Rig()
    rig.add("r", 4)
    with pytest.raises(RequestRefused, match="'r' is in use"):
        rig.add("r", 4)


def test_max_tokens_is_clipped_to_the_model_length() -> None:
    rig = Rig(max_model_len=16)
    request = rig.add("r", 15, max_tokens=99)
    assert (request.max_tokens, request.sampling_params.max_tokens) == (1, 99)
    rig.step()
    assert rig.finish_reasons == {"r": "length"}


def test_the_blocks_must_hold_a_whole_sequence() -> None:
    with pytest.raises(ValueError, match=r"max_model_len \(64\) is above what 15 blocks of 4 tokens hold \(60\)"):
        Rig(num_blocks=15)


# Preemption


def test_fcfs_preempts_the_most_recently_admitted() -> None:
    rig = Rig(num_blocks=5, max_model_len=16)
    rig.add("old", 7)
    rig.add("new", 7)
    rig.run(3)
    assert rig.scheduler.stats().num_preemptions["blocks"] == 1
    rig.expect("""
        old  new
        7+   7+
        1+   1+
        1+   .
    """)
    assert [request.request_id for request in rig.scheduler.waiting] == ["new"]
    rig.run_to_end()
    assert rig.outputs["old"] == rig.outputs["new"] == [7] * 9


def test_a_victim_in_this_plan_leaves_it_without_trace() -> None:
    rig = Rig(num_blocks=11, max_model_len=44, policy="priority", long_prefill_token_threshold=8)
    rig.worker.drafts["low"] = [[1], [7] * 7, [7] * 7]
    low = rig.add("low", 4, priority=9)
    rig.step()
    rig.add("high", 32, priority=0)
    rig.run(2)
    rig.expect("""
        low       high
        4+        .
        2+        8
        8++++++++ 8
    """)
    # Its next eight tokens would take two blocks more, which "high" misses then.
    assert low.spec_token_ids == [7] * 7
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"high": 8}
    assert plan.new_block_ids.keys() == {"high"}
    assert plan.spec_token_ids == {}
    assert plan.preempted_request_ids == ["low"]
    assert (low.status, low.num_computed_tokens, low.num_output_placeholders) == (RequestStatus.PREEMPTED, 0, 0)
    assert low.spec_token_ids == []


def test_the_tokens_of_a_victim_return_to_the_budget() -> None:
    rig = Rig(num_blocks=4, max_model_len=16, max_num_batched_tokens=3, max_num_seqs=3, policy="priority")
    rig.add("decode", 1, priority=9)
    rig.step()
    rig.add("chunk", 11, priority=0)  # all 3 blocks that are free: it may not be admitted beside the other
    rig.run(4)
    rig.expect("""
        decode  chunk
        1+      .
        .       3
        .       3
        .       3
        .       2+
    """)


def test_a_request_taken_back_leaves_no_trace_in_the_step() -> None:
    step = Step(budget=10)
    old = Request("old", [1] * 9, SamplingParams(max_tokens=4))
    new = Request("new", [1] * 9, SamplingParams(max_tokens=4))
    new.num_computed_tokens = 4
    step.add(old, 1, [3])
    step.add(old, 2, [4])
    step.spec_token_ids["old"] = [7]
    step.add_new(new, 3, [1, 2])
    assert (step.budget, step.new_block_ids, list(step.partials)) == (4, {"old": [3, 4]}, ["new"])
    assert step.take_back(old)  # the workers hold it
    assert not step.take_back(new)
    assert step == Step(budget=10, preempted={"old", "new"})
    assert (old.num_computed_tokens, new.num_computed_tokens) == (0, 4)


def test_preemption_for_a_running_request_ends_admission() -> None:
    rig = Rig(num_blocks=5, max_model_len=16)
    rig.add("old", 7)
    rig.add("new", 7)
    rig.run(2)
    rig.add("tiny", 1)
    plan = rig.step()
    assert list(plan.num_scheduled_tokens) == ["old"]


def low_before_high(rig: Rig) -> None:
    """Two decodes with full tables and one free block between them; the lower priority is served first."""
    rig.add("low", 6, priority=9)
    rig.step()
    rig.add("high", 7, priority=0)
    rig.run(2)
    rig.rows.clear()
    assert rig.scheduler.stats().num_used_blocks == 4


def test_preemption_for_a_running_request_ends_admission_of_better_ones_too() -> None:
    rig = Rig(num_blocks=5, max_model_len=16, policy="priority")
    low_before_high(rig)
    rig.add("tiny", 1, priority=5)  # would fit beside "high" once "low" is gone
    rig.run(2)
    rig.expect("""
        low  high  tiny
        .    1+    .
        .    1+    1+
    """)


def test_a_request_that_preempts_itself_does_not_end_admission_of_better_ones() -> None:
    rig = Rig(num_blocks=5, max_model_len=16, policy="priority")
    rig.add("high", 7, priority=0)
    rig.add("low", 7, priority=9)
    rig.run(2)
    rig.add("tiny", 1, priority=5)
    plan = rig.step()
    assert plan.preempted_request_ids == ["low"]
    assert list(plan.num_scheduled_tokens) == ["high", "tiny"]


def test_a_victim_that_was_to_have_drafts_gets_none() -> None:
    rig = Rig(num_blocks=5, max_model_len=16, policy="priority")
    low_before_high(rig)
    rig.scheduler.requests["low"].spec_token_ids = [7]
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"high": 1}
    assert plan.spec_token_ids == {}


def test_drafts_of_a_victim_are_dropped() -> None:
    rig = Rig(num_blocks=7, max_model_len=16)
    for name in ("first", "second", "third"):
        rig.add(name, 4)
    rig.run(5)  # two full blocks each; the first takes the free one, the second that of the third
    third = rig.scheduler.requests["third"]
    third.spec_token_ids = [7]
    plan = rig.step()
    assert list(plan.num_scheduled_tokens) == ["first", "second"]
    assert (third.status, third.spec_token_ids) == (RequestStatus.PREEMPTED, [])


# The priority policy


def test_priority_takes_a_seat_in_the_same_step() -> None:
    rig = Rig(max_num_seqs=2, policy="priority")
    rig.add("a", 4, priority=1)
    rig.add("b", 4, priority=2)
    rig.step()
    rig.add("urgent", 4, priority=0)
    rig.step()
    rig.expect("""
        a   b   urgent
        4+  4+  .
        1+  .   4+
    """)
    assert rig.scheduler.stats().num_preemptions == {"blocks": 0, "priority": 1, "epoch": 0, "hold": 0}


def test_equal_priority_evicts_nobody() -> None:
    rig = Rig(max_num_seqs=1, policy="priority")
    rig.add("a", 4, priority=1, arrival_time=5.0)
    rig.step()
    rig.add("b", 4, priority=1, arrival_time=1.0)
    rig.step()
    assert sum(rig.scheduler.stats().num_preemptions.values()) == 0


def test_priority_never_evicts_in_vain() -> None:
    rig = Rig(num_blocks=16, policy="priority")
    rig.add("same", 38, priority=0)  # 10 blocks
    rig.add("lower", 10, priority=1)  # 3 blocks
    rig.step()
    rig.add("big", 30, priority=0)  # 8 blocks: too many even without the lower one
    rig.run(2)
    rig.expect("""
        same  lower  big
        38+   10+    .
        1+    1+     .
        1+    1+     .
    """)


def test_priority_counts_only_blocks_that_are_freed() -> None:
    """The victim shares its prefix with a request that stays: its 4 blocks would not come free."""
    rig = Rig(num_blocks=16, policy="priority")
    prefix = list(range(100, 116))
    rig.add("stays", [*prefix, 1], max_tokens=3, priority=0)  # 5 blocks
    rig.step()
    rig.add("sharer", [*prefix, 3], priority=1)  # 4 shared, 1 own
    rig.step()
    rig.add("big", 44, priority=0)  # 11 blocks: 10 are free, 11 without "sharer", less one for "stays"
    rig.step()
    assert rig.scheduler.stats().num_preemptions["priority"] == 0
    rig.rows.clear()
    rig.run(1)  # "stays" has ended: without "sharer" all 16 are free
    rig.expect("""
        stays  sharer  big
        .      .       44+
    """)


def test_priority_does_not_count_a_hit_in_the_victims_blocks_twice() -> None:
    rig = Rig(num_blocks=16, policy="priority")
    prefix = list(range(100, 116))
    rig.add("stays", 30, priority=0)  # 8 blocks
    rig.add("lower", [*prefix, 1], priority=5)  # 5 blocks
    rig.step()
    # 10 blocks less a hit of 4. Without "lower" 8 blocks are free, but 4 of them are that hit.
    rig.add("urgent", [*prefix, *range(500, 524)], priority=0)
    plan = rig.step()
    assert list(plan.num_scheduled_tokens) == ["stays", "lower"]
    assert rig.scheduler.stats().num_preemptions["priority"] == 0


def test_priority_spares_victims_that_were_not_needed() -> None:
    rig = Rig(num_blocks=16, policy="priority")
    rig.add("worst", 2, priority=9)  # 1 block
    rig.add("large", 30, priority=8)  # 8 blocks
    rig.step()
    rig.add("urgent", 36, priority=0)  # 9 blocks: 7 free - 2 running, and 8 + 1 of the large one
    rig.step()
    rig.expect("""
        worst  large  urgent
        2+     30+    .
        1+     .      36+
    """)


def test_priority_spares_the_better_of_two_victims() -> None:
    rig = Rig(num_blocks=16, policy="priority")
    rig.add("worst", 2, priority=9)
    rig.add("bad", 2, priority=8)
    rig.add("large", 30, priority=7)
    rig.step()
    rig.add("urgent", 52, priority=0)  # 13 blocks: all but 3, of which 1 is for who stays
    plan = rig.step()
    assert plan.preempted_request_ids == ["worst", "large"]
    rig.expect("""
        worst  bad  large  urgent
        2+     2+   30+    .
        .      1+   .      52+
    """)


def test_priority_counts_what_a_chunk_would_no_longer_owe() -> None:
    rig = Rig(num_blocks=16, policy="priority", max_num_batched_tokens=8)
    rig.add("slow", 40, priority=5)  # 2 blocks of 10
    rig.step()
    rig.add("urgent", 56, priority=0)  # 14 blocks
    rig.step()
    rig.expect("""
        slow  urgent
        8     .
        .     8
    """)


def test_priority_counts_the_tokens_that_victims_give_back() -> None:
    rig = Rig(policy="priority", max_num_seqs=2, max_num_batched_tokens=2)
    rig.add("a", 1, priority=5)
    rig.add("b", 1, priority=6)
    rig.step()
    rig.add("urgent", 1, priority=0)
    rig.step()
    rig.expect("""
        a   b   urgent
        1+  1+  .
        1+  .   1+
    """)


def test_priority_evicts_nobody_for_budget_alone() -> None:
    rig = Rig(
        policy="priority",
        max_num_batched_tokens=8,
        max_num_partial_prefills=2,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=32,
    )
    rig.add("decode", 1, priority=9)
    rig.step()
    rig.add("chunk", 30, priority=0)
    rig.step()
    rig.add("next", 4, priority=1)
    rig.step()
    rig.expect("""
        decode  chunk  next
        1+      .      .
        1+      7      .
        1+      7      .
    """)


def test_priority_takes_a_partial_prefill_place() -> None:
    rig = Rig(policy="priority", max_num_batched_tokens=8)
    rig.add("slow", 40, priority=5)
    rig.step()
    rig.add("urgent", 20, priority=0)
    rig.run(4)
    rig.expect("""
        slow  urgent
        8     .
        .     8
        .     8
        4     4+
        7     1+
    """)


def test_an_evicted_request_ends_admission_as_head() -> None:
    rig = Rig(policy="priority", max_num_batched_tokens=16, long_prefill_token_threshold=8)
    rig.add("slow", 40, priority=5)
    rig.step()
    rig.add("urgent", 20, priority=0)
    rig.add("tiny", 1, priority=6)
    rig.run(2)
    rig.expect("""
        slow  urgent  tiny
        8     .       .
        .     8       .
        .     8       1+
    """)


def test_priority_sorts_chunks_and_prompts_into_one_order() -> None:
    rig = Rig(
        policy="priority",
        max_num_batched_tokens=8,
        max_num_partial_prefills=2,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=6,
    )
    rig.add("chunk", 30, priority=5)
    rig.step()
    rig.add("urgent", 12, priority=0)
    rig.run(3)
    rig.expect("""
        chunk  urgent
        6      .
        2      6
        2      6+
        6      1+
    """)


# Books


def test_stats_count_tokens_hits_and_use() -> None:
    rig = Rig()
    prompt = list(range(100, 110))
    rig.add("a", prompt, max_tokens=1)
    rig.step()
    rig.add("b", prompt, max_tokens=2)
    rig.step()
    assert rig.scheduler.stats() == SchedulerStats(
        num_requests_running=1,
        num_requests_waiting=0,
        num_requests_waiting_for_grammar=0,
        num_blocks=64,
        num_used_blocks=3,
        token_budget=64,
        token_budget_reason="static",
        prompt_tokens=20,
        prompt_tokens_cached=8,
        generation_tokens=2,
        num_preemptions={"blocks": 0, "priority": 0, "epoch": 0, "hold": 0},
        recomputed_tokens=0,
        prefix_cache_queries=20,
        prefix_cache_hits=8,
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
    )


def test_the_budget_seat_is_asked_each_step_and_never_exceeds_the_hard_limit() -> None:
    class Alternating(StaticBudget):
        seen: list[int]

        def next_step(self, running: object) -> StepBudget:
            self.seen.append(len(running))  # type: ignore[arg-type]
            return StepBudget(5 if len(self.seen) % 2 else 99, "test")

    budget = Alternating(0)
    budget.seen = []
    config = SchedulerConfig(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4)
    scheduler = Scheduler(config, 8, budget)
    scheduler.add_request(Request("r", range(40), SamplingParams(max_tokens=1)))
    rig = Rig()
    rig.scheduler = scheduler
    rig.outputs["r"] = []
    rig.run(3)
    rig.expect("""
        r
        5
        16
        5
    """)
    assert budget.seen == [0, 1, 1]
    assert (scheduler.stats().token_budget, scheduler.stats().token_budget_reason) == (5, "test")

"""How long a new request is predicted to wait for its first token."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_table import Rig

from scheduler.first_token import QueueState, first_token_seconds, queue_state
from scheduler.latency_model import LatencyModel
from scheduler.plan import StepLoad

BUDGET = 100
EMPTY = QueueState(0, 0, 0, 0, 0, max_num_seqs=4, output_tokens=50.0)


def model_of(fixed: float, per_decode: float, per_chunk_token: float) -> LatencyModel:
    """Seconds of a step, and of each token of it."""
    model = LatencyModel(BUDGET)
    loads = [
        StepLoad(decodes, chunk, 0, 0) for decodes in (0, 1, 4, 16) for chunk in (0, 10, 40, 96) if decodes + chunk
    ]
    model.seed(
        (load, fixed + per_decode * load.num_decode_tokens + per_chunk_token * load.num_chunk_tokens) for load in loads
    )
    return model


MODEL = model_of(0.01, 0.001, 0.0005)


def seconds(queue: QueueState, recovery_seconds: float = 0.0) -> float:
    return first_token_seconds(queue, MODEL, recovery_seconds)


def test_nothing_stands_before_it() -> None:
    assert seconds(EMPTY) == 0.0
    assert seconds(replace(EMPTY, num_running=3, num_decodes=3, decode_context=300)) == 0.0


def test_prompts_ahead_are_computed_at_the_speed_of_full_steps() -> None:
    # A step of 100 tokens takes 60 ms.
    assert seconds(replace(EMPTY, num_queued_tokens=1000, num_waiting=2)) == pytest.approx(0.6, rel=0.02)


def test_decodes_take_their_part_of_each_step() -> None:
    # 20 decodes and 80 tokens of prompts: 10 + 20 + 40 = 70 ms for each 80.
    queue = replace(EMPTY, max_num_seqs=64, num_queued_tokens=800, num_waiting=2, num_running=20, num_decodes=20)
    assert seconds(queue) == pytest.approx(0.7, rel=0.02)


def test_decodes_that_take_the_whole_budget_leave_a_token_of_it() -> None:
    queue = replace(EMPTY, max_num_seqs=500, num_queued_tokens=10, num_waiting=1, num_running=100, num_decodes=100)
    assert seconds(queue) == pytest.approx(10 * 0.1105, rel=0.02)


def test_it_waits_for_a_seat() -> None:
    # All four seats decode in steps of 14 ms, answers have 50 tokens: a seat comes free each 175 ms.
    full = replace(EMPTY, num_running=4, num_decodes=4)
    assert seconds(full) == pytest.approx(0.175, rel=0.02)
    assert seconds(replace(full, num_waiting=2)) == pytest.approx(3 * 0.175, rel=0.02)
    assert seconds(replace(full, output_tokens=100.0)) == pytest.approx(0.35, rel=0.02)


def test_prompts_and_seats_are_waited_for_together_and_ranks_before_them() -> None:
    full = replace(EMPTY, num_running=4, num_decodes=4, num_waiting=2, num_queued_tokens=100)
    assert seconds(full) == pytest.approx(3 * 0.175, rel=0.02)
    assert seconds(full, 7.0) == pytest.approx(7.0 + 3 * 0.175, rel=0.02)
    assert seconds(EMPTY, 7.0) == 7.0


def test_without_a_measured_step_nothing_is_predicted() -> None:
    queue = replace(EMPTY, num_queued_tokens=1000, num_waiting=9, num_running=4, num_decodes=4)
    assert first_token_seconds(queue, LatencyModel(BUDGET)) == 0.0


COUNTS = st.integers(0, 300)
STATES = st.builds(
    lambda queued, waiting, chunks, decodes, context, seats, output: QueueState(
        queued, waiting, chunks + decodes, decodes, context if decodes else 0, seats, output
    ),
    st.integers(0, 10_000), COUNTS, st.integers(0, 3), st.integers(0, 99), st.integers(0, 50_000), st.integers(1, 300),
    st.floats(0, 2000),
)  # fmt: skip
MORE = {
    "num_queued_tokens": 1, "num_waiting": 1, "num_running": 1, "num_decodes": 1, "decode_context": 1,
    "max_num_seqs": -1, "output_tokens": 1.0,
}  # fmt: skip


@given(STATES, st.sampled_from(sorted(MORE)), st.floats(0, 100))
def test_more_before_it_is_never_a_shorter_wait(queue: QueueState, field: str, recovery_seconds: float) -> None:
    before = seconds(queue, recovery_seconds)
    more = replace(queue, **{field: getattr(queue, field) + MORE[field]})
    assert 0.0 <= before < math.inf
    if more.max_num_seqs > 0:
        assert seconds(more, recovery_seconds) >= before * (1 - 1e-6)


def test_the_scheduler_says_what_stands_before_a_request() -> None:
    rig = Rig(max_num_batched_tokens=8, max_num_seqs=3)
    assert queue_state(rig.scheduler) == QueueState(0, 0, 0, 0, 0, 3, 0.0)
    rig.add("decode", 5, max_tokens=2)
    rig.plan()
    rig.take()
    rig.add("chunk", 20, max_tokens=4)
    rig.add("waits", 6, max_tokens=4)
    rig.plan()
    assert queue_state(rig.scheduler) == QueueState(19, 1, 2, 1, 6, 3, 3.0)
    rig.take()  # "decode" ends with its second token
    assert queue_state(rig.scheduler).output_tokens == 2.0

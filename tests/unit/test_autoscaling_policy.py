"""How many engines are wanted, and what is done about it."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling.load import ReplicaLoad
from cluster.autoscaling.policy import AutoscalingOptions, History, decide, load_in_replicas, replicas_wanted

OPTIONS = AutoscalingOptions(
    min_replicas=1, max_replicas=4, target_queue_seconds=2.0, target_kv_usage=0.8, up_seconds=10.0, down_seconds=60.0
)
FROM_ZERO = replace(OPTIONS, min_replicas=0)
IDLE = ReplicaLoad(0.0, 0.0, 0.0)

loads = st.builds(ReplicaLoad, st.floats(0, 100), st.floats(0, 1), st.floats(0, 1))
options = st.builds(
    lambda low, more, queue, kv, up, down: AutoscalingOptions(low, low + more, queue, kv, up, down),
    st.integers(0, 3),
    st.integers(1, 5),
    st.floats(0.1, 10),
    st.floats(0.1, 1),
    st.floats(0, 30),
    st.floats(0, 30),
)
wishes = st.lists(st.tuples(st.floats(0.1, 5), st.integers(0, 9)), min_size=1, max_size=60)
"""(seconds since the one before, number wanted)."""


# What is wanted


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([], 1),
        ([IDLE], 1),
        ([IDLE, IDLE, IDLE], 1),
        ([ReplicaLoad(0.0, 1.0, 0.0)], 1),  # busy with prompts all the time, and none waits: just enough
        ([ReplicaLoad(0.2, 1.0, 0.0)], 2),
        ([ReplicaLoad(2.0, 1.0, 0.0)], 2),  # one to clear the queue in time, one for what keeps coming
        ([ReplicaLoad(2.1, 1.0, 0.0)], 3),
        ([ReplicaLoad(0.0, 0.6, 0.0)] * 3, 2),  # no queue, but one alone could not do it
        ([ReplicaLoad(0.0, 0.0, 0.8)], 1),
        ([ReplicaLoad(0.0, 0.0, 0.81)], 2),
        ([ReplicaLoad(0.0, 0.0, 0.2)] * 3, 1),
        ([ReplicaLoad(0.0, 0.9, 0.8)] * 2, 2),  # two measures of the same work: the larger one, not their sum
        ([ReplicaLoad(1e9, 1.0, 1.0)], 4),
    ],
)
def test_what_loads_call_for(found: list[ReplicaLoad], wanted: int) -> None:
    assert replicas_wanted(found, 0, False, len(found), OPTIONS) == wanted


@pytest.mark.parametrize(
    ("found", "num_silent", "current", "wanted"),
    [
        ([], 3, 3, 3),  # nobody has told anything: nobody is taken away
        ([IDLE], 2, 3, 2),
        ([ReplicaLoad(0.0, 0.0, 1.0)], 1, 2, 2),  # it calls for two, and the second one is there already
        ([ReplicaLoad(0.0, 1.0, 0.0)] * 3, 1, 4, 4),
    ],
)
def test_a_replica_that_says_nothing_keeps_its_place_and_calls_for_no_other(
    found: list[ReplicaLoad], num_silent: int, current: int, wanted: int
) -> None:
    assert replicas_wanted(found, num_silent, False, current, OPTIONS) == wanted


def test_the_last_one_goes_only_when_nothing_is_open() -> None:
    assert replicas_wanted([IDLE], 0, True, 1, FROM_ZERO) == 1
    assert replicas_wanted([IDLE], 0, False, 1, FROM_ZERO) == 0
    assert replicas_wanted([], 0, True, 0, FROM_ZERO) == 1


@given(st.lists(loads, max_size=5), st.integers(0, 3), st.booleans(), st.integers(0, 8), options)
def test_wanted_is_within_bounds(
    found: list[ReplicaLoad], num_silent: int, is_busy: bool, current: int, chosen: AutoscalingOptions
) -> None:
    wanted = replicas_wanted(found, num_silent, is_busy, current, chosen)
    assert chosen.min_replicas <= wanted <= chosen.max_replicas


@given(st.lists(loads, min_size=1, max_size=5), st.data(), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1), options)
def test_more_load_never_wants_fewer(
    found: list[ReplicaLoad], data: st.DataObject, queue: float, share: float, kv: float, chosen: AutoscalingOptions
) -> None:
    at = data.draw(st.integers(0, len(found) - 1))
    one = found[at]
    more = list(found)
    more[at] = ReplicaLoad(one.queue_seconds + queue, max(one.prefill_share, share), max(one.kv_usage, kv))
    assert load_in_replicas(more, chosen) >= load_in_replicas(found, chosen)
    assert replicas_wanted(more, 0, False, len(more), chosen) >= replicas_wanted(found, 0, False, len(found), chosen)


# What is done


def run(wanted: list[tuple[float, int]], current: int, chosen: AutoscalingOptions) -> list[int]:
    """The numbers decided for samples of (time, wanted)."""
    history, decided = History(), []
    for now, number in wanted:
        current, history = decide(number, current, now, history, chosen)
        decided.append(current)
    return decided


def test_up_after_the_need_has_lasted() -> None:
    at = [0.0, 5.0, 9.9, 10.0, 11.0]
    assert run([(now, 3) for now in at], 1, OPTIONS) == [1, 1, 1, 3, 3]


def test_up_to_what_was_needed_throughout() -> None:
    assert run([(0.0, 4), (5.0, 2), (10.0, 4), (19.0, 4), (20.0, 4)], 1, OPTIONS) == [1, 1, 2, 2, 4]


def test_a_dip_starts_the_wait_anew() -> None:
    assert run([(0.0, 3), (9.0, 1), (10.0, 3), (19.0, 3), (20.0, 3)], 1, OPTIONS) == [1, 1, 1, 1, 3]


def test_down_to_the_most_that_was_needed_lately() -> None:
    assert run([(0.0, 1), (30.0, 2), (31.0, 1), (60.0, 1), (90.0, 1), (91.0, 1)], 3, OPTIONS) == [3, 3, 3, 2, 2, 1]


def test_whoever_else_changes_the_number_has_a_reason() -> None:
    """A request woke the first replica while nothing had been wanted for long; then its client left."""
    _, history = decide(0, 0, 0.0, History(), FROM_ZERO)
    for now in (500.0, 530.0, 559.0):
        current, history = decide(0, 1, now, history, FROM_ZERO)
        assert current == 1
    assert decide(0, 1, 560.0, history, FROM_ZERO)[0] == 0


def test_what_is_remembered_does_not_grow() -> None:
    history, current = History(), 1
    for turn in range(2000):
        current, history = decide(1 + turn % 2, current, turn * 0.5, history, OPTIONS)
    assert len(history.samples) <= 2 * OPTIONS.down_seconds + 2


@given(wishes, st.integers(0, 9), options)
def test_decisions_stay_within_what_was_wanted_and_do_not_flap(
    steps: list[tuple[float, int]], first: int, chosen: AutoscalingOptions
) -> None:
    """After a step up none down within `down_seconds`; after a step down none up within `up_seconds`."""
    times = list(accumulate(seconds for seconds, _ in steps))
    wanted = [number for _, number in steps]
    decided = [first, *run(list(zip(times, wanted, strict=True)), first, chosen)]
    last_up = last_down = -1e9
    for now, (before, after) in zip(times, pairwise(decided), strict=True):
        assert min([first, *wanted]) <= after <= max([first, *wanted])
        if after > before:
            assert now - last_down >= chosen.up_seconds - 1e-6
            last_up = now
        if after < before:
            assert now - last_up >= chosen.down_seconds - 1e-6
            last_down = now


@given(st.integers(0, 9), st.integers(0, 9), wishes, options)
def test_a_lasting_need_is_met_once_and_for_all(
    lasting: int, first: int, steps: list[tuple[float, int]], chosen: AutoscalingOptions
) -> None:
    before = list(zip(accumulate(seconds for seconds, _ in steps), (number for _, number in steps), strict=True))
    start = before[-1][0] + 1
    longest = max(chosen.up_seconds, chosen.down_seconds)
    after = [(start, lasting), (start + longest + 1, lasting), (start + 2 * longest + 2, lasting)]
    assert run([*before, *after], first, chosen)[-2:] == [lasting, lasting]


@given(wishes, st.integers(0, 9), st.integers(0, 4), options)
def test_whoever_always_wants_more_gets_no_fewer(
    steps: list[tuple[float, int]], first: int, more: int, chosen: AutoscalingOptions
) -> None:
    times = list(accumulate(seconds for seconds, _ in steps))
    wanted = [number for _, number in steps]
    fewer = run(list(zip(times, wanted, strict=True)), first, chosen)
    greater = run([(now, number + more) for now, number in zip(times, wanted, strict=True)], first, chosen)
    assert all(one >= other for one, other in zip(greater, fewer, strict=True))

"""Suspicion finds the request that kills the workers, and only that one."""

import math
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.suspicion import Suspicion

FUTILE = 60
"""Crashes without a step between; among 20 requests no two poisons need so many."""


class Crowd:
    """Requests that gain one token a step, and die with all others when the poison computes its fatal token."""

    def __init__(self, lengths: list[int], fatal: dict[str, int]) -> None:
        self.left = {f"r{index}": length for index, length in enumerate(lengths)}
        self.tokens = dict.fromkeys(self.left, 0)
        self.fatal = fatal
        self.suspicion = Suspicion()
        self.suspicion.finished(["before"])
        self.convicted: list[str] = []
        self.num_crashes = 0
        self.num_futile = 0

    @property
    def running(self) -> list[str]:
        held = self.suspicion.held(self.left)
        return [request_id for request_id in self.left if request_id not in held]

    def crash(self, running: list[str]) -> None:
        self.num_crashes += 1
        self.num_futile += 1
        for request_id in self.suspicion.crashed({i: self.tokens[i] for i in running}):
            self.convicted.append(request_id)
            del self.left[request_id]

    def step(self) -> None:
        running = self.running
        assert running, "everybody is held"
        if any(self.tokens[request_id] == self.fatal.get(request_id) for request_id in running):
            self.crash(running)
            return
        self.num_futile = 0
        self.suspicion.finished(running)
        for request_id in running:
            self.tokens[request_id] += 1
            self.left[request_id] -= 1
            self.suspicion.progressed(request_id, self.tokens[request_id])
            if not self.left[request_id]:
                del self.left[request_id]
                self.suspicion.forget(request_id)

    def run(self, kills: Collection[int] = ()) -> None:
        """`kills`: steps at which the workers are killed from outside, unless one that was split off runs alone.

        Ends when nobody is left, or when the crashes have no end.
        """
        for step in range(10_000):
            if not self.left or self.num_futile > FUTILE:
                return
            if step in kills and len(self.running) > 1:
                self.crash(self.running)
            self.step()
        raise AssertionError("the requests never end")


def bound(num_requests: int) -> int:
    return 1 + math.ceil(math.log2(num_requests)) if num_requests > 1 else 3


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.data())
@settings(max_examples=300)
def test_one_poison_alone_is_convicted_within_the_bound(lengths: list[int], data: st.DataObject) -> None:
    poison = data.draw(st.integers(0, len(lengths) - 1))
    crowd = Crowd(lengths, {f"r{poison}": data.draw(st.integers(0, lengths[poison] - 1))})
    crowd.run()
    assert crowd.convicted == [f"r{poison}"]
    assert not crowd.suspicion.is_active
    assert crowd.num_crashes <= max(bound(len(lengths)), 3)


@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=20),
    st.sets(st.integers(0, 60), max_size=6),
    st.data(),
)
@settings(max_examples=300)
def test_deaths_from_outside_convict_nobody_else(lengths: list[int], kills: set[int], data: st.DataObject) -> None:
    poisons = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=3))
    fatal = {f"r{index}": data.draw(st.integers(0, lengths[index] - 1)) for index in poisons}
    crowd = Crowd(lengths, fatal)
    crowd.run(kills)
    assert set(crowd.convicted) | crowd.left.keys() == set(fatal)
    if crowd.left:  # nobody else is there to show that the workers are sound
        assert len(crowd.left) > 1
    else:
        assert crowd.num_crashes <= 2 * len(kills) + 2 * len(fatal) * max(bound(len(lengths)), 3)


@given(st.integers(1, 40), st.integers(1, 100))
def test_workers_that_die_at_every_step_convict_nobody(num_requests: int, num_crashes: int) -> None:
    suspicion = Suspicion()
    if num_requests > 1:
        suspicion.finished(["before"])
    ids = [f"r{index}" for index in range(num_requests)]
    for _ in range(num_crashes):
        held = suspicion.held(ids)
        assert suspicion.crashed({i: 0 for i in ids if i not in held}) == []


@pytest.mark.parametrize("num_kills", [2, 3])
def test_two_streams_survive_deaths_from_outside(num_kills: int) -> None:
    crowd = Crowd([5, 5], {})
    for _ in range(num_kills):
        crowd.crash(crowd.running)
    crowd.run()
    assert crowd.convicted == []
    assert not crowd.suspicion.is_active


def test_others_run_before_one_that_lacks_only_a_control() -> None:
    suspicion = Suspicion()
    for _ in range(4):
        assert suspicion.held(["a"]) == set()
        assert suspicion.crashed({"a": 5}) == []
    assert suspicion.held(["a", "b"]) == {"a"}
    suspicion.finished(["b"])
    assert suspicion.held(["a", "b"]) == {"b"}
    assert suspicion.crashed({"a": 5}) == ["a"]


def test_the_other_half_runs_before_one_crash_alone_convicts() -> None:
    suspicion = Suspicion()
    suspicion.crashed({"a": 1, "b": 1})
    assert suspicion.held(["a", "b"]) == {"b"}
    assert suspicion.crashed({"a": 1}) == []
    assert suspicion.held(["a", "b"]) == {"a"}
    suspicion.finished(["b"])
    suspicion.progressed("b", 2)
    assert suspicion.held(["a", "b"]) == {"b"}
    assert suspicion.crashed({"a": 1}) == ["a"]


def test_one_that_was_alone_is_convicted_by_the_third_crash() -> None:
    suspicion = Suspicion()
    suspicion.finished(["before"])
    assert suspicion.crashed({"a": 5}) == []
    assert suspicion.held(["a", "b"]) == {"b"}
    assert suspicion.crashed({"a": 5}) == []
    assert suspicion.crashed({"a": 5}) == ["a"]
    assert suspicion.held(["b"]) == set()


def test_one_that_was_alone_and_gets_on_starts_afresh() -> None:
    suspicion = Suspicion()
    for position in range(10):
        assert suspicion.crashed({"a": position}) == []
        assert suspicion.crashed({"a": position}) == []
        suspicion.progressed("a", position)
        assert suspicion.is_active
        suspicion.progressed("a", position + 1)
        assert not suspicion.is_active


def test_plans_ahead_move_the_position_only_forward() -> None:
    suspicion = Suspicion()
    suspicion.finished(["before"])
    suspicion.crashed({"a": 6})
    suspicion.crashed({"a": 5})
    suspicion.progressed("a", 6)
    assert suspicion.is_active
    assert suspicion.crashed({"a": 6}) == ["a"]


def test_halves_run_apart_and_the_cleared_wait() -> None:
    suspicion = Suspicion()
    everybody = ["a", "b", "c", "d", "new"]
    suspicion.crashed({"a": 1, "b": 1, "c": 1, "d": 1})
    assert suspicion.held(everybody) == {"c", "d", "new"}
    suspicion.finished(["a", "b"])
    suspicion.progressed("a", 2)
    assert suspicion.held(everybody) == {"a", "c", "d", "new"}
    suspicion.forget("b")
    assert suspicion.held(everybody) == {"a", "b", "new"}
    assert suspicion.crashed({"c": 1, "d": 1}) == []
    assert suspicion.held(everybody) == {"a", "b", "d", "new"}
    assert suspicion.crashed({"c": 1}) == ["c"]
    assert suspicion.held(everybody) == set()


def test_nobody_waits_for_a_group_that_is_gone() -> None:
    suspicion = Suspicion()
    suspicion.crashed({"a": 1, "b": 1})
    assert suspicion.held({"b", "new"}) == {"new"}
    assert suspicion.held({"new"}) == set()
    assert not suspicion.is_active


def test_a_death_with_nothing_in_flight_accuses_nobody() -> None:
    suspicion = Suspicion()
    assert suspicion.crashed({}) == []
    assert not suspicion.is_active


@pytest.mark.parametrize("num_requests", [2, 3, 16, 17])
def test_the_untested_part_of_a_group_stays_suspect(num_requests: int) -> None:
    """Only some of the group had begun when it crashed; the rest has cleared nothing."""
    suspicion = Suspicion()
    ids = [f"r{index}" for index in range(num_requests)]
    suspicion.crashed(dict.fromkeys(ids, 0))
    group = [i for i in ids if i not in suspicion.held(ids)]
    suspicion.finished(["other"])
    assert suspicion.crashed({group[0]: 0}) == [group[0]]
    suspicion = Suspicion()
    suspicion.crashed(dict.fromkeys(ids, 0))
    tested: set[str] = set()
    while suspicion.is_active:
        group = [i for i in ids if i not in suspicion.held(ids)]
        tested |= set(group)
        suspicion.progressed(group[0], 1)
    assert tested == set(ids)

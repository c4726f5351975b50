"""Time by stage, under a clock that moves by hand."""

import pytest

from workers.stage_clock import StageClock


class Hand:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def read(self) -> float:
        return self.now

    def work(self, seconds: float) -> float:
        self.now += seconds
        return seconds


def test_a_stage_inside_another_counts_for_itself_alone() -> None:
    hand = Hand()
    clock = StageClock(hand.read)
    inner = clock.timed("inner", hand.work)

    def both() -> None:
        hand.work(1.0)
        inner(10.0)
        inner(20.0)
        hand.work(2.0)

    outer = clock.timed("outer", both)
    outer()
    assert clock.take() == {"inner": 30.0, "outer": 3.0}
    inner(4.0)
    outer()
    assert clock.take() == {"inner": 34.0, "outer": 3.0}
    assert clock.take() == {}


def test_three_deep_and_a_stage_within_itself() -> None:
    hand = Hand()
    clock = StageClock(hand.read)

    def nest(depth: int) -> int:
        hand.work(1.0)
        return depth + calls[depth](depth - 1) if depth else 0

    calls = [nest, clock.timed("low", nest), clock.timed("mid", nest), clock.timed("low", nest)]
    assert calls[3](3) == 6
    assert clock.take() == {"low": 3.0, "mid": 1.0}


def test_what_raises_is_counted_too() -> None:
    hand = Hand()
    clock = StageClock(hand.read)

    def fail() -> None:
        hand.work(3.0)
        raise ValueError("no")

    def outer() -> None:
        with pytest.raises(ValueError, match="no"):
            clock.timed("failing", fail)()
        hand.work(1.0)

    clock.timed("outer", outer)()
    assert clock.take() == {"failing": 3.0, "outer": 1.0}


def test_a_method_is_wrapped_on_its_object_alone() -> None:
    hand, other = Hand(), Hand()
    clock = StageClock(hand.read)
    clock.wrap(hand, "work", "working")
    assert hand.work(2.0) == 2.0
    other.work(9.0)
    assert clock.take() == {"working": 2.0}

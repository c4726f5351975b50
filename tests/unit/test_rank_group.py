"""Times of collectives: what counts as the collective, and what as the wait for a rank."""

import pytest

from benchmarks.rank_group import call_seconds, run_ranks


def test_a_call_begins_when_the_last_rank_comes() -> None:
    early = [(0, 150), (1_000, 1_250)]
    late = [(100, 160), (1_200, 1_240)]
    calls = call_seconds([early, late])
    assert [round(seconds * 1e9) for seconds in calls.last] == [60, 40]
    assert [round(seconds * 1e9) for seconds in calls.every] == [50, 60, 50, 40]


def three_times(rank: int, size: int, rendezvous: str, factor: int) -> tuple[int, int]:
    if factor == 0 and rank == 1:
        raise ValueError("no factor")
    return size, rank * factor


def test_ranks_answer_in_their_order_and_a_failed_one_is_named() -> None:
    assert run_ranks(2, three_times, 3) == [(2, 0), (2, 3)]
    with pytest.raises(RuntimeError, match="rank 1 gave no result"):
        run_ranks(2, three_times, 0)

"""Sums and gathers through shared memory: against a slow reference, with ranks that are late, stopped or killed."""

import ctypes
import os
import random
import signal
import time

import pytest
from shared_memory_cases import (
    Ranks,
    hindered,
    mappings,
    one_after_the_other,
    random_calls,
    sums_until_it_fails,
)

from workers.kernels.library import library
from workers.shared_memory import _Rank


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_calls_equal_the_reference_however_late_a_rank_is(size: int) -> None:
    chance = random.Random(size)
    with Ranks(size, random_calls, size, 300) as ranks:
        victims = [ranks.hear(rank) for rank in range(size)]
        for _ in range(150):  # stopped at whatever they do
            victim = chance.choice(victims)
            os.kill(victim, signal.SIGSTOP)
            time.sleep(chance.choice((1e-3, 5e-3, 20e-3)))
            os.kill(victim, signal.SIGCONT)
        assert len({ranks.hear(rank) for rank in range(size)}) == 1


def test_a_killed_rank_is_named_at_once() -> None:
    with Ranks(3, sums_until_it_fails, 600.0) as ranks:  # the deadline is far behind the test's own
        for rank in range(3):
            assert ranks.hear(rank) == "sums"
        ranks.processes[1].kill()
        for rank in (0, 2):
            for _ in range(2):  # in the call that it leaves, and in every later one
                assert ranks.hear(rank) == f"a collective of rank {rank} failed: rank 1 has ended"


def test_a_stopped_rank_is_named_after_the_deadline_and_fails_when_it_goes_on() -> None:
    with Ranks(3, sums_until_it_fails, 1.0) as ranks:
        for rank in range(3):
            assert ranks.hear(rank) == "sums"
        process_id = ranks.processes[2].pid
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        for rank in (0, 1):
            assert ranks.hear(rank) == f"a collective of rank {rank} failed: rank 2 did not come within 1.0 s"
        os.kill(process_id, signal.SIGCONT)
        assert ranks.hear(2) == "a collective of rank 2 failed: rank 2 did not come within 1.0 s"


def test_the_wait_for_the_last_rank_is_counted_apart() -> None:
    with Ranks(2, one_after_the_other, 10) as ranks:
        early, late = ranks.hear(0), ranks.hear(1)
    assert early.calls == late.calls == 10
    assert early.waiting_seconds > 0 == late.waiting_seconds
    assert early.working_seconds > 0 < late.working_seconds


def test_a_ranks_notes_are_laid_out_as_in_c() -> None:
    assert ctypes.sizeof(_Rank) == library().function("rank_bytes")()


def test_the_memory_has_no_name_that_a_killed_group_could_leave_behind() -> None:
    with Ranks(2, mappings) as ranks:
        for rank in range(2):
            assert ranks.hear(rank) == ["/memfd:chunkserve (deleted)"]


@pytest.mark.parametrize(
    ("hindrance", "rank", "cause"),
    [
        ("no compiler", 1, "rank 1: no C++ compiler"),
        ("no room", 0, "rank 0: [Errno 27] File too large"),
        ("other node", 1, "they are not in one container of one node"),
    ],
)
def test_where_one_rank_cannot_share_memory_all_use_gloo_and_rank_0_says_why(
    hindrance: str, rank: int, cause: str
) -> None:
    with Ranks(2, hindered, hindrance, rank) as ranks:
        for each in range(2):
            assert ranks.hear(each) == cause
            assert ranks.hear(each) == 3.0
            logged = [f"collectives over gloo, which is slow: the ranks cannot share memory: {cause}"]
            assert ranks.hear(each) == (logged if each == 0 else [])

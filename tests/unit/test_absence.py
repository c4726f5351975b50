"""Whether there is no engine because none is needed."""

import threading
from collections.abc import Mapping

import pytest

from cluster.frontend.absence import SCALED_TO_ZERO, WAKING, Absence, phase_of


@pytest.mark.parametrize(
    ("status", "states", "phase"),
    [
        ("HEALTHY", {}, SCALED_TO_ZERO),
        ("HEALTHY", {"RUNNING": 0}, SCALED_TO_ZERO),
        ("DOWNSCALING", {"STOPPING": 1}, SCALED_TO_ZERO),
        ("UPSCALING", {"STARTING": 1}, WAKING),
        ("UPSCALING", {"STARTING": 1, "STOPPING": 1}, WAKING),
        ("HEALTHY", {"RUNNING": 1}, None),  # it runs, and did not answer
        ("UPSCALING", {"RUNNING": 1, "STARTING": 1}, None),
        ("UPDATING", {"STARTING": 1}, None),  # the first one of all
        ("UNHEALTHY", {"STARTING": 1}, None),
        ("DEPLOY_FAILED", {}, None),
    ],
)
def test_what_serve_tells(status: str, states: dict[str, int], phase: str | None) -> None:
    assert phase_of(status, states) == phase


async def test_a_controller_that_fails_tells_nothing() -> None:
    def fail() -> tuple[str, Mapping[str, int]]:
        raise KeyError("chunkserve")

    assert await Absence(fail, 10.0).phase() is None


async def test_a_controller_that_hangs_is_asked_by_one_thread_only() -> None:
    asked, go_on = 0, threading.Event()

    def hang() -> tuple[str, Mapping[str, int]]:
        nonlocal asked
        asked += 1
        go_on.wait(10)
        return "HEALTHY", {}

    absence = Absence(hang, 0.01)
    assert [await absence.phase() for _ in range(3)] == [None] * 3
    assert asked == 1
    go_on.set()
    absence = Absence(hang, 10.0)
    assert [await absence.phase() for _ in range(2)] == [SCALED_TO_ZERO] * 2
    assert asked == 3

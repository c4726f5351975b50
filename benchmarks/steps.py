"""What a service's live step log says: whether every stream was in every step, and whether plans ran ahead."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

from benchmarks.errors import BenchmarkError

_LOG_SIZE = 4096

Step = dict[str, Any]


async def read_steps(session: aiohttp.ClientSession, base_url: str) -> list[Step]:
    """The engine's last steps, oldest first."""
    async with session.get(f"{base_url}/debug/steps", params={"n": _LOG_SIZE}) as response:
        response.raise_for_status()
        return list((await response.json())["steps"])


def since(steps: Sequence[Step], last: Step | None) -> list[Step]:
    """The steps after `last`. Raises BenchmarkError when the log no longer holds all of them."""
    if last is None:
        return list(steps)
    place = (last["epoch"], last["step_id"])
    newer = [step for step in steps if (step["epoch"], step["step_id"]) > place]
    if len(newer) == len(steps) and len(steps) >= _LOG_SIZE:
        raise BenchmarkError(f"more than {_LOG_SIZE} steps in one run: the step log has lost the first of them")
    return newer


@dataclass(frozen=True, slots=True)
class StepCheck:
    """Counts over one run's steps."""

    num_steps: int
    num_mixed: int
    """Steps with decodes and a chunk."""
    num_with_missed_decodes: int
    """Steps without a request that was decoding."""
    num_followed: int
    """Busy steps: the next plan came without a pause, so it could have been sent ahead."""
    num_ahead: int
    """Of these, the steps whose next plan was sent before their own result."""

    @property
    def ahead_share(self) -> float:
        return self.num_ahead / self.num_followed if self.num_followed else 0.0


def check_steps(steps: Sequence[Step]) -> StepCheck:
    """Steps of one run, oldest first.

    The plan after a pause had nothing to run ahead of and is not counted; it is one that was sent
    after the last result, with no stream open.
    """
    followers = [after for before, after in pairwise(steps) if not _paused(before, after)]
    return StepCheck(
        num_steps=len(steps),
        num_mixed=sum(step["num_decodes"] > 0 and step["num_chunk_tokens"] > 0 for step in steps),
        num_with_missed_decodes=sum(step["num_missed_decodes"] > 0 for step in steps),
        num_followed=len(followers),
        num_ahead=sum(step["sent_ahead"] for step in followers),
    )


def _paused(before: Step, after: Step) -> bool:
    return bool(after["num_decodes"] == 0 and after["sent_at"] > before["received_at"])

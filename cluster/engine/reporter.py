"""Tells front ends what they choose engines by: the queue, and how the prefix cache has changed."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from cluster.links.token_link import HEARTBEAT_SECONDS
from cluster.links.token_sender import TokenSender
from scheduler.backlog import measure
from scheduler.plan import ReplicaReport
from scheduler.scheduler import Scheduler

_PERIOD_SECONDS = 0.05
"""Between two reports at least; front ends count what they send meanwhile."""
_REST = 50
"""So many times as long as a long queue has taken to be measured, nobody measures it again: steps wait for that."""


class Reporter:
    """Belongs to the engine's loop: between two awaits nobody else touches the scheduler."""

    def __init__(self, scheduler: Scheduler, prefill_rate: Callable[[int, int], float], sender: TokenSender) -> None:
        """`prefill_rate(decodes, their context)`: tokens a second, 0 while the engine does not serve."""
        self._scheduler = scheduler
        self._prefill_rate = prefill_rate
        self._sender = sender
        self._last: ReplicaReport | None = None
        self._reported_at = 0.0

    async def run(self) -> None:
        """Until cancelled: what has changed soon, and all else with each heartbeat, so that views do not grow stale."""
        clock = asyncio.get_running_loop().time
        pause = _PERIOD_SECONDS
        while True:
            await asyncio.sleep(pause)
            wanted = self._sender.wants_report()
            if wanted == "no":
                continue
            began = clock()
            report, last = self._make(), self._last
            pause = min(max(_PERIOD_SECONDS, _REST * (clock() - began)), HEARTBEAT_SECONDS)
            is_news = last is None or bool(report.added or report.removed) or _state(report) != _state(last)
            if is_news or wanted == "snapshot" or clock() - self._reported_at >= HEARTBEAT_SECONDS:
                self._last, self._reported_at = report, clock()
                self._sender.report(report, self._snapshot)

    def _make(self) -> ReplicaReport:
        backlog = measure(self._scheduler)
        added, removed = self._scheduler.take_cache_changes()
        return ReplicaReport(
            sequence=0 if self._last is None else self._last.sequence + 1,
            is_snapshot=False,
            block_size=self._scheduler.config.block_size,
            queued_tokens=backlog.num_tokens,
            prefill_rate=self._prefill_rate(backlog.num_decodes, backlog.decode_context),
            added=added,
            removed=removed,
        )

    def _snapshot(self) -> ReplicaReport:
        assert self._last is not None
        return replace(self._last, is_snapshot=True, added=self._scheduler.cached_hashes(), removed=[])


def _state(report: ReplicaReport) -> tuple[int, bool]:
    """The rate drifts with every token: that it serves at all is what cannot wait."""
    return report.queued_tokens, report.prefill_rate > 0

"""The engine's side of the step link: plans to every rank, one result a plan from rank 0. Does not know Ray."""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from cluster.awake import awake_timeout
from cluster.errors import ExecutorError, LossKind
from scheduler.plan import StepPlan, StepResult
from workers.link import AsyncLink, LinkError, LinkListener
from workers.step_loop import ERROR, HEARTBEAT, PLAN, RESULT, rank_name
from workers.wire import decode_result, encode

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_GRACE_SECONDS = 0.1
"""Between a rank's report of an error and its loss: it may fail because another has died, whose end counts then."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A plan without a result."""

    epoch: int
    step_id: int
    seconds: float
    result: "asyncio.Future[StepResult]"


class StepLink:
    """A link to each rank, and the plans without a result. Belongs to one event loop.

    The first thing that goes wrong with any rank fails every plan in flight and every later one.

    Silence and late results are told by a clock that this loop ticks, so that time in which the engine's own
    process stood still is held against nobody: what ranks said meanwhile has not been read.
    """

    def __init__(self, num_ranks: int, heartbeat_seconds: float, tick_seconds: float = _TICK_SECONDS) -> None:
        """`heartbeat_seconds`: a rank that says nothing for longer has hung."""
        self._heartbeat_seconds = heartbeat_seconds
        self._tick_seconds = tick_seconds
        self._links: dict[str, AsyncLink | None] = {rank_name(rank): None for rank in range(num_ranks)}
        self._listener = LinkListener(self._opened, self._received, self._closed)
        self._changed = asyncio.Event()
        self._in_flight: deque[_Waiting] = deque()
        self._awake = 0.0
        self._ticked_at = 0.0
        self._oldest_since = 0.0
        """When, by `_awake`, the oldest plan had no other before it any more."""
        self._heard_at: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reported: set[str] = set()
        """Ranks that have said what they die of."""
        self._failure: ExecutorError | None = None

    async def listen(self, host: str) -> tuple[str, int, str]:
        """Start to listen at `host`. Returns (host, port, token) for the ranks. Raises LinkError."""
        await self._listener.start(host)
        return self._listener.host, self._listener.port, self._listener.token

    async def wait_for_ranks(self, seconds: float) -> None:
        """Until every rank has dialled; their silence counts from then on. Raises ExecutorError naming the missing."""
        try:
            async with awake_timeout(seconds):
                while self._missing():
                    self.check_health()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = ", ".join(self._missing())
            raise ExecutorError(f"no link from {missing} within {seconds:g} s", "link") from None
        self._listener.stop_listening()
        self._ticked_at = time.monotonic()
        self._tick()

    def _missing(self) -> list[str]:
        return [name for name, link in self._links.items() if link is None]

    def execute(self, plan: StepPlan, seconds: float) -> "asyncio.Future[StepResult]":
        """Send to all ranks at once; nothing is awaited. The future fails with ExecutorError.

        `seconds`: how long it may take, from when no other plan is before it.
        """
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        if not self._in_flight:
            self._oldest_since = self._awake
        self._in_flight.append(_Waiting(plan.epoch, plan.step_id, seconds, future))
        message = encode(plan)
        for link in self._links.values():
            if link is not None:
                link.send(PLAN, message)
        return future

    def check_health(self) -> None:
        """Raises the ExecutorError that ended it, if any."""
        if self._failure is not None:
            raise self._failure

    def fail(self, cause: str, kind: LossKind) -> None:
        """Fail everything in flight and all that comes; only the first cause counts."""
        if self._failure is not None:
            return
        self._failure = ExecutorError(cause, kind)
        if self._timer is not None:
            self._timer.cancel()
        self._changed.set()
        for waiting in self._in_flight:
            if not waiting.result.done():
                waiting.result.set_exception(self._failure)
        self._in_flight.clear()

    def close(self, cause: str = "the executor was shut down") -> None:
        """End the links: ranks see EOF and die."""
        self.fail(cause, "link")
        self._listener.close()

    # Silence

    def _tick(self) -> None:
        """A suspended rank closes no socket, and a step that hangs says nothing: only time tells."""
        now = time.monotonic()
        self._awake += min(now - self._ticked_at, 2 * self._tick_seconds)
        self._ticked_at = now
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)
        for name, heard_at in self._heard_at.items():
            if self._awake - heard_at > self._heartbeat_seconds:
                self.fail(f"{name} has hung: nothing was heard of it for {self._heartbeat_seconds:g} s", "worker_hung")
                return
        if self._in_flight:
            oldest = self._in_flight[0]
            if self._awake - self._oldest_since > oldest.seconds:
                self.fail(
                    f"{rank_name(0)} gave no result of step {oldest.step_id} within {oldest.seconds:g} s", "worker_hung"
                )

    # What the listener calls

    def _opened(self, link: AsyncLink) -> None:
        if self._links.get(link.name, link) is not None:
            raise LinkError(f"{link.peer} calls itself {link.name!r}, which is no rank that is waited for")
        self._links[link.name] = link
        self._heard_at[link.name] = self._awake
        self._changed.set()

    def _received(self, link: AsyncLink, kind: int, payload: bytes) -> None:
        self._heard_at[link.name] = self._awake
        if kind == RESULT and link.name == rank_name(0):
            self._resolve(payload)
        elif kind == ERROR:
            self._reported.add(link.name)
            cause = f"{link.name} failed: {payload.decode(errors='replace')}"
            asyncio.get_running_loop().call_later(_GRACE_SECONDS, self.fail, cause, "step_failed")
        elif kind != HEARTBEAT:
            self.fail(f"{link.name} sent a message of kind {kind}, which is not its to send", "link")

    def _resolve(self, payload: bytes) -> None:
        try:
            result = decode_result(payload)
        except msgspec.DecodeError as error:
            self.fail(f"{rank_name(0)} sent a result that cannot be read: {error}", "link")
            return
        oldest = self._in_flight[0] if self._in_flight else None
        if oldest is None or (result.epoch, result.step_id) != (oldest.epoch, oldest.step_id):
            expected = None if oldest is None else oldest.step_id
            self.fail(
                f"{rank_name(0)} sent the result of step {result.step_id} where step {expected} was due", "step_failed"
            )
            return
        self._in_flight.popleft()
        self._oldest_since = self._awake
        if not oldest.result.done():
            oldest.result.set_result(result)

    def _closed(self, link: AsyncLink, cause: LinkError | None) -> None:
        if self._links.get(link.name) is link and link.name not in self._reported:
            self.fail(f"{link.name} is gone: {cause or 'its link was closed'}", "worker_died")

"""The engine's side of the step link: plans to every rank, one result a plan from rank 0. Does not know Ray."""

import asyncio
import logging
from collections import deque

import msgspec

from cluster.errors import ExecutorError
from scheduler.plan import StepPlan, StepResult
from workers.link import AsyncLink, LinkError, LinkListener
from workers.step_loop import ERROR, PLAN, RESULT, rank_name
from workers.wire import decode_result, encode

logger = logging.getLogger(__name__)


class StepLink:
    """A link to each rank, and the plans without a result. Belongs to one event loop.

    The first thing that goes wrong with any rank fails every plan in flight and every later one.
    """

    def __init__(self, num_ranks: int, step_seconds: float) -> None:
        """`step_seconds`: how long the oldest plan may take, from when no other was before it."""
        self._step_seconds = step_seconds
        self._links: dict[str, AsyncLink | None] = {rank_name(rank): None for rank in range(num_ranks)}
        self._listener = LinkListener(self._opened, self._received, self._closed)
        self._changed = asyncio.Event()
        self._in_flight: deque[tuple[int, asyncio.Future[StepResult]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: ExecutorError | None = None

    async def listen(self, host: str) -> tuple[str, int, str]:
        """Start to listen at `host`. Returns (host, port, token) for the ranks. Raises LinkError."""
        await self._listener.start(host)
        return self._listener.host, self._listener.port, self._listener.token

    async def wait_for_ranks(self, seconds: float) -> None:
        """Until every rank has dialled. Raises ExecutorError naming those that have not."""
        try:
            async with asyncio.timeout(seconds):
                while self._missing():
                    self.check_health()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = ", ".join(self._missing())
            raise ExecutorError(f"no link from {missing} within {seconds:g} s") from None
        self._listener.stop_listening()

    def _missing(self) -> list[str]:
        return [name for name, link in self._links.items() if link is None]

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Send to all ranks at once; nothing is awaited. The future fails with ExecutorError."""
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._in_flight.append((plan.step_id, future))
        if len(self._in_flight) == 1:
            self._start_timer()
        message = encode(plan)
        for link in self._links.values():
            if link is not None:
                link.send(PLAN, message)
        return future

    def check_health(self) -> None:
        """Raises the ExecutorError that ended it, if any."""
        if self._failure is not None:
            raise self._failure

    def fail(self, cause: str) -> None:
        """Fail everything in flight and all that comes; only the first cause counts."""
        if self._failure is not None:
            return
        self._failure = ExecutorError(cause)
        self._stop_timer()
        self._changed.set()
        for _, future in self._in_flight:
            if not future.done():
                future.set_exception(self._failure)
        self._in_flight.clear()

    def close(self, cause: str = "the executor was shut down") -> None:
        """End the links: ranks see EOF and die."""
        self.fail(cause)
        self._listener.close()

    # Deadline of the oldest plan

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._step_seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        step_id = self._in_flight[0][0]
        self.fail(f"{rank_name(0)} gave no result of step {step_id} within {self._step_seconds:g} s")

    # What the listener calls

    def _opened(self, link: AsyncLink) -> None:
        if self._links.get(link.name, link) is not None:
            raise LinkError(f"{link.peer} calls itself {link.name!r}, which is no rank that is waited for")
        self._links[link.name] = link
        self._changed.set()

    def _received(self, link: AsyncLink, kind: int, payload: bytes) -> None:
        if kind == ERROR:
            self.fail(f"{link.name} failed: {payload.decode(errors='replace')}")
        elif kind == RESULT and link.name == rank_name(0):
            self._resolve(payload)
        else:
            self.fail(f"{link.name} sent a message of kind {kind}, which is not its to send")

    def _resolve(self, payload: bytes) -> None:
        try:
            result = decode_result(payload)
        except msgspec.DecodeError as error:
            self.fail(f"{rank_name(0)} sent a result that cannot be read: {error}")
            return
        expected = self._in_flight[0][0] if self._in_flight else None
        if result.step_id != expected:
            self.fail(f"{rank_name(0)} sent the result of step {result.step_id} where step {expected} was due")
            return
        _, future = self._in_flight.popleft()
        self._stop_timer()
        if self._in_flight:
            self._start_timer()
        if not future.done():
            future.set_result(result)

    def _closed(self, link: AsyncLink, cause: LinkError | None) -> None:
        if self._links.get(link.name) is link:
            self.fail(f"{link.name} is gone: {cause or 'its link was closed'}")

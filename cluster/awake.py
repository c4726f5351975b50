"""Deadlines that count only the time in which this process ran.

A process that was stopped (SIGSTOP, a frozen container, a machine under too much load) finds all its timers expired
when it wakes, before it has read what others said meanwhile. Nobody else is at fault for that time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TICK_SECONDS = 0.5
_GRACE_SECONDS = 1.0
"""What is left after a pause, at least: for reading what came meanwhile."""


class _Patience:
    """Ends a scope after so many seconds of a running loop.

    A chain of short timers, each of which counts its own length, however late it comes.
    """

    def __init__(self, scope: asyncio.Timeout, seconds: float) -> None:
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._left = seconds
        self._grace = min(seconds, _GRACE_SECONDS)
        self._had_grace = False
        self._wait()

    def _wait(self) -> None:
        self._length = min(self._left, _TICK_SECONDS)
        self._timer = self._loop.call_later(self._length, self._tick)

    def _tick(self) -> None:
        late = self._loop.time() - self._timer.when()
        self._left -= self._length
        if late > _TICK_SECONDS and self._left < self._grace and not self._had_grace:
            self._left, self._had_grace = self._grace, True
        if self._left > 0:
            self._wait()
        else:
            self._scope.reschedule(self._loop.time())

    def stop(self) -> None:
        self._timer.cancel()


@asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but seconds in which the loop stood still do not count, and after them there is a grace
    once. Raises TimeoutError.
    """
    async with asyncio.timeout(None) as scope:
        patience = _Patience(scope, seconds)
        try:
            yield
        finally:
            patience.stop()

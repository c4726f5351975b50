"""The generations under way in a front end, and how they end when it stops."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.errors import EngineError
from cluster.frontend.generation import Generation

logger = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
"""What answers that were ended by force may take to be written."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What became of the requests that were open when a front end was told to stop."""

    ended: int
    """By themselves, within the time they had."""
    forced: int
    """With an error, because that time was over."""
    unwritten: int
    """Of the forced, those whose client did not read the error in time."""


class OpenGenerations:
    """Counts generations in and out. Lives on one event loop."""

    def __init__(self) -> None:
        self.accepting = True
        """False from the beginning of `drain` on."""
        self._open: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def check_accepting(self) -> None:
        """Raises EngineError while draining."""
        if not self.accepting:
            raise EngineError("the front end is draining")

    @contextlib.contextmanager
    def hold(self, generation: Generation) -> Iterator[None]:
        """The generation is under way inside. Raises EngineError while draining."""
        self.check_accepting()
        self._open.add(generation)
        self._idle.clear()
        try:
            yield
        finally:
            self._open.discard(generation)
            if not self._open:
                self._idle.set()

    async def drain(self, seconds: float) -> DrainReport:
        """Accept nothing new; return when all have ended, those that have not after `seconds` by force.

        Whoever is ended by force gets an error, in the stream or as a 503.
        """
        self.accepting = False
        num_open = len(self._open)
        await self._wait_idle(seconds)
        late = list(self._open)
        for generation in late:
            generation.interrupt()
        await self._wait_idle(WRITE_SECONDS)
        report = DrainReport(num_open - len(late), len(late), len(self._open))
        logger.info("drained: %s", report)
        return report

    async def _wait_idle(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

"""The generations under way in a front end, and how they end when it stops."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import EngineError
from cluster.frontend.generation import Generation

logger = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
"""What answers that were ended by force may take to be written."""


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

    @contextmanager
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

    async def drain(self, seconds: float) -> None:
        """Accept nothing new; return when all have ended, those that have not after `seconds` by force.

        Whoever is ended by force gets an error, in the stream or as a 503.
        """
        self.accepting = False
        if await self._wait_idle(seconds):
            return
        logger.warning("%d requests have not ended within %g s and are ended now", len(self._open), seconds)
        for generation in list(self._open):
            generation.interrupt()
        if not await self._wait_idle(WRITE_SECONDS):
            logger.warning("%d answers were not written within %g s", len(self._open), WRITE_SECONDS)

    async def _wait_idle(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

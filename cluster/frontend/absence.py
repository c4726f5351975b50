"""Whether there is no engine because none is needed: by Serve's own word, asked only while none answers."""

import asyncio
import logging
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

SCALED_TO_ZERO = "scaled to zero"
WAKING = "waking an engine"

_WILLED = ("HEALTHY", "UPSCALING", "DOWNSCALING")
"""Serve's states of a deployment that is as it was meant to be, or on its way there by autoscaling."""
_GOING = ("STOPPING", "STOPPED")


class Absence:
    """Asks on a thread, once at a time: Serve's controller may be slow, or gone."""

    def __init__(self, read_status: Callable[[], tuple[str, Mapping[str, int]]], seconds: float) -> None:
        """`read_status` blocks; the deployment's state and how many replicas are in which state, in Serve's words."""
        self._read_status = read_status
        self._seconds = seconds
        self._reading: asyncio.Future[tuple[str, Mapping[str, int]]] | None = None

    async def phase(self) -> str | None:
        """SCALED_TO_ZERO, WAKING, or None: an engine is missing. Answers within `seconds`."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read_status))
        reading = self._reading
        await asyncio.wait((reading,), timeout=self._seconds)
        if not reading.done():
            logger.warning("Serve did not tell its state within %g s", self._seconds)
            return None
        self._reading = None
        try:
            return phase_of(*reading.result())
        except Exception as error:  # of whatever kind Ray has for it
            logger.warning("Serve did not tell its state: %r", error)
            return None


def phase_of(status: str, replica_states: Mapping[str, int]) -> str | None:
    """Out of what Serve tells of the deployment of engines."""
    staying = {state for state, count in replica_states.items() if count and state not in _GOING}
    if status not in _WILLED or staying - {"STARTING"}:
        return None
    return WAKING if staying else SCALED_TO_ZERO

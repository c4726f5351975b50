"""How long a client is willing to wait for its whole answer."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from cluster.errors import RequestError

DEADLINE_HEADER = "x-chunkserve-deadline-ms"
MAX_DEADLINE_MS = 86_400_000


class Deadline:
    """Of one request, from the arrival of its headers on; without the header there is none."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """Raises RequestError naming the header and its limits. Call it on the loop, when the request arrives."""
        self._milliseconds = _read(headers.get(DEADLINE_HEADER))
        now = asyncio.get_running_loop().time()
        self._at = None if self._milliseconds is None else now + self._milliseconds / 1000

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """What is inside is cancelled when the time is up; then raises RequestError, status 504."""
        timeout = asyncio.timeout_at(self._at)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise RequestError(
                f"the answer was not complete within the {self._milliseconds} ms of {DEADLINE_HEADER}",
                status=504,
                code="deadline_exceeded",
            ) from None


def _read(value: str | None) -> int | None:
    if value is None:
        return None
    digits = value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_DEADLINE_MS))
    if not (digits and 1 <= int(value) <= MAX_DEADLINE_MS):
        raise RequestError(
            f"the header {DEADLINE_HEADER} must be a whole number of milliseconds from 1 to {MAX_DEADLINE_MS}"
        )
    return int(value)

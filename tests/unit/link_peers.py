"""Both ends of links in one test: a listener that records, and waiting with a deadline."""

import asyncio
from collections.abc import Callable

from workers.link import AsyncLink, LinkError, LinkListener

HOST = "127.0.0.1"
DEADLINE = 20.0


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds; fail after the deadline."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - a test may look at anything, not only at what has an event
            await asyncio.sleep(0.001)


class Ends:
    """What one end was told, in order."""

    def __init__(self) -> None:
        self.opened: list[AsyncLink] = []
        self.messages: list[tuple[int, bytes]] = []
        self.closed: list[LinkError | None] = []

    def on_open(self, link: AsyncLink) -> None:
        self.opened.append(link)

    def on_message(self, link: AsyncLink, kind: int, payload: bytes) -> None:
        self.messages.append((kind, payload))

    def on_close(self, link: AsyncLink, cause: LinkError | None) -> None:
        self.closed.append(cause)


class Listening(Ends):
    """A listener that records; leave the context to close it."""

    def __init__(self, max_buffered: int = 1 << 20, greeting_seconds: float = DEADLINE) -> None:
        super().__init__()
        self.listener = LinkListener(self.on_open, self.on_message, self.on_close, max_buffered, greeting_seconds)

    async def __aenter__(self) -> "Listening":
        await self.listener.start(HOST)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.listener.close()
        await until(lambda: not self.listener.links)

"""An OpenAI-like server that follows a script, and the clock it moves: every gap is known exactly."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

HANG_UP = object()

Event = tuple[float, Any]
"""The clock at this event, and what is sent: a JSON value, raw bytes, or HANG_UP. An int first of all is a status."""

Script = Callable[[dict[str, Any]], AsyncIterator[Event]]
"""What the server does with a request of this body."""


class ScriptedClock:
    """A clock that stands still until the server moves it, and tells when it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self._read.set()
        return self.now

    @asynccontextmanager
    async def until_read(self) -> AsyncIterator[None]:
        """Leaving waits until somebody has read the clock since entering."""
        self._read.clear()
        yield
        async with asyncio.timeout(10):
            await self._read.wait()


def play(events: Iterable[Event]) -> Script:
    """The same events for every request."""

    async def script(body: dict[str, Any]) -> AsyncIterator[Event]:
        for event in events:
            yield event

    return script


def token(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None}


def delta(content: str | None, role: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"role": role, "content": content}, "finish_reason": None}]}


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


@asynccontextmanager
async def scripted_server(script: Script, clock: ScriptedClock | None) -> AsyncIterator[str]:
    """Yields the base URL. With a clock, each event waits until the client has timed the one before."""

    async def complete(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async for now, data in script(await http.json()):
            if isinstance(data, int):
                return web.json_response({"error": {"message": "no"}}, status=data)
            if not response.prepared:
                await response.prepare(http)
            if data is HANG_UP:
                assert http.transport is not None
                http.transport.abort()
                break
            line = data if isinstance(data, bytes) else f"data: {json.dumps(data)}\n\n".encode()
            if clock is None:
                await response.write(line)
                continue
            async with clock.until_read():
                clock.now = now
                await response.write(line)
        else:
            if not response.prepared:
                await response.prepare(http)
        return response

    async def models(http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()

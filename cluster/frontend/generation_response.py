"""The HTTP answer of a generation, streamed or whole."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import EngineError
from cluster.frontend.choice import ChoiceDelta
from cluster.frontend.deadline import Deadline
from cluster.frontend.generation import Generation
from cluster.frontend.http_errors import describe_error
from cluster.frontend.open_generations import OpenGenerations
from cluster.frontend.responses import DONE, AnswerShape, encode_event, encode_json
from cluster.metrics.frontend import FrontendMetrics

logger = logging.getLogger(__name__)


class GenerationResponse(Response):
    """Opens the generation, then answers; errors before the first byte are raised, to become a plain 4xx or 503.

    When the client leaves, or its deadline passes, at any moment, the generation is aborted.
    """

    def __init__(
        self,
        generation: Generation,
        open_generations: OpenGenerations,
        frontend_metrics: FrontendMetrics,
        shape: AnswerShape,
        deadline: Deadline,
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._generation = generation
        self._open_generations = open_generations
        self._frontend_metrics = frontend_metrics
        self._shape = shape
        self._deadline = deadline
        self._stream = stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        async with AsyncExitStack() as opened:
            try:
                opened.enter_context(self._open_generations.hold(self._generation))
                async with self._deadline.limit():
                    await opened.enter_async_context(self._generation)
            except EngineError:  # A RequestError is an engine's own refusal, which it has counted.
                self._frontend_metrics.refuse("unavailable")
                raise
            await (self._send_stream(send) if self._stream else self._send_whole(send))

    async def _send_whole(self, send: Send) -> None:
        choices = [ChoiceDelta() for _ in self._generation.choices]
        texts: list[list[str]] = [[] for _ in choices]
        async with self._deadline.limit(), aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                texts[index].append(delta.text)
                choices[index].entries += delta.entries
                choices[index].finish_reason = delta.finish_reason
        for choice, pieces in zip(choices, texts, strict=True):
            choice.text = "".join(pieces)
        body = encode_json(self._shape.whole(choices, self._generation.usage()))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with self._deadline.limit():
                await self._send_events(send)
            end = DONE
        except Exception as error:
            # The status is sent; all that is left is to say it in the stream and end it.
            end = encode_event(describe_error(error)[1])
        await send({"type": "http.response.body", "body": end})

    async def _send_events(self, send: Send) -> None:
        for index in range(len(self._generation.choices)):
            opening = self._shape.opening(index)
            if opening is not None:
                await _send_event(send, opening)
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                await _send_event(send, self._shape.chunk(index, delta))
        if self._include_usage:
            await _send_event(send, self._shape.usage_chunk(self._generation.usage()))


async def _send_event(send: Send, value: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": encode_event(value), "more_body": True})


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it as soon as the client is gone. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for pending in (watcher, task):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Streams whose texts are compared: the same requests in every run."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Stream:
    """What came of one stream. Times are `time.perf_counter()`."""

    text: str = ""
    num_tokens: int = 0
    times: list[float] = field(default_factory=list)
    """When it was sent, when each event with content came, and when it ended."""
    error: str | None = None


class Load:
    """The streams of every trial: the same requests each time."""

    def __init__(self, base_url: str, model: str, num_streams: int, max_tokens: int, vocab: int) -> None:
        self._url, self._model, self._max_tokens = base_url, model, max_tokens
        rng = random.Random(0)
        self._prompts = [[rng.randrange(3, vocab) for _ in range(rng.choice((4, 30, 200)))] for _ in range(num_streams)]

    async def run(self, session: aiohttp.ClientSession) -> list[Stream]:
        """All streams at once, to their ends. Never raises for the server's faults."""
        return await asyncio.gather(*(self._stream(session, index) for index in range(len(self._prompts))))

    async def _stream(self, session: aiohttp.ClientSession, index: int) -> Stream:
        stream = Stream(times=[time.perf_counter()])
        body = {
            "model": self._model,
            "prompt": self._prompts[index],
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"temperature": 0.8, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0.0}),
        }
        try:
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    stream.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                else:
                    async for line in response.content:
                        if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                            _take(json.loads(line[5:]), stream)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            stream.error = f"{type(error).__name__}: {error}"[:200]
        stream.times.append(time.perf_counter())
        if stream.error is None and not stream.num_tokens:
            stream.error = "the stream ended without its usage"
        return stream


def _take(event: dict[str, Any], stream: Stream) -> None:
    if event.get("error"):
        stream.error = str(event["error"])[:200]
    if event.get("usage"):
        stream.num_tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices") or ():
        stream.text += choice.get("text") or ""
        stream.times.append(time.perf_counter())

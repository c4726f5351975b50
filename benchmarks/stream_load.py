"""Streams whose texts are compared: the same requests in every run."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

_SMALL_BYTES = 4096
_ERROR_CHARACTERS = 300


@dataclass(slots=True)
class Stream:
    """What came of one stream. Times are `time.perf_counter()`."""

    text: str = ""
    num_tokens: int = 0
    times: list[float] = field(default_factory=list)
    """When it was sent, when each event with content came, and when it ended."""
    error: str | None = None

    def longest_gap(self) -> float:
        """Seconds."""
        return max(after - before for before, after in pairwise(self.times))

    def waited_from_to(self, begin: float, end: float) -> bool:
        """Whether it was open all that time, and nothing came."""
        return any(before <= begin and after >= end for before, after in pairwise(self.times))


@dataclass(frozen=True, slots=True)
class Client:
    """One that is unlike the others."""

    what: str
    """It does, in words."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of its request, beside the usual ones or in their place."""
    stalls_after: int = 0
    """Events after which it does not read its socket for a while."""
    stall_seconds: float = 0.0


class Load:
    """The streams of every trial: the same requests each time."""

    def __init__(self, base_url: str, model: str, num_streams: int, max_tokens: int, vocab: int) -> None:
        self._url, self._model, self.max_tokens, self.num_streams = base_url, model, max_tokens, num_streams
        rng = random.Random(0)
        self._prompts = [[rng.randrange(3, vocab) for _ in range(rng.choice((4, 30, 200)))] for _ in range(num_streams)]

    async def run(self, session: aiohttp.ClientSession, unlike: Mapping[int, Client] | None = None) -> list[Stream]:
        """All streams at once, to their ends; `unlike` by index of the stream. Never raises for the server's faults."""
        clients = unlike or {}
        return await asyncio.gather(
            *(self.run_one(session, index, clients.get(index)) for index in range(self.num_streams))
        )

    async def run_one(self, session: aiohttp.ClientSession, index: int, client: Client | None = None) -> Stream:
        """One of them alone."""
        stream = Stream(times=[time.perf_counter()])
        body = {
            "model": self._model,
            "prompt": self._prompts[index],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"temperature": 0.8, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0.0}),
        }
        try:
            if client is None:
                await self._read(session, body, stream)
            else:
                async with _small_session(session.timeout) as small:
                    await self._read(small, body | dict(client.fields), stream, client)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            stream.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        stream.times.append(time.perf_counter())
        if stream.error is None and not stream.num_tokens:
            stream.error = "the stream ended without its usage"
        return stream

    async def _read(
        self, session: aiohttp.ClientSession, body: dict[str, Any], stream: Stream, client: Client | None = None
    ) -> None:
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                stream.error = f"HTTP {response.status}: {(await response.text())[:_ERROR_CHARACTERS]}"
                return
            async for line in response.content:
                if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                    _take(json.loads(line[5:]), stream)
                    if client is not None and client.stall_seconds and len(stream.times) == client.stalls_after:
                        await asyncio.sleep(client.stall_seconds)


def _small_session(timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    """One that takes little from the network ahead of its reader."""

    def small_socket(address: Any) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BYTES)
        return made

    connector = aiohttp.TCPConnector(force_close=True, socket_factory=small_socket)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=_SMALL_BYTES)


def _take(event: dict[str, Any], stream: Stream) -> None:
    if event.get("error"):
        stream.error = str(event["error"])[:_ERROR_CHARACTERS]
    if event.get("usage"):
        stream.num_tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices") or ():
        stream.text += choice.get("text") or ""
        stream.times.append(time.perf_counter())

"""One streamed request to an OpenAI-compatible server, with the time of every token."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import aiohttp

from benchmarks.workloads import PlannedRequest

Api = Literal["completions", "chat"]
Dialect = Literal["openai", "transformers"]
"""How a server is told to sample greedily and past the end-of-text token."""
Clock = Callable[[], float]


@dataclass(slots=True)
class RequestRecord:
    """What one request met. Times are seconds since the run began."""

    kind: str
    sent_at: float
    prompt_tokens: int
    """As the server counts them, as planned where it does not say."""
    token_times: list[float] = field(default_factory=list)
    """When each event with content came: an event of several tokens is one entry."""
    ended_at: float | None = None
    output_tokens: int = 0
    """As the server counts them, else the events."""
    cached_tokens: int = 0
    cut: bool = False
    """Ended by us, because the run was over."""
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def itl(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first."""
        if self.output_tokens < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds to the end of the answer; None if it was cut."""
        return None if self.ended_at is None or self.cut else self.ended_at - self.sent_at


class StreamClient:
    """Sends requests over one aiohttp session and reads their event streams."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        model: str,
        api: Api = "completions",
        extra: dict[str, Any] | None = None,
        dialect: Dialect = "openai",
        clock: Clock = time.perf_counter,
    ) -> None:
        """`extra` is merged into every body. Record times count from now."""
        self._session = session
        self._url = base_url.rstrip("/") + ("/v1/chat/completions" if api == "chat" else "/v1/completions")
        self._model, self._api, self._extra, self._dialect = model, api, extra or {}, dialect
        self._clock = clock
        self._origin = clock()

    def now(self) -> float:
        """Seconds since this client was built."""
        return self._clock() - self._origin

    async def stream(
        self,
        request: PlannedRequest,
        on_first_token: Callable[[], None] | None = None,
        until: asyncio.Event | None = None,
    ) -> RequestRecord:
        """Send it and read to the end, or to the first event after `until` is set. Never raises for the server's
        faults: they are the record's `error`.
        """
        record = RequestRecord(request.kind, self.now(), request.num_prompt_tokens)
        try:
            async with self._session.post(self._url, json=self._body(request)) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                    return record
                await self._read(response, record, on_first_token, until)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"[:300]
            return record
        record.ended_at = self.now()
        if not record.token_times and record.error is None:
            record.error = "the stream ended without a token"
        return record

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": request.max_tokens, "stream": True}
        if self._dialect == "openai":
            body |= {"temperature": 0.0, "ignore_eos": True, "stream_options": {"include_usage": True}}
        else:
            # `transformers serve` takes a whole generation config, as text; without an end-of-text id it never stops.
            body["generation_config"] = json.dumps({"max_new_tokens": request.max_tokens, "do_sample": False})
        if self._api == "completions":
            body["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            raise ValueError("the chat API takes text: prompts of token ids need a tokenizer")
        return body | self._extra

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        record: RequestRecord,
        on_first_token: Callable[[], None] | None,
        until: asyncio.Event | None,
    ) -> None:
        buffer = b""
        async for chunk in response.content.iter_any():
            now = self.now()
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if not self._take(line.strip(), record):
                    continue
                record.token_times.append(now)
                if on_first_token is not None and len(record.token_times) == 1:
                    on_first_token()
            if until is not None and until.is_set():
                record.cut = True
                record.output_tokens = len(record.token_times)
                return

    def _take(self, line: bytes, record: RequestRecord) -> bool:
        """Whether this line of the event stream brought a token."""
        if not line.startswith(b"data:") or line == b"data: [DONE]":
            return False
        event = json.loads(line[5:])
        if event.get("error"):
            record.error = str(event["error"])[:300]
            return False
        if usage := event.get("usage"):
            record.prompt_tokens = usage["prompt_tokens"]
            record.output_tokens = usage["completion_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        choices = event.get("choices")
        if not choices:
            return False
        choice = choices[0]
        text = (choice.get("delta") or {}).get("content") if self._api == "chat" else choice.get("text")
        # An empty piece still is a token (part of a character), unless it only carries the role or the finish.
        is_token = text is not None and (text != "" or (self._api == "completions" and not choice.get("finish_reason")))
        if is_token and not usage:
            record.output_tokens = len(record.token_times) + 1
        return is_token

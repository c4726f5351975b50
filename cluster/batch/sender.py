"""One line sent to a service, again and again while the service cannot answer it."""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.batch.lines import BatchLine
from cluster.errors import EngineError

REQUEST_SECONDS = 3600.0
"""At the lowest priority an answer may take long; a connection that is broken without a word must not wait for ever."""
CONNECT_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
LONGEST_RETRY_AFTER_SECONDS = 60.0
MOST_FAULTS = 5
"""Of the service at one line: then it is the line's, which may be what kills the ranks each time."""
_NOT_NOW = frozenset({408, 429})


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service said for good: a 200, or why it will never be one."""

    status: int
    request_id: str
    body: dict[str, Any]


class _NotNowError(Exception):
    """Another time the answer may be another one. `busy`: the service lives and says when. `fault`: its own answer to
    this line, which it should not give.
    """

    def __init__(
        self, reason: str, *, busy: bool = False, retry_after: float = 0.0, fault: Answer | None = None
    ) -> None:
        super().__init__(reason)
        self.busy = busy
        self.fault = fault
        self.retry_after = retry_after


class Sender:
    """Sends lines to one service.

    A line that cannot be answered now is sent again, with growing pauses, for `patience_seconds` after its first
    failure. Then, if no other line was answered in that time either, the service is gone: EngineError. If others
    were, it is this line's fault, which then fails, as it does after MOST_FAULTS answers of 500; but a line that is
    refused as one too many goes on waiting.
    """

    def __init__(self, client: httpx.AsyncClient, priority: int, patience_seconds: float) -> None:
        """`client` knows the service's base URL and key; `priority` is what every request gets."""
        self._client = client
        self._priority = priority
        self._patience = patience_seconds
        self._last_answer = -float("inf")

    async def send(self, line: BatchLine) -> Answer:
        """What the service says for good. Raises EngineError when it is gone, or refuses the key."""
        pause = FIRST_PAUSE_SECONDS
        failing_since: float | None = None
        faults = 0
        while True:
            try:
                answer = await self._post(line)
            except _NotNowError as error:
                faults += error.fault is not None
                if error.fault is not None and faults == MOST_FAULTS:
                    return error.fault
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                if now - failing_since > self._patience:
                    if self._last_answer < failing_since:
                        raise EngineError(
                            f"the service has answered nothing for {self._patience:g} s; last: {error}"
                        ) from error
                    if not error.busy:
                        return Answer(503, "", _failure(f"given up after {self._patience:g} s: {error}"))
                await asyncio.sleep(max(error.retry_after, pause * random.uniform(0.5, 1.0)))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            self._last_answer = time.monotonic()
            return answer

    async def _post(self, line: BatchLine) -> Answer:
        timeout = httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS)
        try:
            content = json.dumps(line.body | {"priority": self._priority}, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as error:
            reason = "a text that is not Unicode" if isinstance(error, UnicodeError) else "a number that is not finite"
            return Answer(400, "", _failure(f"body holds {reason}", "invalid_request_error", None))
        headers = {"content-type": "application/json"}
        try:
            response = await self._client.post(line.url, content=content, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise _NotNowError(f"{type(error).__name__} {error}".strip()) from error
        return _judge(response)


def _judge(response: httpx.Response) -> Answer:
    """The answer, if it is one for good."""
    status = response.status_code
    body = _object(response)
    if status in (401, 403):
        raise EngineError(f"the service refuses the API key ({status})")
    if status in _NOT_NOW:
        raise _NotNowError(f"status {status}", busy=True, retry_after=_retry_after(response))
    # What has not the API's shape was said by a proxy before a service that is away.
    is_error = status >= 400 and isinstance(body.get("error"), dict)
    if not (is_error or (status == 200 and body)):
        raise _NotNowError(f"status {status} without an answer of the API")
    answer = Answer(status, response.headers.get("x-request-id", ""), body)
    if status >= 500 and response.headers.get("x-should-retry") != "false":
        fault = answer if status == 500 else None
        reason = f"status {status}: {body['error'].get('message')}"
        raise _NotNowError(reason, retry_after=_retry_after(response), fault=fault)
    return answer


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return min(float(text), LONGEST_RETRY_AFTER_SECONDS) if text.isdecimal() else 0.0


def _failure(message: str, kind: str = "server_error", code: str | None = "unavailable") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}

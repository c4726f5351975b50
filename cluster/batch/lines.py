"""The lines of a batch file, in OpenAI's format: custom_id, method, url, body."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = 16 << 20
"""As large as a request's body may be by default."""
MAX_CUSTOM_ID = 512


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. `number` counts lines from 1, blank ones included."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request, and why."""

    number: int
    custom_id: str | None
    message: str


class _Wrong(Exception):
    pass


class LineParser:
    """Parses the lines of one file in their order; of two with the same custom_id, the second is wrong.

    It remembers 16 bytes of each custom_id's hash: about 90 bytes of memory a line.
    """

    def __init__(self, endpoints: Collection[str] = ENDPOINTS) -> None:
        self._endpoints = endpoints
        self._seen: set[bytes] = set()

    def parse(self, number: int, raw: bytes) -> BatchLine | BadLine:
        """The request in a line that is not blank, or what is wrong with it."""
        custom_id: str | None = None
        try:
            fields = _object(raw)
            custom_id = _custom_id(fields.get("custom_id"))
            self._note(custom_id)
            if fields.get("method", "POST") != "POST":
                raise _Wrong("method must be POST")
            url = fields.get("url")
            if not isinstance(url, str) or url not in self._endpoints:
                raise _Wrong(f"url must be {' or '.join(self._endpoints)}")
            body = fields.get("body")
            if not isinstance(body, dict):
                raise _Wrong("body must be a JSON object")
            if body.get("stream"):
                raise _Wrong("body.stream must be false: an answer in a batch is not streamed")
            return BatchLine(number, custom_id, url, body)
        except _Wrong as wrong:
            return BadLine(number, custom_id, str(wrong))

    def _note(self, custom_id: str) -> None:
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            raise _Wrong("custom_id is that of an earlier line")
        self._seen.add(digest)


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_LINE_BYTES:
        raise _Wrong(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise _Wrong("the line is not valid UTF-8") from None
    except RecursionError:
        raise _Wrong("the line is nested too deeply") from None
    except ValueError:
        raise _Wrong("the line is not valid JSON") from None
    if not isinstance(value, dict):
        raise _Wrong("the line must be a JSON object")
    return value


def _custom_id(value: Any) -> str:
    if value is None:
        raise _Wrong("custom_id is missing")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID:
        raise _Wrong(f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(name)

"""The shapes of answers: OpenAI's completion and chat objects, whole and as stream chunks."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from cluster.frontend.choice import ChoiceDelta, TokenEntry
from cluster.frontend.generation import Usage
from cluster.frontend.token_table import TokenTable

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

_encoder = msgspec.json.Encoder()


def encode_json(value: Json) -> bytes:
    """UTF-8 JSON."""
    return _encoder.encode(value)


def encode_event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


class AnswerShape(Protocol):
    """How one route writes its answer; one object a request."""

    def opening(self, index: int) -> Json | None:
        """The chunk before a choice's first content, if the format has one."""

    def chunk(self, index: int, delta: ChoiceDelta) -> Json:
        """A stream chunk."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk, with `include_usage`."""

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Json:
        """The answer without streaming; each choice's deltas joined."""


class CompletionShape:
    """/v1/completions."""

    def __init__(self, model: str, table: TokenTable, num_logprobs: int | None, include_usage: bool) -> None:
        self._table = table
        self._num_logprobs = num_logprobs
        self._head: Json = _head("cmpl", "text_completion", model)
        self._usage: Json = {"usage": None} if include_usage else {}

    def opening(self, index: int) -> Json | None:
        return None

    def chunk(self, index: int, delta: ChoiceDelta) -> Json:
        return {**self._head, "choices": [self._choice(index, delta)], **self._usage}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head, "choices": [], "usage": _usage(usage)}

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Json:
        written = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._head, "choices": written, "usage": _usage(usage)}

    def _choice(self, index: int, delta: ChoiceDelta) -> Json:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.entries) if self._num_logprobs is not None else None,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Json:
        return {
            "text_offset": [entry.text_offset for entry in entries],
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprobs and _finite(entry.logprobs.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
        }

    def _top(self, entry: TokenEntry) -> Json | None:
        if entry.logprobs is None:
            return None
        top: Json = {}
        for token_id, logprob in _candidates(entry, self._num_logprobs or 0):
            # Different tokens may read the same (a special token and its text): the better one stays.
            top.setdefault(self._name(token_id), _finite(logprob))
        return top

    def _name(self, token_id: int) -> str:
        """A token's text; where it is no text of its own, its bytes as the older API wrote them."""
        piece = self._table.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, model: str, table: TokenTable, num_logprobs: int | None, include_usage: bool) -> None:
        self._table = table
        self._num_logprobs = num_logprobs
        self._head: Json = _head("chatcmpl", "chat.completion.chunk", model)
        self._usage: Json = {"usage": None} if include_usage else {}

    def opening(self, index: int) -> Json | None:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return {**self._head, "choices": [choice], **self._usage}

    def chunk(self, index: int, delta: ChoiceDelta) -> Json:
        choice = {
            "index": index,
            "delta": {"content": delta.text} if delta.text or delta.entries else {},
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish_reason,
        }
        return {**self._head, "choices": [choice], **self._usage}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head, "choices": [], "usage": _usage(usage)}

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Json:
        written = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.entries),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": written, "usage": _usage(usage)}

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Json | None:
        if self._num_logprobs is None:
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenEntry) -> Json:
        logprob = 0.0 if entry.logprobs is None else entry.logprobs.logprob
        top = _candidates(entry, self._num_logprobs) if self._num_logprobs else []
        return {**self._token(entry.token_id, logprob), "top_logprobs": [self._token(*item) for item in top]}

    def _token(self, token_id: int, logprob: float) -> Json:
        piece = self._table.piece(token_id)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}


def _head(prefix: str, kind: str, model: str) -> Json:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _candidates(entry: TokenEntry, num_logprobs: int) -> list[tuple[int, float]]:
    """The best tokens, best first, and the sampled one after them if it is not among them."""
    if entry.logprobs is None:
        return []
    top = entry.logprobs.top[:num_logprobs]
    if all(token_id != entry.token_id for token_id, _ in top):
        top = [*top, (entry.token_id, entry.logprobs.logprob)]
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)

"""2,000 odd requests: never a 5xx, always the shape of an error, and then a good request is served."""

import asyncio
import json
from typing import Any

import httpx
from api_fakes import EOS, MODEL, VOCAB, FakeEngineClient, events_of, http_client, ids_of, make_app
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.frontend.chat_messages import _ROLES
from cluster.frontend.unsupported_fields import _HARMLESS_CHAT, _HARMLESS_COMPLETION

SHARED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "min_tokens": 1,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "seed": 3,
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "priority": 1,
    "cache_salt": "salt",
    "user": "me",
}
COMPLETION = {**SHARED, "prompt": ["hi", "there"], "logprobs": 2, "echo": True}
CHAT = {
    **SHARED,
    "messages": [{"role": "user", "content": "hi"}],
    "logprobs": True,
    "top_logprobs": 2,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {"style": "plain"},
}
NUMBERS = [
    0,
    -0.0,
    1,
    -1,
    2,
    0.5,
    1e-300,
    1e308,
    20,
    21,
    127,
    128,
    129,
    VOCAB,
    VOCAB - 1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**30,
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.floats(),
    st.integers(),
    st.text(max_size=8),
    st.sampled_from(
        ["", "\0", "\ud800", "😀", "\u202eab", "<|im_end|>", "refuse me", "break me", "1", "true", "x" * 3000]
    ),
)
STRUCTURED = st.one_of(
    st.sampled_from([[1, 2], [[1], [2]], [[]], [5] * 200, ["a", 1], [{}], [None], {"include_usage": 1}, {"self": 1}]),
    st.builds(lambda role, content: [{"role": role, "content": content}], st.sampled_from([*_ROLES, "tool"]), ODD),
    st.builds(lambda kind, text: [{"role": "user", "content": [{"type": kind, "text": text}]}], st.just("text"), ODD),
)
VALUES = st.recursive(
    ODD | STRUCTURED,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.just("5"), inner, max_size=4),
    max_leaves=5,
)
NAMES = sorted({*COMPLETION, *CHAT, *_HARMLESS_COMPLETION, *_HARMLESS_CHAT, "unknown"})
CHANGES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)
KNOWN_PARAMS = {*NAMES, "name", "n", None}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid body with a few fields left out and a few changed; sometimes its bytes broken as well."""
    route, base = draw(st.sampled_from([("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]))
    needed = {"model", "prompt", "messages"}
    kept = {name: value for name, value in base.items() if name in needed or draw(st.booleans())}
    body = json.dumps({**kept, **draw(CHANGES)}).encode()
    if draw(st.integers(0, 9)) == 0:
        cut = draw(st.integers(0, len(body)))
        body = body[:cut] + draw(st.binary(max_size=4)) + body[cut + draw(st.integers(0, 3)) :]
    return route, body


def check(response: httpx.Response) -> None:
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert all("error" not in event for event in events_of(response.text))
        else:
            assert response.json()["usage"]["completion_tokens"] >= 0
        return
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] in KNOWN_PARAMS
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 1000
    assert "Traceback" not in response.text


def test_odd_requests_never_break_the_server() -> None:
    seen: set[int] = set()

    @settings(max_examples=2000)
    @given(requests())
    def send(request: tuple[str, bytes]) -> None:
        seen.add(asyncio.run(answer_of(*request)))

    send()
    assert {200, 400} <= seen


async def answer_of(route: str, body: bytes) -> int:
    """The status of an odd request, after it and a good one after it were checked."""
    client = FakeEngineClient([*ids_of("a 😀 b"), EOS])
    async with http_client(make_app(client)) as http:
        response = await http.post(route, content=body, headers={"content-type": "application/json"})
        check(response)
        good = await http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
        assert good.json()["choices"][0]["text"] == "a 😀 b"
    assert client.left_running() == []
    return response.status_code

"""Streams, stop strings and echo: the same text streamed and whole."""

import asyncio
from typing import Any

import pytest
from api_calls import USER, complete, finished_script, joined_text, post, reasons, stream
from api_fakes import (
    EOS,
    FakeEngineClient,
    ids_of,
    split_bytes,
)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_over_token_and_character_boundaries(route: str, include: bool) -> None:
    script = split_bytes("one 你好 two 世界 three")
    base: dict[str, Any] = {"stop": ["好 tw", "zzz"], "include_stop_str_in_output": include, "max_tokens": 60}
    base |= {"prompt": "hi"} if route == "completions" else {"messages": USER}
    client = FakeEngineClient(script)
    answer = (await post(client, route, **base)).json()
    choice = answer["choices"][0]
    text = choice["text"] if route == "completions" else choice["message"]["content"]
    assert text == ("one 你好 tw" if include else "one 你")
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("one 你好 tw".encode())
    assert client.streams[0].finishes == ["stop"]

    client = FakeEngineClient(script)
    events = await stream(client, route, **base)
    assert joined_text(events) == text
    assert reasons(events) == ["stop"]
    assert client.streams[0].finishes == ["stop"]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_a_stream_is_the_whole_answer_in_pieces(route: str) -> None:
    script = [*split_bytes("naïve 😀 "), *ids_of("hello world"), EOS]
    body = {"prompt": "hi", "max_tokens": 100} if route == "completions" else {"messages": USER}
    events = await stream(FakeEngineClient(script), route, **body)
    assert joined_text(events) == "naïve 😀 hello world"
    assert reasons(events) == ["stop"]
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == (
        {"text_completion"} if route == "completions" else {"chat.completion.chunk"}
    )
    assert all("usage" not in event for event in events)
    assert len(events) > 10


async def test_the_first_chat_chunk_of_each_choice_carries_the_role() -> None:
    events = await stream(FakeEngineClient(), "chat/completions", messages=USER, n=3, max_tokens=4)
    for index in range(3):
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])
        assert reasons(events, index) == ["length"]
        assert joined_text(events, index)


async def test_usage_is_in_one_last_chunk_when_asked() -> None:
    body = {"prompt": "hi", "n": 2, "max_tokens": 5, "stream_options": {"include_usage": True}}
    *events, last = await stream(FakeEngineClient(), "completions", **body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 10
    assert last["usage"]["prompt_tokens"] == len(ids_of("hi"))
    assert all(event["usage"] is None for event in events)


async def test_a_token_that_shows_nothing_makes_no_event() -> None:
    events = await stream(FakeEngineClient(split_bytes("😀")), "completions", prompt="x", max_tokens=4)
    assert [event["choices"][0]["text"] for event in events] == ["😀"]


async def test_one_slow_choice_does_not_hold_up_another() -> None:
    gate = asyncio.Event()
    client = FakeEngineClient()
    calls = 0

    async def delay() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # the first choice waits for the second one's last token
            await gate.wait()
        elif calls == 4:
            gate.set()

    client.delay = delay
    answer = await asyncio.wait_for(complete(client, n=2, max_tokens=3), 10)
    assert len(answer["choices"]) == 2


async def test_echo_puts_the_prompt_before_the_text() -> None:
    answer = await complete(finished_script(" there"), prompt="hello", echo=True, max_tokens=20)
    assert answer["choices"][0]["text"] == "hello there"
    client = FakeEngineClient()
    answer = await complete(client, prompt=["hello", "you"], n=2, echo=True, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == ["hello", "hello", "you", "you"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    assert client.calls == []
    events = await stream(client, "completions", prompt="hello", echo=True, max_tokens=0)
    assert joined_text(events) == "hello"


async def test_a_character_split_between_prompt_and_answer_is_whole_in_the_echo() -> None:
    first, *rest = split_bytes("é")
    answer = await complete(FakeEngineClient(rest), prompt=[first], echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "é"


async def test_a_possible_stop_string_at_the_end_is_text() -> None:
    answer = await complete(FakeEngineClient(split_bytes("one tw")), stop="two", max_tokens=6)
    assert answer["choices"][0] == {"index": 0, "text": "one tw", "logprobs": None, "finish_reason": "length"}


async def test_min_tokens_win_over_stop_strings() -> None:
    script = split_bytes("ab ab ab")
    answer = await complete(FakeEngineClient(script), stop="ab", min_tokens=4, max_tokens=8)
    assert answer["choices"][0]["text"] == "ab "
    assert answer["usage"]["completion_tokens"] == 5
    answer = await complete(FakeEngineClient(script), stop="ab", min_tokens=2, max_tokens=8)
    assert answer["choices"][0]["text"] == ""

"""The routes and their results, not streamed and streamed, over a scripted engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from api_fakes import (
    BACKEND,
    EOS,
    MAX_MODEL_LEN,
    MODEL,
    TOKENIZER,
    VOCAB,
    FakeEngineClient,
    events_of,
    fake_logprobs,
    http_client,
    ids_of,
    make_app,
    split_bytes,
)

TEXT = "Hello world, how are you today?"
USER = [{"role": "user", "content": "hi"}]


async def post(client: FakeEngineClient, route: str, **body: Any) -> httpx.Response:
    async with http_client(make_app(client)) as http:
        return await http.post(f"/v1/{route}", json={"model": MODEL, **body})


async def complete(client: FakeEngineClient, **body: Any) -> dict[str, Any]:
    response = await post(client, "completions", **{"prompt": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def chat(client: FakeEngineClient, **body: Any) -> dict[str, Any]:
    response = await post(client, "chat/completions", **{"messages": USER, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: FakeEngineClient, route: str, **body: Any) -> list[dict[str, Any]]:
    response = await post(client, route, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def finished_script(text: str) -> FakeEngineClient:
    return FakeEngineClient([*ids_of(text), EOS])


async def test_a_completion() -> None:
    client = finished_script(TEXT)
    answer = await complete(client, max_tokens=100)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == MODEL
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    num_tokens = len(ids_of(TEXT)) + 1
    num_prompt = len(ids_of("hi"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert client.streams[0].prompt == ids_of("hi")
    assert client.streams[0].finishes == []


async def test_a_chat_completion() -> None:
    client = finished_script(TEXT)
    answer = await chat(client)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert client.streams[0].prompt == TOKENIZER.encode(rendered, add_special_tokens=False)


async def test_chat_may_take_all_the_room_and_completions_take_16() -> None:
    client = FakeEngineClient()
    answer = await chat(client)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert client.params[0].max_tokens == MAX_MODEL_LEN - len(client.streams[0].prompt)
    assert (await complete(client))["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("length", [MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
async def test_the_longest_prompt_leaves_room_for_one_token(length: int) -> None:
    client = FakeEngineClient()
    response = await post(client, "completions", prompt=[5] * length, max_tokens=50)
    if length < MAX_MODEL_LEN:
        assert response.json()["usage"]["completion_tokens"] == 1
        return
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert str(MAX_MODEL_LEN) in error["message"]
    assert str(length) in error["message"]
    assert client.calls == []


async def test_a_chat_too_long_is_a_400_with_its_length() -> None:
    messages = [{"role": "user", "content": "hello " * 3000}]
    response = await post(FakeEngineClient(), "chat/completions", messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert str(MAX_MODEL_LEN) in response.json()["error"]["message"]


async def test_max_tokens_and_min_tokens_are_clipped_to_the_room() -> None:
    client = FakeEngineClient()
    await complete(client, prompt=[5] * 120, max_tokens=100, min_tokens=50)
    assert (client.params[0].max_tokens, client.params[0].min_tokens) == (8, 8)


async def test_prompts_and_n_make_choices_in_order() -> None:
    scripts = [[*ids_of(f"answer {index}"), EOS] for index in range(4)]
    client = FakeEngineClient(scripts=scripts)
    answer = await complete(client, prompt=["a", "bc"], n=2, seed=7, max_tokens=50)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [f"answer {index}" for index in range(4)]
    assert [stream.prompt for stream in client.streams] == [ids_of("a")] * 2 + [ids_of("bc")] * 2
    assert [params.seed for params in client.params] == [7, 8, 7, 8]
    assert answer["usage"]["prompt_tokens"] == len(ids_of("a")) + len(ids_of("bc"))
    assert answer["usage"]["completion_tokens"] == sum(map(len, scripts))


async def test_seeds_wrap_and_are_drawn_for_each_prompt() -> None:
    client = FakeEngineClient()
    await complete(client, n=2, seed=2**64 - 1)
    assert [params.seed for params in client.params] == [2**64 - 1, 0]
    await complete(client, prompt=["a", "a"], n=2)
    first, second, third, fourth = (params.seed for params in client.params[2:])
    assert (second - first) % 2**64 == (fourth - third) % 2**64 == 1
    assert first != third


async def test_ids_and_lists_of_ids_are_prompts_as_they_are() -> None:
    client = FakeEngineClient()
    await complete(client, prompt=[1, 2, VOCAB - 1])
    await complete(client, prompt=[[3], [4, 5]])
    assert [stream.prompt for stream in client.streams] == [[1, 2, VOCAB - 1], [3], [4, 5]]


@pytest.mark.parametrize("prompt", ["", "a\0b", "\ud800", "😀", "שלום", "\u202e"])
async def test_odd_text_is_ordinary_input(prompt: str) -> None:
    client = finished_script("fine")
    body = json.dumps({"model": MODEL, "prompt": prompt})  # with escapes: lone surrogates have no UTF-8
    async with http_client(make_app(client)) as http:
        response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.json()["choices"][0]["text"] == "fine"
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": prompt}], "cache_salt": "\udfff"})
        response = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert response.json()["choices"][0]["message"]["content"] == "fine"


async def test_an_empty_prompt_begins_a_document() -> None:
    client = FakeEngineClient()
    await complete(client, prompt="")
    assert client.streams[0].prompt == [TOKENIZER.document_start]


async def test_cached_tokens_are_the_prompts_own_hit() -> None:
    client = FakeEngineClient()
    client.cached = lambda index: [0, 32, 16, 48][index]
    answer = await complete(client, prompt=["a", "b"], n=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0 + 16}


async def test_priority_and_cache_salt_reach_the_engine() -> None:
    client = FakeEngineClient()
    await complete(client, priority=-3, cache_salt="mine")
    assert (client.calls[0]["priority"], client.calls[0]["cache_salt"]) == (-3, "mine")


async def test_a_stop_token_is_counted_and_not_shown_unless_asked() -> None:
    stop = ids_of("?")[0]
    for include in (False, True):
        client = FakeEngineClient([*ids_of("why"), stop])
        answer = await complete(client, stop_token_ids=[stop], include_stop_str_in_output=include, max_tokens=50)
        assert answer["choices"][0]["text"] == ("why?" if include else "why")
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(ids_of("why")) + 1


async def test_special_tokens_are_shown_when_asked() -> None:
    script = [*ids_of("a"), EOS, *ids_of("b")]
    for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
        body = {"ignore_eos": True, "max_tokens": len(script), "skip_special_tokens": skip}
        answer = await complete(FakeEngineClient(script), **body)
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "length"


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


async def test_min_tokens_win_over_stop_strings() -> None:
    script = split_bytes("ab ab ab")
    answer = await complete(FakeEngineClient(script), stop="ab", min_tokens=4, max_tokens=8)
    assert answer["choices"][0]["text"] == "ab "
    assert answer["usage"]["completion_tokens"] == 5
    answer = await complete(FakeEngineClient(script), stop="ab", min_tokens=2, max_tokens=8)
    assert answer["choices"][0]["text"] == ""


async def test_a_possible_stop_string_at_the_end_is_text() -> None:
    answer = await complete(FakeEngineClient(split_bytes("one tw")), stop="two", max_tokens=6)
    assert answer["choices"][0] == {"index": 0, "text": "one tw", "logprobs": None, "finish_reason": "length"}


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


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_with_logprobs_merges_the_prompts(streamed: bool) -> None:
    prompt, script = ids_of("hello world"), ids_of(" there")
    body: dict[str, Any] = {"prompt": "hello world", "echo": True, "logprobs": 2, "max_tokens": len(script)}
    client = FakeEngineClient(script)
    logprobs = await completion_logprobs(client, streamed, **body)
    texts = [BACKEND.decode([token_id]) for token_id in prompt + script]
    assert logprobs["tokens"] == texts
    assert logprobs["text_offset"] == [sum(map(len, texts[:index])) for index in range(len(texts))]
    expected = [fake_logprobs(token_id, 2).logprob for token_id in prompt + script]
    assert logprobs["token_logprobs"] == [None, *expected[1:]]
    assert logprobs["top_logprobs"][0] is None
    assert client.params[0].num_prompt_logprobs == client.params[0].num_logprobs == 2


async def test_echo_with_logprobs_and_no_tokens_scores_the_prompt() -> None:
    client = FakeEngineClient()
    answer = await complete(client, prompt="hello world", echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "hello world"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(ids_of("hello world"))
    assert answer["usage"]["completion_tokens"] == 0
    assert client.params[0].max_tokens == 1


async def completion_logprobs(client: FakeEngineClient, streamed: bool, **body: Any) -> dict[str, list[Any]]:
    if not streamed:
        return (await complete(client, **body))["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {}
    for event in await stream(client, "completions", **body):
        for name, values in event["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values)
    return joined


@pytest.mark.parametrize("streamed", [False, True])
async def test_completion_logprobs_of_split_characters(streamed: bool) -> None:
    script = split_bytes("a😀b")
    body: dict[str, Any] = {"prompt": "x", "logprobs": 3, "max_tokens": len(script)}
    logprobs = await completion_logprobs(FakeEngineClient(script), streamed, **body)
    assert logprobs["tokens"] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "😀".encode()), "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]
    for token_id, own, top in zip(script, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert own == fake_logprobs(token_id, 3).logprob
        assert own in top.values()
        assert list(top.values()) == sorted(top.values(), reverse=True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_logprobs_have_true_bytes_and_the_sampled_token(streamed: bool) -> None:
    script = split_bytes("a😀b")
    body: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": len(script)}
    if streamed:
        events = await stream(FakeEngineClient(script), "chat/completions", **body)
        entries = [
            entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
    else:
        entries = (await chat(FakeEngineClient(script), **body))["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "a😀b".encode()
    assert [entry["token"] for entry in entries] == ["a", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "b"]
    for token_id, entry in zip(script, entries, strict=True):
        assert entry["logprob"] == fake_logprobs(token_id, 2).logprob
        values = [candidate["logprob"] for candidate in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["bytes"] in [candidate["bytes"] for candidate in entry["top_logprobs"]]
        assert len(values) == (2 if token_id % 2 == 0 else 3)


async def test_chat_logprobs_without_top_logprobs() -> None:
    answer = await chat(FakeEngineClient(split_bytes("ab")), logprobs=True, max_tokens=2)
    assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[], []]


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_cover_the_kept_text_only(streamed: bool) -> None:
    script = split_bytes("abXYZc")
    body: dict[str, Any] = {"prompt": "x", "logprobs": 1, "stop": "XYZ", "max_tokens": 6}
    assert (await completion_logprobs(FakeEngineClient(script), streamed, **body))["tokens"] == ["a", "b"]
    ended = FakeEngineClient([*split_bytes("ab"), EOS])
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 6}
    assert (await completion_logprobs(ended, streamed, **body))["tokens"] == ["a", "b"]


def joined_text(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def reasons(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert choices[-1]["finish_reason"] is not None
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


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


async def test_continue_final_message_continues_its_text() -> None:
    client = finished_script(" Paris")
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    answer = await chat(client, messages=messages, continue_final_message=True)
    assert answer["choices"][0]["message"]["content"] == " Paris"
    assert BACKEND.decode(client.streams[0].prompt, skip_special_tokens=False).endswith("assistant\nIt is")


async def test_models_health_and_metrics() -> None:
    async with http_client(make_app(FakeEngineClient())) as http:
        models = (await http.get("/v1/models")).json()
        assert models["object"] == "list"
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, MAX_MODEL_LEN)]
        assert (await http.get(f"/v1/models/{MODEL}")).json() == models["data"][0]
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/health/live")).status_code == 200
        metrics = await http.get("/metrics")
        assert metrics.text == "chunkserve:engine_up 1\n"
        assert metrics.headers["content-type"] == "text/plain; version=0.0.4"

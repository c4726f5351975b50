"""The routes and their results over a scripted engine."""

import json

import pytest
from api_calls import TEXT, USER, chat, complete, finished_script, post
from api_fakes import (
    BACKEND,
    EOS,
    MAX_MODEL_LEN,
    MODEL,
    TOKENIZER,
    VOCAB,
    FakeEngineClient,
    http_client,
    ids_of,
    make_app,
)


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

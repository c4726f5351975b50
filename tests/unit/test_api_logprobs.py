"""Log-probabilities: true bytes, kept text only, the same streamed and whole."""

from typing import Any

import pytest
from api_calls import USER, chat, complete, stream
from api_fakes import (
    BACKEND,
    EOS,
    FakeEngineClient,
    fake_logprobs,
    ids_of,
    split_bytes,
)


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

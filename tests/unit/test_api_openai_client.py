"""The official Python client against the API."""

import httpx
import openai
import pytest
from api_fakes import EOS, MODEL, FakeEngineClient, ids_of, make_app, split_bytes
from openai import AsyncOpenAI

from cluster.errors import EngineError


def official(client: FakeEngineClient, key: str = "secret") -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=make_app(client, api_key="secret")))
    return AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)


async def test_a_streamed_chat() -> None:
    api = official(FakeEngineClient([*split_bytes("Paris 😀."), EOS]))
    stream = await api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        stream=True,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
        extra_body={"top_k": 5},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Paris 😀."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("Paris 😀.".encode()) + 1
    entries = [e for c in chunks for choice in c.choices if choice.logprobs for e in choice.logprobs.content or []]
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == "Paris 😀."


async def test_a_chat_and_a_completion() -> None:
    api = official(FakeEngineClient([*ids_of("fine"), EOS]))
    answer = await api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2)
    assert [choice.message.content for choice in answer.choices] == ["fine", "fine"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    completion = await api.completions.create(model=MODEL, prompt="hi", logprobs=1, echo=True)
    assert completion.choices[0].text == "hifine"
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.token_logprobs is not None
    models = await api.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await api.models.retrieve(MODEL)).id == MODEL


async def test_errors_are_the_clients_own() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.AuthenticationError):
        await official(FakeEngineClient(), key="wrong").models.list()
    api = official(FakeEngineClient())
    with pytest.raises(openai.NotFoundError):
        await api.chat.completions.create(model="other", messages=messages)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as caught:
        await api.completions.create(model=MODEL, prompt="hi", temperature=5)
    assert caught.value.param == "temperature"


async def test_a_fault_in_a_stream_is_an_exception() -> None:
    client = FakeEngineClient()
    client.fault_at, client.fault = 3, EngineError("lost")
    stream = await official(client).completions.create(model=MODEL, prompt="hi", stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass

"""Calls of the API over a scripted engine, and what to read from their answers."""

from typing import Any

import httpx
from api_fakes import (
    EOS,
    MODEL,
    FakeEngineClient,
    events_of,
    http_client,
    ids_of,
    make_app,
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


def joined_text(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def reasons(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert choices[-1]["finish_reason"] is not None
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]

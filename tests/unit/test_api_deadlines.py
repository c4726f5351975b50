"""A client's deadline, and being told to come back later."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_errors import GOOD, ROUTES, check_error
from api_fakes import FakeEngineClient, http_client, make_app

from cluster.errors import RequestError
from cluster.frontend.deadline import DEADLINE_HEADER, MAX_DEADLINE_MS


@pytest.mark.parametrize(
    "value", ["0", "-1", "1.5", "", "soon", "1e3", "\u0663".encode(), str(MAX_DEADLINE_MS + 1), "9" * 5000]
)
@pytest.mark.parametrize(("route", "good"), ROUTES)
async def test_a_bad_deadline_is_a_400_that_names_the_header(route: str, good: dict[str, Any], value: Any) -> None:
    client = FakeEngineClient()
    async with http_client(make_app(client)) as http:
        response = await http.post(route, json=good, headers={DEADLINE_HEADER: value})
        message = check_error(response, 400)["message"]
        assert DEADLINE_HEADER in message
        assert str(MAX_DEADLINE_MS) in message
    assert client.calls == []


@pytest.mark.parametrize("where", ["queue", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "good"), ROUTES)
async def test_when_the_deadline_passes_everything_is_aborted(
    route: str, good: dict[str, Any], stream: bool, where: str
) -> None:
    client = FakeEngineClient()
    steps = 0

    async def hang() -> None:
        nonlocal steps
        steps += 1
        if steps > (1 if where == "queue" else 5):
            await asyncio.Event().wait()

    if where == "queue":
        client.open_delay = hang
    else:
        client.delay = hang
    body = {**good, "n": 2, "stream": stream, "max_tokens": 50}
    async with http_client(make_app(client)) as http:
        response = await asyncio.wait_for(http.post(route, json=body, headers={DEADLINE_HEADER: "200"}), 10)
        if stream and where == "decode":
            assert response.status_code == 200
            *events, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
            assert all("error" not in event for event in events)
            error = last["error"]
        else:
            error = check_error(response, 504)
            assert response.headers["x-should-retry"] == "false"
        assert error["code"] == "deadline_exceeded"
        assert f"200 ms of {DEADLINE_HEADER}" in error["message"]
    assert client.left_running() == []
    assert len(client.streams) == (1 if where == "queue" else 2)


@pytest.mark.parametrize(("route", "good"), ROUTES)
async def test_the_deadline_counts_from_the_headers_on(route: str, good: dict[str, Any]) -> None:
    """A body that comes slowly takes of it, and one that does not come ends with it."""
    client = FakeEngineClient()

    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def slow() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        yield json.dumps(good).encode()

    async def hang() -> None:
        await asyncio.Event().wait()

    client.open_delay = hang
    async with http_client(make_app(client)) as http:
        for body, milliseconds, at_most in ((stalled(), 200, 5.0), (slow(), 600, 0.85)):
            headers = {"content-type": "application/json", DEADLINE_HEADER: str(milliseconds)}
            began = time.monotonic()
            response = await asyncio.wait_for(http.post(route, content=body, headers=headers), 10)
            assert check_error(response, 504)["code"] == "deadline_exceeded"
            assert time.monotonic() - began < at_most


async def test_a_deadline_that_does_not_pass_changes_nothing() -> None:
    async with http_client(make_app(FakeEngineClient())) as http:
        plain = await http.post("/v1/completions", json=GOOD)
        limited = await http.post("/v1/completions", json=GOOD, headers={DEADLINE_HEADER: str(MAX_DEADLINE_MS)})
        assert limited.status_code == 200
        assert limited.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (1.0, "1"), (7.1, "8")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_with_the_time_to_wait(seconds: float, header: str, stream: bool) -> None:
    client = FakeEngineClient()
    client.refuse = lambda index: RequestError("the queue is too long", None, 429, "queue_full", seconds)
    async with http_client(make_app(client)) as http:
        response = await http.post("/v1/completions", json={**GOOD, "stream": stream})
        error = check_error(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert response.headers.get_list("retry-after") == [header]

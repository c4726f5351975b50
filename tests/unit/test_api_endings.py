"""Faults, disconnects and draining: what the client is told, and that nothing is left running."""

import asyncio
import json
from typing import Any

import pytest
from api_errors import GOOD, ROUTES, check_error
from api_fakes import FakeEngineClient, http_client, ids_of, make_app, refusal

from cluster.errors import EngineError, RequestError, RequestFailed
from cluster.frontend.open_generations import DrainReport


async def call_and_leave(app: Any, body: dict[str, Any], leave: asyncio.Event) -> list[dict[str, Any]]:
    """One ASGI request whose client leaves when `leave` is set; returns the messages that were sent."""
    sent = []
    chunks = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if chunks:
            return chunks.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_a_client_that_leaves_aborts_every_choice(stream: bool, where: str) -> None:
    client = FakeEngineClient()
    leave = asyncio.Event()
    steps = 0

    async def wait() -> None:
        nonlocal steps
        steps += 1
        if steps > {"queue": 1, "prefill": 0, "decode": 6}[where]:
            leave.set()
            await asyncio.Event().wait()

    if where == "queue":
        client.open_delay = wait
    else:
        client.delay = wait
    body = {**GOOD, "n": 3, "max_tokens": 100, "stream": stream}
    await asyncio.wait_for(call_and_leave(make_app(client), body, leave), 10)
    assert len(client.streams) == (1 if where == "queue" else 3)
    assert [stream.finishes for stream in client.streams] == [["abort"]] * len(client.streams)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_handler_aborts_every_choice(stream: bool) -> None:
    client = FakeEngineClient()
    started = asyncio.Event()

    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    client.delay = wait
    body = {**GOOD, "n": 2, "stream": stream}
    call = asyncio.ensure_future(call_and_leave(make_app(client), body, asyncio.Event()))
    await asyncio.wait_for(started.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [stream.finishes for stream in client.streams] == [["abort"]] * 2


async def test_a_client_that_has_its_answer_aborts_nothing() -> None:
    client = FakeEngineClient()
    sent = await call_and_leave(make_app(client), GOOD, asyncio.Event())
    assert sent[0]["status"] == 200
    assert client.streams[0].finishes == []


async def test_draining_refuses_new_requests_and_ends_old_ones() -> None:
    client = FakeEngineClient()
    app = make_app(client)
    started, gate = asyncio.Event(), asyncio.Event()

    async def delay() -> None:
        started.set()
        await gate.wait()

    client.delay = delay
    async with http_client(app) as http:
        running = asyncio.ensure_future(http.post("/v1/completions", json=GOOD))
        await started.wait()
        draining = asyncio.ensure_future(app.state.server.open_generations.drain(60))
        await asyncio.sleep(0)
        assert "draining" in check_error(await http.get("/health"), 503)["message"]
        check_error(await http.post("/v1/completions", json=GOOD), 503)
        gate.set()
        assert (await running).status_code == 200
        assert await draining == DrainReport(ended=1, forced=0, unwritten=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["queue", "decode"])
async def test_draining_ends_by_force_what_does_not_end(stream: bool, where: str) -> None:
    client = FakeEngineClient()
    app = make_app(client)
    started = asyncio.Event()

    async def hang() -> None:
        started.set()
        await asyncio.Event().wait()

    if where == "queue":
        client.open_delay = hang
    else:
        client.delay = hang
    async with http_client(app) as http:
        running = asyncio.ensure_future(http.post("/v1/completions", json={**GOOD, "n": 2, "stream": stream}))
        await started.wait()
        assert await app.state.server.open_generations.drain(0.01) == DrainReport(ended=0, forced=1, unwritten=0)
        response = await asyncio.wait_for(running, 10)
        if stream and where == "decode":
            assert json.loads(response.text.removeprefix("data: "))["error"]["type"] == "server_error"
        else:
            check_error(response, 503)
    assert client.left_running() == []


async def test_a_stopped_choice_is_not_aborted_when_a_sibling_fails() -> None:
    client = FakeEngineClient(scripts=[ids_of("a stop b"), ids_of("never ends")])
    steps = 0

    async def delay() -> None:
        nonlocal steps
        steps += 1
        if steps == 30:
            raise EngineError("lost")

    client.delay = delay
    async with http_client(make_app(client)) as http:
        check_error(await http.post("/v1/completions", json={**GOOD, "n": 2, "stop": "stop", "max_tokens": 90}), 503)
    assert [stream.finishes for stream in client.streams] == [["stop"], ["abort"]]


@pytest.mark.parametrize(
    "fault", [EngineError("rank 0 died: /secret"), ValueError("/secret bug"), RequestFailed("its own"), None]
)
@pytest.mark.parametrize(("route", "good"), ROUTES)
async def test_a_fault_ends_a_stream_with_one_error_event(
    fault: Exception | None, route: str, good: dict[str, Any]
) -> None:
    client = FakeEngineClient()
    client.fault_at, client.fault = 3, fault
    async with http_client(make_app(client), raise_app_exceptions=False) as http:
        response = await http.post(route, json={**good, "stream": True, "n": 2})
        assert response.status_code == 200
        *events, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
        assert all("error" not in event for event in events)
        assert all(choice["finish_reason"] is None for event in events for choice in event["choices"])
        assert set(last) == {"error"}
        assert last["error"]["type"] == "server_error"
        assert "/secret" not in response.text
        assert client.left_running() == []
        response = await http.post(route, json=good)
        again = check_error(response, 500 if isinstance(fault, ValueError | RequestFailed) else 503)
        if isinstance(fault, RequestFailed):  # What is wrong with a request is for its client to know.
            assert (last["error"]["message"], again["message"]) == ("its own", "its own")
            assert response.headers["x-should-retry"] == "false"
        assert client.left_running() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (refusal("the prompt needs 80 blocks of the 64 there are", "prompt"), 400, "prompt"),
        (RequestError("too many wait", status=429), 429, None),
        (EngineError("rank 1 on 10.0.0.7 died in /secret/file.py"), 503, None),
        (RuntimeError("/secret/file.py: a bug"), 500, None),
    ],
)
async def test_a_refused_choice_is_a_plain_error_and_its_siblings_are_aborted(
    stream: bool, error: Exception, status: int, param: str | None
) -> None:
    client = FakeEngineClient()
    client.refuse = lambda index: error if index == 2 else None
    app = make_app(client)
    async with http_client(app, raise_app_exceptions=False) as http:
        response = await http.post("/v1/completions", json={**GOOD, "n": 4, "stream": stream})
        check_error(response, status, param)
        assert ("retry-after" in response.headers) == (status in (429, 503))
        assert len(client.streams) == 3
        assert [stream.finishes for stream in client.streams] == [["abort"]] * 3
        client.refuse = lambda index: None
        assert (await http.post("/v1/completions", json=GOOD)).status_code == 200


async def test_a_refusal_does_not_wait_for_slow_siblings() -> None:
    client = FakeEngineClient()
    calls = 0

    async def open_delay() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.Event().wait()

    client.open_delay = open_delay
    client.refuse = lambda index: refusal("no", "prompt")
    async with http_client(make_app(client)) as http:
        response = await asyncio.wait_for(http.post("/v1/completions", json={**GOOD, "n": 2}), 10)
        check_error(response, 400, "prompt")

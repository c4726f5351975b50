"""Refusals, faults and disconnects: their shape, and that nothing is left running."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_fakes import MODEL, TOKENIZER, FakeEngineClient, events_of, http_client, ids_of, make_app, refusal

from cluster.errors import EngineError, RequestError

GOOD = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
GOOD_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ROUTES = [("/v1/completions", GOOD), ("/v1/chat/completions", GOOD_CHAT)]


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    assert "Traceback" not in response.text
    assert "/secret" not in response.text
    return body["error"]


@pytest.mark.parametrize(("route", "good"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_field_is_a_plain_400_and_the_next_request_is_served(
    route: str, good: dict[str, Any], stream: bool
) -> None:
    client = FakeEngineClient()
    async with http_client(make_app(client)) as http:
        check_error(await http.post(route, json={**good, "stream": stream, "temperature": 3}), 400, "temperature")
        assert client.calls == []
        assert (await http.post(route, json=good)).status_code == 200


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[1]", "application/json"),
        (b'{"model": NaN}', "application/json"),
        (b'{"prompt": "\xff"}', "application/json; charset=utf-8"),
        (b"[" * 100_000, "application/json"),
        (b"a=b", "application/x-www-form-urlencoded"),
        (b"{}", "text/plain"),
        (b"{}", ""),
        (b"{}", "multipart/form-data"),
    ],
)
async def test_what_is_no_json_is_a_400(content: bytes, content_type: str) -> None:
    async with http_client(make_app(FakeEngineClient())) as http:
        for route, _ in ROUTES:
            check_error(await http.post(route, content=content, headers={"content-type": content_type}), 400)


async def test_other_json_content_types_and_none_are_json() -> None:
    async with http_client(make_app(FakeEngineClient())) as http:
        body = json.dumps(GOOD).encode()
        for headers in (
            {},
            {"content-type": "Application/JSON ; charset=utf-8"},
            {"content-type": "application/x+json"},
        ):
            assert (await http.post("/v1/completions", content=body, headers=headers)).status_code == 200


async def test_unknown_routes_methods_and_models() -> None:
    async with http_client(make_app(FakeEngineClient())) as http:
        for path in ("/", "/v1", "/v1/completions/", "/v1/embeddings", "/docs", "/openapi.json", "/%00", "/../x"):
            check_error(await http.get(path), 404)
        response = await http.get("/v1/completions")
        check_error(response, 405)
        assert response.headers["allow"] == "POST"
        check_error(await http.post("/v1/completions", json={**GOOD, "model": "other"}), 404, "model")
        assert check_error(await http.get("/v1/models/<b>"), 404, "model")["code"] == "model_not_found"


async def test_the_key_guards_v1_and_nothing_else() -> None:
    async with http_client(make_app(FakeEngineClient(), api_key="sécret")) as http:
        key = "Bearer sécret".encode()
        assert (await http.post("/v1/completions", json=GOOD, headers={b"authorization": key})).status_code == 200
        for value in (b"", b"Bearer", b"Bearer x", b"bearer s\xc3\xa9cret", b"Basic abc", b"\xff\xfe"):
            response = await http.post("/v1/completions", json=GOOD, headers={b"authorization": value})
            assert check_error(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        check_error(await http.post("/v1/completions", content=b"{"), 401)
        check_error(await http.get("/v1/nothing"), 401)
        check_error(await http.get("/v1/models"), 401)
        for path in ("/health", "/health/live", "/metrics"):
            assert (await http.get(path)).status_code == 200


async def test_a_body_over_the_limit_is_refused_before_it_was_read() -> None:
    client = FakeEngineClient()
    async with http_client(make_app(client, max_body_mb=0.001)) as http:
        limit = 1048
        check = check_error(await http.post("/v1/completions", json={**GOOD, "prompt": "x" * 2000}), 413)
        assert str(limit) in check["message"]
        sent = 0

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(1000):
                sent += 512
                yield b" " * 512

        response = await http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        check_error(response, 413)
        assert sent <= limit + 2 * 512
        body = json.dumps(GOOD).encode().ljust(limit)
        headers = {"content-type": "application/json"}
        assert (await http.post("/v1/completions", content=body, headers=headers)).status_code == 200
        check_error(await http.post("/v1/completions", content=body + b" ", headers=headers), 413)


async def test_the_callers_request_id_is_echoed_in_a_header_only() -> None:
    client = FakeEngineClient()
    async with http_client(make_app(client)) as http:
        response = await http.post("/v1/completions", json=GOOD, headers={"x-request-id": "mine-1"})
        assert response.headers.get_list("x-request-id") == ["mine-1"]
        assert "mine-1" not in response.text
        again = await http.post("/v1/completions", json=GOOD, headers={"x-request-id": "mine-1"})
        assert again.json()["id"] != response.json()["id"]
        for bad in (b"x" * 129, b"a\xffb", b"a\tb"):
            response = await http.post("/v1/completions", json=GOOD, headers={b"x-request-id": bad})
            assert "128" in check_error(response, 400)["message"]
            assert "x-request-id" not in response.headers
        made = [(await http.get("/health/live")).headers["x-request-id"] for _ in range(2)]
        assert made[0] != made[1]
        assert (await http.get("/nothing")).headers["x-request-id"]


async def test_not_ready_is_a_503_with_the_phase() -> None:
    client = FakeEngineClient()
    client.ready = False
    async with http_client(make_app(client)) as http:
        assert "loading weights" in check_error(await http.get("/health"), 503)["message"]
        assert (await http.get("/health/live")).status_code == 200
        for route, good in ROUTES:
            response = await http.post(route, json=good)
            check_error(response, 503)
            assert response.headers["retry-after"] == "1"
        check_error(await http.get("/v1/models"), 503)
        client.ready = True
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/completions", json=GOOD)).status_code == 200


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
        await draining


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
        await app.state.server.open_generations.drain(0.01)
        response = await asyncio.wait_for(running, 10)
        if stream and where == "decode":
            assert json.loads(response.text.removeprefix("data: "))["error"]["type"] == "server_error"
        else:
            check_error(response, 503)
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


@pytest.mark.parametrize("fault", [EngineError("rank 0 died: /secret"), ValueError("/secret bug"), None])
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
        check_error(response, 500 if isinstance(fault, ValueError) else 503)
        assert client.left_running() == []


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


async def test_a_long_prompt_is_encoded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(FakeEngineClient())
    threads = []
    encode = TOKENIZER.encode

    def recording(text: str, **options: Any) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(text, **options)

    monkeypatch.setattr(TOKENIZER, "encode", recording)
    async with http_client(app) as http:
        await http.post("/v1/completions", json={**GOOD, "prompt": "hi"})
        await http.post("/v1/completions", json={**GOOD, "prompt": "hi " * 2000})
        await http.post(
            "/v1/chat/completions", json={**GOOD_CHAT, "messages": [{"role": "user", "content": "x" * 5000}]}
        )
    assert threads == [True, False, False]


async def test_streams_are_not_cached_and_events_are_utf8() -> None:
    async with http_client(make_app(FakeEngineClient())) as http:
        response = await http.post("/v1/completions", json={**GOOD, "stream": True})
        assert response.headers["cache-control"] == "no-cache"
        assert events_of(response.content.decode("utf-8"))

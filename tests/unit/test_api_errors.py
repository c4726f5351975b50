"""Refusals: their status, their shape, and that the next request is served."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_errors import GOOD, GOOD_CHAT, ROUTES, check_error
from api_fakes import TOKENIZER, FakeEngineClient, events_of, http_client, make_app, refusal

from cluster.errors import EngineError
from cluster.frontend import http_body
from cluster.metrics.frontend import FrontendMetrics


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


async def test_a_body_that_does_not_come_is_a_408_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_body, "BODY_SECONDS", 0.05)
    client = FakeEngineClient()

    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with http_client(make_app(client)) as http:
        headers = {"content-type": "application/json"}
        response = await http.post("/v1/completions", content=stalled(), headers=headers)
        assert "0.05 s" in check_error(response, 408)["message"]
        assert response.headers["connection"] == "close"
        assert (await http.post("/v1/completions", json=GOOD)).status_code == 200


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
        client.live = False
        assert "not live" in check_error(await http.get("/health/live"), 503)["message"]
        client.live = True
        for route, good in ROUTES:
            response = await http.post(route, json=good)
            check_error(response, 503)
            assert response.headers["retry-after"] == "1"
        check_error(await http.get("/v1/models"), 503)
        client.ready = True
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/completions", json=GOOD)).status_code == 200


@pytest.mark.parametrize(("route", "good"), ROUTES)
async def test_refusals_are_counted_once_and_by_whoever_refuses(route: str, good: dict[str, Any]) -> None:
    client, metrics = FakeEngineClient(), FrontendMetrics()

    async def refuse(*expected: tuple[str, int], **change: Any) -> None:
        assert (await http.post(route, json={**good, **change})).status_code >= 400
        counters = {key[1]: count for key, count in metrics.snapshot().counters.items()}
        assert counters == dict(expected)

    async with http_client(make_app(client, metrics, max_body_mb=0.01)) as http:
        assert (await http.post(route, json=good)).status_code == 200
        await refuse(("temperature", 1), temperature=3)
        await refuse(("temperature", 1), ("request", 1), user="x" * 20_000)
        client.refuse = lambda index: refusal("no room for the prompt", "prompt")
        await refuse(("temperature", 1), ("request", 1))
        client.refuse = lambda index: EngineError("no engine took the request")
        await refuse(("temperature", 1), ("request", 1), ("unavailable", 1), n=2)
        client.ready = False
        await refuse(("temperature", 1), ("request", 1), ("unavailable", 2))


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

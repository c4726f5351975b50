"""The whole service as a client sees it: one real launcher, HAProxy, front end, engine and rank, one tiny model."""

import asyncio
import json
import os
import random
import re
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from api_fakes import VOCAB
from served_model import MAX_MODEL_LEN, write_served_model
from service_process import ServiceProcess

from benchmarks.faults import FAULTS
from benchmarks.loadgen import new_session
from benchmarks.service_processes import ENGINE, ServiceProcesses
from benchmarks.stream_load import Load, Stream

MODEL = "tiny"
BLOCK_SIZE = 16
MESSAGES = [{"role": "user", "content": "hello"}]
QUIET_SECONDS = 20.0
REPAIR_SECONDS = 60.0
QUEUE_SECONDS = 3


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    model = write_served_model(tmp_path_factory.mktemp("model"))
    started = ServiceProcess(
        model, f"model.name={MODEL}", "model.dtype=float32", "cache.memory_gb=0.25", "server.drain_seconds=2",
        f"server.max_queue_seconds={QUEUE_SECONDS}",
    )  # fmt: skip
    try:
        started.wait_ready()
        yield started
    finally:
        started.kill()


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none", timeout=60, max_retries=0) as made:
        yield made


@pytest.fixture
def http(service: ServiceProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.base_url, timeout=60, trust_env=False) as made:
        yield made


def gauges(http: httpx.Client) -> dict[str, float]:
    """The gauges that must be zero when nothing runs, each summed over its labels."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = dict.fromkeys(names, 0.0)
    for line in http.get("/metrics").text.splitlines():
        match = re.match(r"chunkserve:(\w+)\{[^}]*\} (\S+)$", line)
        if match and match[1] in found:
            found[match[1]] += float(match[2])
    return found


def counter(http: httpx.Client, name: str) -> float:
    lines = re.findall(
        rf"^chunkserve:{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", http.get("/metrics").text, re.MULTILINE
    )
    return sum(float(value) for value in lines)


def settled(http: httpx.Client, name: str) -> float:
    """A counter once it has stood still for longer than engines take to push it."""
    deadline = time.monotonic() + QUIET_SECONDS
    value, since = counter(http, name), time.monotonic()
    while time.monotonic() - since < 2.5:
        time.sleep(0.2)
        if (now := counter(http, name)) != value:
            value, since = now, time.monotonic()
        assert time.monotonic() < deadline, f"{name} does not settle"
    return value


def wait_quiet(http: httpx.Client) -> None:
    """Gauges are pushed each second; without any further request they must all return to zero."""
    deadline = time.monotonic() + QUIET_SECONDS
    while any((last := gauges(http)).values()):
        assert time.monotonic() < deadline, f"after {QUIET_SECONDS:g} s: {last}"
        time.sleep(0.2)


def wait_healthy(http: httpx.Client) -> None:
    deadline = time.monotonic() + REPAIR_SECONDS
    while http.get("/health").status_code != 200:
        assert time.monotonic() < deadline, f"not healthy within {REPAIR_SECONDS:g} s"
        time.sleep(0.2)


def test_the_launcher_tells_what_it_runs_on(service: ServiceProcess) -> None:
    assert "from a local directory" in service.wait_line("model ")
    assert re.search(r"load took [\d.]+ s", service.output)
    assert f"blocks of {BLOCK_SIZE} tokens" in service.wait_line("KV cache")
    assert f"max_model_len: {MAX_MODEL_LEN}" in service.wait_line("max_model_len")
    assert "HAProxy" in service.wait_line("proxy: ")
    assert "float32" in service.wait_line("dtype: ")
    service.wait_line("attention: ")
    assert f"ready at {service.base_url}/v1 after" in service.wait_line("ready at")


def test_health_and_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    listed = client.models.list().data
    assert [(model.id, model.object) for model in listed] == [(MODEL, "model")]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_answer_streams_and_equals_the_whole(client: openai.OpenAI) -> None:
    request = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**request)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert len(choices) > 3  # it came bit by bit


def test_completions_with_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=["hello", "the sea"],
        max_tokens=5,
        n=2,
        temperature=1,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_a_second_prompt_hits_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = [3 + i % 90 for i in range(4 * BLOCK_SIZE + 5)]
    hits = []
    for _ in range(2):
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0).usage
        assert usage is not None
        assert usage.prompt_tokens == len(prompt)
        details = usage.prompt_tokens_details
        hits.append((details.cached_tokens if details is not None else 0) or 0)
    assert hits == [0, 4 * BLOCK_SIZE]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "temperature": 3}, 400, "temperature"),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools"),
        ("/v1/chat/completions", {"model": "other", "messages": MESSAGES}, 404, "model"),
        ("/v1/chat/completions", {"model": MODEL}, 400, "messages"),
        ("/v1/completions", {"model": MODEL, "prompt": [5] * MAX_MODEL_LEN}, 400, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [10**9]}, 400, "prompt"),
        ("/v1/nothing", {}, 404, None),
    ],
)
def test_bad_input_is_a_4xx_and_the_next_request_is_served(
    http: httpx.Client, path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    for stream in (False, True):
        answer = http.post(path, json={**body, "stream": stream})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
    good = http.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 1})
    assert good.status_code == 200


def test_a_body_that_is_no_json_is_a_400(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-request-id", b"\xff"),
        ("x-request-timeout-seconds", b"0.001"),
        ("x-request-timeout-seconds", b"\xff"),
        ("x-session-id", b"\xff"),
        ("serve_multiplexed_model_id", b"\xff"),
    ],
)
def test_headers_that_serve_would_stumble_over_do_no_harm(http: httpx.Client, name: str, value: bytes) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 40, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body, headers=[(name.encode(), value)])
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_there_in_time_is_a_504(http: httpx.Client, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    began = time.monotonic()
    answer = http.post("/v1/completions", json=body, headers={"x-chunkserve-deadline-ms": "400"})
    assert time.monotonic() - began < 5
    if stream:  # it has begun with a 200
        error = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    else:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
        error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"
    wait_quiet(http)


def test_a_body_that_does_not_come_within_the_deadline_is_a_504(service: ServiceProcess) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\nContent-Type: application/json\r\n"
        "Content-Length: 100\r\nx-chunkserve-deadline-ms: 500\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", service.port), 10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 504")


async def test_a_request_that_would_wait_too_long_is_a_429(service: ServiceProcess) -> None:
    """Prompts come faster than they are computed, until the queue is longer than its limit."""
    draw = random.Random(3)
    prompts = [[draw.randrange(10, 200) for _ in range(MAX_MODEL_LEN - 10)] for _ in range(600)]
    refused: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()

    async with httpx.AsyncClient(
        base_url=service.base_url, timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as http:

        async def send(prompt: list[int]) -> None:
            answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
            assert answer.status_code in (200, 429), answer.text
            if answer.status_code == 429 and not refused.done():
                refused.set_result(answer)

        sending = [asyncio.ensure_future(send(prompt)) for prompt in prompts]
        try:
            answer = await asyncio.wait_for(refused, 60)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert f"the limit is {QUEUE_SECONDS} s" in error["message"]
    with httpx.Client(base_url=service.base_url, timeout=60, trust_env=False) as client:
        await asyncio.to_thread(wait_quiet, client)
        assert counter(client, "admission_rejections") >= 1


def test_metrics_count_what_was_served(http: httpx.Client) -> None:
    before = settled(http, "generation_tokens")
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 9, "ignore_eos": True, "temperature": 0}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert settled(http, "generation_tokens") == before + 9


def test_clients_that_leave_free_their_blocks_without_further_traffic(
    http: httpx.Client, service: ServiceProcess
) -> None:
    aborts = settled(http, "request_aborts")
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}

    async def leave(client: httpx.AsyncClient, stream: bool) -> None:
        if not stream:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json=body, timeout=1.0)
            return
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            events = 0
            async for line in answer.aiter_lines():
                events += line.startswith("data:")
                if events == 3:
                    return

    async def leave_all() -> None:
        async with httpx.AsyncClient(base_url=service.base_url, timeout=60, trust_env=False) as client:
            await asyncio.gather(*(leave(client, stream=i % 2 == 0) for i in range(8)))

    asyncio.run(leave_all())
    wait_quiet(http)
    assert settled(http, "request_aborts") == aborts + 8


@pytest.mark.parametrize("fault", ["kill-engine", "redeploy"])
async def test_an_engine_that_is_killed_or_replaced_changes_no_text(
    http: httpx.Client, service: ServiceProcess, fault: str
) -> None:
    """Half of the streams are greedy, half sampled with a seed."""
    processes = ServiceProcesses(os.getpid())
    load = Load(service.base_url, MODEL, num_streams=6, max_tokens=2000, vocab=VOCAB)
    async with new_session() as session:
        began = time.monotonic()
        calm = await load.run(session)
        seconds = time.monotonic() - began
        running = asyncio.ensure_future(load.run(session))
        await asyncio.sleep(0.3 * seconds)
        engines = processes.named(ENGINE)
        await asyncio.to_thread(FAULTS[fault], processes, random.Random(0))
        streams = await running
    assert [stream.error for stream in streams] == [None] * 6

    def told(stream: Stream) -> tuple[str, int]:
        return stream.text, stream.num_tokens

    assert list(map(told, streams)) == list(map(told, calm))
    await asyncio.to_thread(wait_healthy, http)
    assert not set(engines) & set(processes.named(ENGINE))


def test_sigterm_refuses_new_requests_and_ends_open_streams(http: httpx.Client, service: ServiceProcess) -> None:
    """Last, because it ends the service: 2 seconds of grace, then every open stream gets an end it can read."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        service.process.terminate()
        service.wait_line("stopping")
        statuses = set()
        deadline = time.monotonic() + 10
        while 503 not in statuses:
            statuses.add(
                httpx.post(f"{service.base_url}/v1/completions", json=body | {"stream": False}, timeout=60).status_code
            )
            assert time.monotonic() < deadline
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if events[-1] == "[DONE]":
        assert json.loads(events[-2])["choices"][0]["finish_reason"] is not None
    else:
        assert json.loads(events[-1])["error"]["message"]
    assert service.wait() == 0, service.output
    assert "Traceback" not in service.output

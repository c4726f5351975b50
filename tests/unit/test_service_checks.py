"""The checks that benchmarks make of a service: its step log, its gauges after disconnects, its ratio of gaps."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from benchmarks import disconnects
from benchmarks.chunked_prefill import GAPS, Run, report
from benchmarks.disconnects import plan_visits, totals
from benchmarks.errors import BenchmarkError
from benchmarks.steps import StepCheck, check_steps, since
from benchmarks.workloads import TokenIds


def step(step_id: int, sent_at: float, received_at: float, **more: Any) -> dict[str, Any]:
    defaults = {"epoch": 0, "num_decodes": 1, "num_chunk_tokens": 0, "num_missed_decodes": 0, "sent_ahead": True}
    return defaults | {"step_id": step_id, "sent_at": sent_at, "received_at": received_at} | more


def test_a_step_log_in_which_all_is_well() -> None:
    steps = [
        step(0, 0.0, 1.0, num_decodes=0, num_chunk_tokens=9, sent_ahead=False),
        step(1, 0.5, 2.0, num_chunk_tokens=9),
        step(2, 1.0, 3.0),
    ]
    assert check_steps(steps) == StepCheck(3, 1, 0, 2, 2)
    assert check_steps(steps).ahead_share == 1.0


def test_late_plans_and_missed_streams_are_counted() -> None:
    steps = [step(0, 0.0, 1.0), step(1, 1.1, 2.0, sent_ahead=False), step(2, 1.5, 3.0, num_missed_decodes=2)]
    assert check_steps(steps) == StepCheck(3, 0, 1, 2, 1)
    assert check_steps(steps).ahead_share == 0.5


def test_the_plan_after_a_pause_had_nothing_to_run_ahead_of() -> None:
    steps = [step(0, 0.0, 1.0), step(1, 50.0, 51.0, num_decodes=0, num_chunk_tokens=5, sent_ahead=False)]
    assert check_steps(steps).num_followed == 0
    assert check_steps(steps).ahead_share == 0.0
    assert check_steps([]) == StepCheck(0, 0, 0, 0, 0)


def test_only_the_steps_of_this_run_count() -> None:
    steps = [step(number, 0.0, 1.0) for number in range(5)]
    assert [found["step_id"] for found in since(steps, steps[2])] == [3, 4]
    assert since(steps, None) == steps
    assert [found["step_id"] for found in since([*steps, step(0, 0.0, 1.0, epoch=1)], steps[4])] == [0]
    full = [step(number, 0.0, 1.0) for number in range(4096)]
    with pytest.raises(BenchmarkError, match="lost"):
        since(full, step(-5, 0.0, 1.0))


def run(largest: float, ahead: int = 100, missed: int = 0) -> Run:
    gaps = {"n": 9, "p50": largest / 2, "p99": largest, "max": largest}
    summary = {GAPS: gaps, "steady_itl_otherwise_ms": {"n": 0}, "long": {"ttft_ms": {"p50": 1000.0}}}
    return Run(summary, StepCheck(101, 10, missed, 100, ahead))


def test_the_verdict_on_chunked_prefill() -> None:
    whole = [run(1000.0), run(1100.0), run(5000.0)]
    text, good = report([run(400.0), run(440.0), run(900.0)], whole, 256)
    assert good
    assert "0.40 (p99: 0.40)" in text
    assert not report([run(450.0)], [run(1000.0)], 256)[1]
    assert not report([run(100.0, ahead=94)], whole, 256)[1]
    assert not report([run(100.0, missed=1)], whole, 256)[1]
    # Without chunking nothing is asked of the log.
    assert report([run(100.0)], [run(1000.0, ahead=0, missed=7)], 256)[1]


def test_visits_leave_at_every_moment() -> None:
    visits = plan_visits(200, random.Random(0), TokenIds())
    moments = Counter(visit.moment for visit in visits)
    assert set(moments) == set(disconnects.MOMENTS)
    assert moments["never"] == 20
    assert min(moments.values()) == 20
    assert visits == plan_visits(200, random.Random(0), TokenIds())
    assert all(visit.leave_after >= 1 for visit in visits if visit.moment == "mid-stream")


def test_series_are_summed_over_engines_and_must_be_there() -> None:
    text = 'chunkserve:request_aborts_total{engine="0"} 3.0\nchunkserve:request_aborts_total{engine="1"} 4.0\n'
    assert totals(text, ["request_aborts_total"]) == {"request_aborts_total": 7.0}
    with pytest.raises(KeyError):
        totals(text, ["num_requests_running"])


class FakeService:
    """Answers with empty events; at each look at its metrics shows the next of `running`, the last one for ever."""

    def __init__(self, running: list[int]) -> None:
        self.running_at_look = running
        self.looks = 0

    async def complete(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        for _ in range((await http.json())["max_tokens"]):
            await response.write(b"data: {}\n\n")
        return response

    async def metrics(self, http: web.Request) -> web.Response:
        running = self.running_at_look[min(self.looks, len(self.running_at_look) - 1)]
        self.looks += 1
        return web.Response(
            text=f"chunkserve:num_requests_running {running}\nchunkserve:num_requests_waiting 0\n"
            "chunkserve:kv_cache_usage_perc 0\nchunkserve:request_aborts_total 0\n"
        )

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def looked(service: FakeService, seconds: float, settle: float) -> float | None:
    async with service.running() as base_url, disconnects.new_session() as session:
        return await disconnects.wait_until_empty(session, base_url, seconds, settle)


async def test_a_service_that_empties_is_seen_to() -> None:
    service = FakeService(running=[3, 2, 0])
    assert await looked(service, seconds=60.0, settle=0.0) is not None
    assert service.looks == 3


async def test_a_service_that_seems_empty_for_a_moment_is_looked_at_again() -> None:
    service = FakeService(running=[0, 3, 0])
    assert await looked(service, seconds=60.0, settle=0.3) is not None
    assert service.looks > 3


async def test_a_service_that_never_empties_is_given_up() -> None:
    service = FakeService(running=[1])
    assert await looked(service, seconds=0.3, settle=0.0) is None
    assert service.looks > 1


async def test_clients_leave_as_planned() -> None:
    service = FakeService(running=[0])
    async with service.running() as base_url, disconnects.new_session() as session:
        for visit, expected in [
            (disconnects.Visit("mid-stream", [1], 10, 3.0), "left"),
            (disconnects.Visit("mid-stream", [1], 2, 3.0), "answered"),
            (disconnects.Visit("never", [1], 2, 0.0), "answered"),
            (disconnects.Visit("before the first byte", [1], 2, 0.0), "left"),
            (disconnects.Visit("not streaming", [1], 2, 60.0), "answered"),
        ]:
            assert await disconnects.visit(session, base_url, "tiny", visit) == expected

"""The load generator: what it asks, what it times, and what it makes of it, against scripts with known gaps."""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import HANG_UP, Event, ScriptedClock, delta, play, scripted_server, token, usage

from benchmarks import loadgen
from benchmarks.client import RequestRecord, StreamClient
from benchmarks.loadgen import drive, new_session
from benchmarks.summary import distribution, median_of, percentile, spread_of, steady_gaps, summarise, table
from benchmarks.workloads import NAMES, PlannedRequest, TokenIds, Workload, build

# Workloads


def test_lengths_are_fixed_and_contents_change_with_the_seed() -> None:
    for name in NAMES:
        first, again, other = (build(name, TokenIds(), seed) for seed in (1, 1, 2))
        shapes = [[(r.kind, r.num_prompt_tokens, r.max_tokens, r.start_at) for r in w.requests] for w in (first, other)]
        assert shapes[0] == shapes[1]
        assert [r.prompt for r in first.requests] == [r.prompt for r in again.requests]
        assert [r.prompt for r in first.requests] != [r.prompt for r in other.requests]
        assert all(len(r.prompt) == r.num_prompt_tokens for r in first.requests)


def test_the_workloads_are_what_they_are_called() -> None:
    w1, w1b, w2, w3, w4 = (build(name, TokenIds(), 0) for name in NAMES)
    assert [(r.num_prompt_tokens, r.max_tokens, r.start_at) for r in w1.requests] == [
        (1500, 8, at) for at in (1.0, 3.0, 5.0, 7.0, 9.0)
    ]
    assert w1.background is not None
    rounds = [w1.background(), w1.background()]
    assert [[r.num_prompt_tokens for r in streams] for streams in rounds] == [[64] * 6, [64] * 6]
    assert rounds[0][0].prompt != rounds[1][0].prompt
    assert [(r.num_prompt_tokens, r.max_tokens) for r in w1b.requests] == [(64, 200)] * 6
    assert (len(w2.requests), w2.concurrency) == (64, 16)
    assert {r.max_tokens for r in w2.requests} == {64}
    assert all(32 <= r.num_prompt_tokens <= 256 for r in w2.requests)
    assert (len(w3.requests), w3.concurrency) == (24, 8)
    assert {(tuple(r.prompt[:1024]), r.num_prompt_tokens, r.max_tokens) for r in w3.requests} == {
        (tuple(w3.requests[0].prompt[:1024]), 1056, 32)
    }
    assert [(r.num_prompt_tokens, r.max_tokens) for r in w4.requests] == [(32, 200)]
    with pytest.raises(ValueError, match="W9"):
        build("W9", TokenIds(), 0)


# One request


def planned(kind: str = "req", max_tokens: int = 4) -> PlannedRequest:
    return PlannedRequest(kind, [5, 6, 7], 3, max_tokens)


async def stream(events: list[Event], api: Any = "completions", request: PlannedRequest | None = None) -> RequestRecord:
    clock = ScriptedClock()
    async with scripted_server(play(events), clock) as url, new_session() as session:
        return await StreamClient(session, url, "tiny", api, clock=clock).stream(request or planned())


async def test_times_of_a_stream() -> None:
    record = await stream([
        (0.5, token("a")),
        (0.75, token("")),  # a token that is part of a character
        (1.75, token("b")),
        (2.0, token("", "length")),  # no token: only the finish
        (2.0, usage(prompt=30, completion=3, cached=16)),
        (2.5, b"data: [DONE]\n\n"),
    ])  # fmt: skip
    assert record.error is None
    assert record.ttft == 0.5
    assert record.itl == [0.25, 1.0]
    assert record.tpot == pytest.approx(1.25 / 2)
    assert record.e2e == 2.5
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (30, 3, 16)


async def test_an_event_of_several_tokens_is_one_gap() -> None:
    record = await stream([(1.0, token("a")), (3.0, token("b c")), (3.0, usage(3, 3))])
    assert record.itl == [2.0]
    assert record.output_tokens == 3
    assert record.tpot == 1.0


async def test_events_split_over_network_chunks_are_joined() -> None:
    line = f"data: {json.dumps(token('ab'))}\n\n".encode()
    record = await stream([(1.0, line[:9]), (2.0, line[9:] + line[:30]), (4.0, line[30:])])
    assert record.token_times == [2.0, 4.0]
    assert record.output_tokens == 2


async def test_a_chat_stream_begins_with_a_role_that_is_no_token() -> None:
    script = [(1.0, delta("", role="assistant")), (2.0, delta("x")), (5.0, delta("y")), (5.0, delta(None))]
    record = await stream(script, "chat", PlannedRequest("req", "some words", 2, 4))
    assert record.token_times == [2.0, 5.0]


async def test_faults_are_recorded_and_never_raised() -> None:
    assert (await stream([(0.0, 400)])).error == 'HTTP 400: {"error": {"message": "no"}}'
    assert "ended without a token" in ((await stream([(0.0, usage(3, 0))])).error or "")
    broken = await stream([(1.0, token("a")), (2.0, {"error": {"message": "the engine is lost"}})])
    assert "the engine is lost" in (broken.error or "")
    cut_off = await stream([(1.0, token("a")), (2.0, HANG_UP)])
    assert cut_off.error is not None
    assert "token ids" in ((await stream([], "chat")).error or "")


async def test_dialects_ask_for_the_same_in_their_own_words() -> None:
    bodies: list[dict[str, Any]] = []

    async def script(body: dict[str, Any]) -> AsyncIterator[Event]:
        bodies.append(body)
        yield 0.0, token("a")

    async with scripted_server(script, None) as url, new_session() as session:
        await StreamClient(session, url, "tiny").stream(planned())
        await StreamClient(session, url, "tiny", dialect="transformers").stream(planned())
    common = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "stream": True}
    openai = {"temperature": 0.0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    assert bodies[0] == common | openai
    assert json.loads(bodies[1].pop("generation_config")) == {"max_new_tokens": 4, "do_sample": False}
    assert bodies[1] == common


async def test_nobody_listens() -> None:
    async with new_session() as session:
        record = await StreamClient(session, "http://127.0.0.1:9", "tiny").stream(planned())
    assert record.error is not None


# A whole workload


async def test_background_streams_run_until_the_last_first_token() -> None:
    clock = ScriptedClock()

    async def script(body: dict[str, Any]) -> AsyncIterator[Event]:
        """Every event is a second after the one before it, whoever gets it; long prompts wait for six of theirs."""
        for _ in range(6 if body["max_tokens"] == 8 else 0):
            yield clock.now + 1, b": wait\n\n"
        for _ in range(body["max_tokens"]):
            yield clock.now + 1, token("a")

    workload = Workload(
        "W1", [planned("long", 8) for _ in range(3)], background=lambda: [planned("steady", 10**6) for _ in range(2)]
    )
    async with scripted_server(script, clock) as url, new_session() as session:
        records = await drive(StreamClient(session, url, "tiny", clock=clock), workload)
    assert [(record.error, record.cut) for record in records if record.kind == "long"] == [(None, False)] * 3
    over = max(record.token_times[0] for record in records if record.kind == "long")
    steady = [record for record in records if record.kind == "steady"]
    assert [(record.error, record.cut) for record in steady] == [(None, True)] * 2
    assert all(record.token_times[-1] >= over for record in steady)


async def test_a_background_stream_that_ends_is_followed_by_another() -> None:
    clock = ScriptedClock()
    prompts: list[list[int]] = []
    enough = asyncio.Event()

    async def script(body: dict[str, Any]) -> AsyncIterator[Event]:
        if body["max_tokens"] == 8:
            await enough.wait()
            yield clock.now, token("a")
            return
        prompts.append(body["prompt"])
        if len(prompts) == 7:
            enough.set()
        yield clock.now, token("a")
        yield clock.now, token("b")

    number = itertools.count()
    workload = Workload(
        "W1",
        [planned("long", 8)],
        background=lambda: [PlannedRequest("steady", [next(number)], 1, 2) for _ in range(2)],
    )
    async with scripted_server(script, clock) as url, new_session() as session:
        records = await drive(StreamClient(session, url, "tiny", clock=clock), workload)
    assert all(record.error is None for record in records)
    assert len(prompts) >= 7
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


async def test_a_workload_whose_long_prompts_all_fail_ends() -> None:
    clock = ScriptedClock()

    async def script(body: dict[str, Any]) -> AsyncIterator[Event]:
        if body["max_tokens"] == 8:
            yield 0.0, 503
        for _ in range(3):
            yield clock.now, token("a")

    workload = Workload("W1", [planned("long", 8)], background=lambda: [planned("steady", 5)])
    async with asyncio.timeout(20), scripted_server(script, clock) as url, new_session() as session:
        records = await drive(StreamClient(session, url, "tiny", clock=clock), workload)
    assert [record.error for record in records if record.kind == "long"] == ['HTTP 503: {"error": {"message": "no"}}']


async def test_what_a_server_is_asked_for() -> None:
    bodies: list[dict[str, Any]] = []

    async def script(body: dict[str, Any]) -> AsyncIterator[Event]:
        bodies.append(body)
        yield 0.0, token("a")

    async with scripted_server(script, None) as url, new_session() as session:
        await StreamClient(session, url, "tiny", extra={"seed": 1}).stream(planned(max_tokens=9))
    assert bodies == [
        {
            "model": "tiny", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "seed": 1,
        }
    ]  # fmt: skip


async def test_no_more_requests_at_once_than_the_workload_says() -> None:
    open_now = most = 0

    class Counting(StreamClient):
        async def stream(self, *args: Any, **kwargs: Any) -> RequestRecord:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            record = await super().stream(*args, **kwargs)
            open_now -= 1
            return record

    async with scripted_server(play([(0.0, token("a"))]), None) as url, new_session() as session:
        records = await drive(Counting(session, url, "tiny"), Workload("W2", [planned()] * 12, 3))
    assert len(records) == 12
    assert most == 3


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve_and_run() -> int:
        events = [(0.0, token("a")), (0.0, token("b")), (0.0, usage(32, 2, cached=16))]
        async with scripted_server(play(events), None) as url:
            arguments = ["--base-url", url, "-w", "W4", "--runs", "2", "--out", str(tmp_path / "runs.json")]
            return await asyncio.to_thread(loadgen.main, [*arguments, "--no-warm-up", "--records"])

    assert asyncio.run(serve_and_run()) == 0
    (result,) = json.loads((tmp_path / "runs.json").read_text())
    assert (result["workload"], result["model"], len(result["runs"])) == ("W4", "tiny", 2)
    assert result["median"]["req"]["ttft_ms"]["n"] == 1
    assert result["median"]["cached_tokens"] == 16
    assert result["runs"][0]["records"][0]["output_tokens"] == 2
    assert "req ttft_ms p99" in capsys.readouterr().out


# Statistics


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_agrees_with_numpy(values: list[float], p: float) -> None:
    assert percentile(values, p) == pytest.approx(np.percentile(values, p), rel=1e-9, abs=1e-9)


def test_distribution_is_in_milliseconds() -> None:
    values = [index / 1000 for index in range(1, 101)]
    random.Random(0).shuffle(values)
    assert distribution([*values, None]) == {
        "n": 100, "p50": 50.5, "p95": 95.05, "p99": 99.01, "mean": 50.5, "max": 100.0
    }  # fmt: skip
    assert distribution([None]) == {"n": 0}
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def record(kind: str, sent_at: float, *token_times: float, **more: Any) -> RequestRecord:
    return RequestRecord(kind, sent_at, 10, list(token_times), output_tokens=len(token_times), **more)


def test_gaps_during_long_prefills_are_those_that_overlap_one() -> None:
    records = [
        record("long", 2.0, 5.0, 5.1),
        record("long", 20.0),  # never answered
        record("steady", 0.0, 1.0, 2.0, 4.5, 5.0, 6.0, error=None),
        record("steady", 0.0, 1.0, 9.0),
    ]
    during, otherwise = steady_gaps(records)
    # 1..2 ends as the prompt is sent, 5..6 begins as its first token comes: neither was disturbed.
    assert during == [2.5, 0.5, 8.0]
    assert otherwise == [1.0, 1.0]


def test_summary_of_a_run() -> None:
    records = [
        record("req", 0.0, 0.5, 0.6, ended_at=0.7, cached_tokens=4),
        record("req", 0.0, 0.1, 0.2, cut=True, ended_at=0.2),
        record("req", 0.0, 0.9, error="broken"),
    ]
    summary = summarise("W2", records, wall=2.0)
    expected = {
        "requests": 3, "errors": 1, "error_sample": "broken", "output_tokens": 4, "prompt_tokens": 20,
        "cached_tokens": 4, "output_tok_s": 2.0, "total_tok_s": 12.0, "events": 4,
    }  # fmt: skip
    assert {key: summary[key] for key in expected} == expected
    assert summary["req"]["ttft_ms"]["max"] == 500
    assert summary["req"]["itl_ms"]["n"] == 2
    assert summary["req"]["e2e_ms"] == {"n": 1, "p50": 700.0, "p95": 700.0, "p99": 700.0, "mean": 700.0, "max": 700.0}


def test_medians_over_runs_go_into_nested_summaries() -> None:
    runs = [{"a": number, "b": {"c": number * 10}, "name": "W1", "odd": 1} for number in (3, 1, 2)]
    del runs[1]["odd"]
    assert median_of(runs) == {"a": 2, "b": {"c": 20}, "name": "W1"}


def test_the_spread_over_runs() -> None:
    assert spread_of([3.0, 1.0, 2.5]) == "2.5 (1 to 3)"
    assert spread_of([0.25]) == "0.25"


def test_a_table_lines_its_columns_up() -> None:
    assert table(["name", "n"], [["a", 10], ["long name", 5]]).split("\n") == [
        "name        n",
        "---------  --",
        "a          10",
        "long name   5",
    ]

"""A stream whose engines die: its reader gets every token once, and nothing runs on that nobody reads."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from failing_engines import BEFORE_ADMISSION, FailingEngines, Fate, logprobs_of, token_at, undisturbed
from hypothesis import given, settings
from hypothesis import strategies as st
from link_peers import DEADLINE, HOST, until

from cluster.errors import EngineError, RequestError, RequestFailed
from cluster.links import token_receiver, token_sender
from cluster.links.serve_engine_client import ServeEngineClient
from cluster.links.serve_request_stream import ClientDeadlines, ServeRequestStream
from cluster.links.token_receiver import TokenReceiver
from scheduler.plan import RequestOutput
from scheduler.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8]
QUICK = ClientDeadlines(admission=DEADLINE, failover=DEADLINE, attempt=0.3, tokens=0.2, first_pause=0.01)
SILENCE = 0.4


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    for end in (token_sender, token_receiver):
        monkeypatch.setattr(end, "HEARTBEAT_SECONDS", 0.05)


@asynccontextmanager
async def client_of(
    engines: FailingEngines, deadlines: ClientDeadlines = QUICK
) -> AsyncIterator[tuple[ServeEngineClient, TokenReceiver]]:
    receiver = TokenReceiver(SILENCE)
    await receiver.start(HOST)
    try:
        yield ServeEngineClient(engines, receiver, deadlines), receiver
    finally:
        await receiver.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read(stream: ServeRequestStream) -> list[RequestOutput]:
    async with asyncio.timeout(DEADLINE):
        return [output async for output in stream]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


async def outputs_under(fates: list[Fate], sampling: SamplingParams) -> tuple[list[RequestOutput], FailingEngines]:
    """What the reader got; every request that was not the last one must be over when it has ended."""
    engines = FailingEngines(fates, num_cached=[16, 0, 32, 64])
    async with client_of(engines) as (client, receiver):
        outputs = await read(await client.open(PROMPT, sampling))
        await until(lambda: not receiver._channels)
        return outputs, engines


FATES = [
    Fate("die", 3), Fate("die", 0), Fate("lost", 3), Fate("lost", 0), Fate("abort", 2), Fate("silent", 3),
    Fate("cut", 3), Fate("unavailable"), Fate("deaf"),
]  # fmt: skip


@pytest.mark.parametrize("fate", FATES, ids=str)
async def test_one_death(fate: Fate) -> None:
    outputs, engines = await outputs_under([fate], SamplingParams(max_tokens=8, seed=3))
    assert tokens(outputs) == undisturbed(8)
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
    first, second = engines.requests
    assert second.request_id != first.request_id
    assert second.arrival_time == first.arrival_time
    assert second.sampling_params == first.sampling_params
    assert second.output_token_ids == undisturbed(8)[: len(second.output_token_ids)]
    if second.output_token_ids:
        assert second.delivered_at is not None
        assert first.arrival_time < second.delivered_at[0] <= second.delivered_at[1] < time.time()
    else:
        assert second.delivered_at is None
    assert not first.resubmitted
    if fate.tokens or fate.kind in BEFORE_ADMISSION:  # else the admission may be lost with the engine
        assert second.resubmitted == (fate.kind not in BEFORE_ADMISSION)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([fate for fate in FATES if fate.kind not in ("deaf", "silent", "cut")]), max_size=6),
       st.integers(1, 12))  # fmt: skip
def test_any_row_of_deaths(fates: list[Fate], max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, num_logprobs=1, num_prompt_logprobs=1)
    outputs, _ = asyncio.run(outputs_under(fates, sampling))
    assert tokens(outputs) == undisturbed(max_tokens)
    assert [entry for output in outputs for entry in output.logprobs or ()] == list(
        map(logprobs_of, undisturbed(max_tokens))
    )
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
    found = {
        output.prompt_logprobs.start: output.prompt_logprobs.tokens[0] for output in outputs if output.prompt_logprobs
    }
    assert found == {position: logprobs_of(PROMPT[position]) for position in (1, 2, 3)}
    assert len({output.num_cached_tokens for output in outputs}) == 1


async def test_deaths_under_many_streams() -> None:
    draw = random.Random(7)
    fates = [
        Fate(draw.choice(["die", "lost", "abort", "silent", "cut", "unavailable", "deaf"]), draw.randrange(6))
        for _ in range(30)
    ]
    engines = FailingEngines(fates)
    async with client_of(engines) as (client, receiver):
        streams = await asyncio.gather(*[client.open(PROMPT, SamplingParams(max_tokens=20)) for _ in range(12)])
        found = await asyncio.gather(*map(read, streams))
        assert [tokens(outputs) for outputs in found] == [undisturbed(20)] * 12
        await until(lambda: not receiver._channels)


async def test_prompt_logprobs_are_not_asked_for_again_after_the_first_token() -> None:
    _, engines = await outputs_under(
        [Fate("die", 3), Fate("die", 3)], SamplingParams(max_tokens=9, num_prompt_logprobs=1)
    )
    assert len(engines.requests[-1].output_token_ids) > 0
    for request in engines.requests:
        assert request.sampling_params.num_prompt_logprobs == (None if request.output_token_ids else 1)


@pytest.mark.parametrize(("sampling", "reason"), [
    (SamplingParams(max_tokens=3), "length"),
    (SamplingParams(max_tokens=9, stop_token_ids=(token_at(2),)), "stop"),
])  # fmt: skip
async def test_tokens_that_complete_the_request_are_not_sent_again(sampling: SamplingParams, reason: str) -> None:
    """Only the word of its end was lost."""
    engines = FailingEngines([Fate("silent", 20)], pause=lambda: asyncio.sleep(0.005))
    async with client_of(engines) as (client, _):
        stream = await client.open(PROMPT, SamplingParams(max_tokens=50))
        stream._delivered._request.sampling_params  # noqa: B018 - the engine's copy goes on beyond it
        object.__setattr__(stream._delivered._request, "sampling_params", sampling)
        found = []
        async with asyncio.timeout(DEADLINE):
            while len(found) < 3:
                found += (await stream._read()).new_token_ids
            engines.calls[0].work.cancel()  # type: ignore[union-attr]
            engines.calls[0].future.cancel()
            stream._attempt._channel._outputs.clear()
            last = await stream._read()
        assert (last.new_token_ids, last.finish_reason) == ([], reason)
        assert len(engines.requests) == 1


@pytest.mark.parametrize("kind", ["deaf", "unavailable"])
@pytest.mark.parametrize("reason", ["stop", "abort"])
async def test_an_end_from_this_side_while_no_engine_has_it(kind: str, reason: str) -> None:
    engines = FailingEngines([Fate("die", 3), *[Fate(kind)] * 500])  # type: ignore[arg-type]
    async with client_of(engines) as (client, receiver):
        stream = await client.open(PROMPT, SamplingParams(max_tokens=8))
        reading = asyncio.ensure_future(read(stream))
        await until(lambda: len(engines.requests) > 1)
        stream.finish(reason)
        outputs = await asyncio.wait_for(reading, DEADLINE)
        assert outputs[-1].finish_reason == reason
        num_requests = len(engines.requests)
        await until(lambda: not receiver._channels)
        await asyncio.sleep(0.1)
        assert len(engines.requests) == num_requests


async def test_a_reader_that_leaves_while_no_engine_has_it() -> None:
    engines = FailingEngines([Fate("die", 3), *[Fate("deaf")] * 500])
    async with client_of(engines) as (client, receiver):
        stream = await client.open(PROMPT, SamplingParams(max_tokens=8))
        reading = asyncio.ensure_future(read(stream))
        await until(lambda: len(engines.requests) > 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: not receiver._channels)
        assert engines.calls[-1].cancelled


async def test_no_engine_takes_it_in_time() -> None:
    short = ClientDeadlines(admission=0.5, failover=0.5, attempt=0.1)
    engines = FailingEngines([Fate("die", 3), *[Fate("deaf")] * 500])
    async with client_of(engines, short) as (client, receiver):
        stream = await client.open(PROMPT, SamplingParams(max_tokens=8))
        with pytest.raises(EngineError, match=r"no engine took the request within 0\.5 s; last: no engine answered"):
            await read(stream)
        with pytest.raises(EngineError, match="no engine took the request"):
            await client.open(PROMPT, SamplingParams(max_tokens=8))
        await until(lambda: not receiver._channels)
        assert all(call.cancelled for call in engines.calls[1:])


async def test_where_an_engine_starts_for_a_request_the_request_waits_for_just_so_long() -> None:
    impatient = ClientDeadlines(admission=0.2, attempt=0.05)
    late, never = [Fate("deaf")] * 3, [Fate("deaf")] * 500  # late: after 0.05 + 0.1 + 0.2 s
    async with client_of(FailingEngines(late), impatient.with_waking(20.0)) as (client, _):
        assert tokens(await read(await client.open(PROMPT, SamplingParams(max_tokens=8)))) == undisturbed(8)
    async with client_of(FailingEngines(never), ClientDeadlines(attempt=0.05).with_waking(0.3)) as (client, _):
        with pytest.raises(EngineError, match=r"no engine took the request within 0\.3 s"):
            await client.open(PROMPT, SamplingParams(max_tokens=8))


@pytest.mark.parametrize("fates", [[], [Fate("die", 3)]], ids=["new", "lost"])
async def test_a_pause_of_the_front_end_fails_no_request(fates: list[Fate]) -> None:
    short = ClientDeadlines(admission=0.4, failover=0.4, attempt=0.4, tokens=0.4)
    engines = FailingEngines(fates)
    async with client_of(engines, short) as (client, _):
        opening = asyncio.ensure_future(client.open(PROMPT, SamplingParams(max_tokens=8)))
        if fates:
            stream = await opening
            reading = asyncio.ensure_future(read(stream))
        while len(engines.requests) <= len(fates):  # noqa: ASYNC110 - the very turn in which it is sent
            await asyncio.sleep(0)
        time.sleep(1.2)  # noqa: ASYNC251 - this process stands still, and what the engine has said waits to be read
        assert tokens(await (reading if fates else read(await opening))) == undisturbed(8)
        assert len(engines.requests) == len(fates) + 1


async def test_a_request_that_ends_engine_after_engine_fails_in_the_end() -> None:
    engines = FailingEngines([Fate("lost")] * 100)
    async with client_of(engines) as (client, _):
        with pytest.raises(EngineError, match="engines lost the request"):
            await read(await client.open(PROMPT, SamplingParams(max_tokens=8)))
        assert len(engines.requests) < 20


async def test_an_error_that_is_final_is_not_tried_elsewhere() -> None:
    engines = FailingEngines([Fate("condemned", 3)])
    async with client_of(engines) as (client, _):
        with pytest.raises(RequestFailed, match="error"):
            await read(await client.open(PROMPT, SamplingParams(max_tokens=8)))
    assert len(engines.requests) == 1


async def test_a_queue_refuses_what_is_new_and_not_what_was_accepted() -> None:
    async with client_of(FailingEngines([Fate("busy")])) as (client, _):
        with pytest.raises(RequestError, match="queue") as refused:
            await client.open(PROMPT, SamplingParams(max_tokens=8))
        assert (refused.value.status, refused.value.retry_after) == (429, 3.0)
    outputs, engines = await outputs_under([Fate("die", 3), Fate("busy"), Fate("busy")], SamplingParams(max_tokens=8))
    assert tokens(outputs) == undisturbed(8)
    assert len(engines.requests) == 4


async def test_a_suspended_engine_that_wakes_up_is_told_to_stop() -> None:
    """It took the request and was given up; what it says later is answered with an abort."""
    gate = asyncio.Event()
    engines = FailingEngines([Fate("deaf")])
    async with client_of(engines) as (client, receiver):
        opening = asyncio.ensure_future(client.open(PROMPT, SamplingParams(max_tokens=8)))
        await until(lambda: len(engines.requests) == 2)
        old = engines.requests[0]
        sender = token_sender.TokenSender("late", lambda request_id, reason: gate.set() if request_id == old.request_id
                                          else None, DEADLINE)  # fmt: skip
        sender.start()
        sender.open(old.request_id, receiver.address, lambda summary: None)
        sender.admit(old.request_id)
        assert tokens(await read(await opening)) == undisturbed(8)
        await asyncio.wait_for(gate.wait(), DEADLINE)

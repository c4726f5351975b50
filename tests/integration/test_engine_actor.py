"""The engine replica as a plain Ray actor and as a Serve replica; this process is the front end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray
from engine_runs import DEADLINE, NUM_TOKENS, PROMPTS, all_gone, expected_tokens, settings
from ray import serve
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.engine.actor import EngineReplica
from cluster.engine.settings import EngineSettings
from cluster.errors import EngineError, RequestError
from cluster.links.serve_engine_client import ServeEngineClient
from cluster.links.serve_request_stream import ClientDeadlines, ServeRequestStream
from cluster.links.token_receiver import TokenReceiver
from scheduler.plan import RequestOutput
from scheduler.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("ray_session")

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=500, temperature=0.0)
IMPATIENT = ClientDeadlines(admission=10.0, failover=3.0)


@asynccontextmanager
async def engine_actor(engine_settings: EngineSettings) -> AsyncIterator[Any]:
    """A plain actor in bundle 0 of a placement group, as Serve would place it."""
    group = placement_group(engine_settings.placement_bundles(), strategy="PACK")
    actor = (
        ray.remote(EngineReplica)
        .options(
            num_cpus=engine_settings.engine_cpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            max_concurrency=1000,
        )
        .remote(engine_settings)
    )
    try:
        await asyncio.wait_for(actor.limits.remote(), DEADLINE)
        yield actor
    finally:
        ray.kill(actor)
        remove_placement_group(group)


@asynccontextmanager
async def client_of(handle: Any, deadlines: ClientDeadlines | None = None) -> AsyncIterator[ServeEngineClient]:
    receiver = TokenReceiver()
    await receiver.start(ray.util.get_node_ip_address())
    yield ServeEngineClient(handle, receiver, deadlines)
    await receiver.close()


async def read(stream: ServeRequestStream) -> tuple[list[int], RequestOutput]:
    token_ids: list[int] = []
    last = None
    async with asyncio.timeout(DEADLINE):
        async for output in stream:
            assert last is None or last.finish_reason is None
            last = output
            token_ids += output.new_token_ids
    assert last is not None
    return token_ids, last


async def generate_prompts(client: ServeEngineClient) -> list[list[int]]:
    streams = await asyncio.gather(*[client.open(prompt, GREEDY) for prompt in PROMPTS])
    return [token_ids for token_ids, _ in await asyncio.gather(*map(read, streams))]


async def idle(handle: Any, client: ServeEngineClient) -> None:
    """Until the engine has nothing open: then a step holds a single new request alone."""
    async with asyncio.timeout(DEADLINE):
        while True:
            await read(await client.open([7], SamplingParams(max_tokens=1)))
            (record,) = await handle.step_log.remote(1)
            if record.num_requests == 1:
                return


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
async def test_plain_actor_serves_and_leaves_nothing(tensor_parallel_size: int) -> None:
    async with engine_actor(settings(tensor_parallel_size)) as actor, client_of(actor) as client:
        limits = await client.limits()
        assert (limits.num_blocks, limits.vocab_size) == (64, 301)
        assert await generate_prompts(client) == expected_tokens()
        await asyncio.wait_for(actor.check_health.remote(), DEADLINE)
        records = await actor.step_log.remote(1000)
        assert {record.num_missed_decodes for record in records} == {0}
        assert any(record.sent_ahead for record in records)
        with pytest.raises(RequestError) as refusal:
            await client.open([1] * 600, GREEDY)
        assert refusal.value.param == "prompt"
        _, *ranks = await actor.process_ids.remote()
        assert len(ranks) == tensor_parallel_size
        await asyncio.wait_for(actor.shutdown.remote(), DEADLINE)
        await all_gone(ranks)


async def test_streams_ended_by_the_front_end_are_ended_in_the_engine() -> None:
    async with engine_actor(settings()) as actor, client_of(actor) as client:
        stopped = await client.open([1, 2, 3], ENDLESS)
        async for output in stopped:
            if output.finish_reason is None:
                stopped.finish("stop")
        assert output.finish_reason == "stop"
        left = await client.open([4, 5], ENDLESS)
        reader = asyncio.ensure_future(read(left))
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await idle(actor, client)
        # Both calls have returned too, and freed their channels.
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(stopped._attempt._watch, left._attempt._watch)


async def test_a_call_that_is_cancelled_behind_its_back_cuts_no_stream() -> None:
    async with engine_actor(settings()) as actor, client_of(actor) as client:
        undisturbed, _ = await read(await client.open([4, 5], ENDLESS))
        stream = await client.open([4, 5], ENDLESS)
        ray.cancel(stream._attempt._call)
        token_ids, last = await read(stream)
        assert (token_ids, last.finish_reason) == (undisturbed, "length")
        await idle(actor, client)


async def test_killed_rank_cuts_no_stream() -> None:
    async with engine_actor(settings(2)) as actor, client_of(actor) as client:
        undisturbed, _ = await read(await client.open([1, 2, 3], ENDLESS))
        stream = await client.open([1, 2, 3], ENDLESS)
        *_, victim = await actor.process_ids.remote()
        os.kill(victim, signal.SIGKILL)
        token_ids, last = await read(stream)
        assert last.finish_reason == "length"
        assert token_ids == undisturbed
        await asyncio.wait_for(actor.check_health.remote(), DEADLINE)
        status = await actor.status.remote()
        assert (status.ready, status.live, status.phase) == (True, True, "ready")
        assert victim not in await actor.process_ids.remote()


async def test_killed_engine_without_another_fails_open_requests() -> None:
    async with engine_actor(settings()) as actor, client_of(actor, IMPATIENT) as client:
        stream = await client.open([1, 2, 3], ENDLESS)
        processes = await actor.process_ids.remote()
        ray.kill(actor)
        with pytest.raises(EngineError, match="no engine took the request"):
            await read(stream)
        with pytest.raises(EngineError):
            await client.open([1], GREEDY)
        await all_gone(processes)


async def test_suspended_engine_is_noticed_by_its_silence() -> None:
    async with engine_actor(settings()) as actor, client_of(actor, IMPATIENT) as client:
        stream = await client.open([1, 2, 3], ENDLESS)
        process_id, *_ = await actor.process_ids.remote()
        os.kill(process_id, signal.SIGSTOP)
        try:
            with pytest.raises(EngineError, match="no engine took the request"):
                await read(stream)
        finally:
            os.kill(process_id, signal.SIGCONT)


async def test_serve_replica() -> None:
    serve.start(proxy_location="Disabled")
    engine_settings = settings(2)
    deployment = serve.deployment(
        EngineReplica,
        name="engine",
        ray_actor_options={"num_cpus": engine_settings.engine_cpus},
        placement_group_bundles=engine_settings.placement_bundles(),
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=20,
        graceful_shutdown_wait_loop_s=0.1,
    )
    try:
        handle = serve.run(deployment.bind(engine_settings), name="engine-test", route_prefix=None)
        async with client_of(handle) as client:
            assert await generate_prompts(client) == expected_tokens()
            stream = await client.open([1, 2, 3], ENDLESS)
            stream.finish("abort")
            await idle(handle, client)
            processes = await handle.process_ids.remote()
    finally:
        await asyncio.wait_for(asyncio.to_thread(serve.shutdown), DEADLINE)
    await all_gone(processes)

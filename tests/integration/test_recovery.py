"""Ranks that die or hang under streams: the same tokens as without, none lost, none twice, and no process left."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from engine_runs import DEADLINE, all_gone, is_alive, settings, until

from cluster.engine.engine import Engine
from cluster.engine.ray_executor import RayExecutor
from cluster.errors import ExecutorError
from scheduler.plan import RequestOutput
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("ray_session")

NUM_TOKENS = 150
STREAMS = [
    ([5, 9, 17], SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)),
    (list(range(10, 60)), SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)),
    ([200, 100] * 11, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, seed=7)),
    ([3], SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=11, presence_penalty=0.5)),
]
SUSPENSION_SECONDS = 10.0
"""Within which a suspended rank must be noticed with default deadlines."""


class Streams:
    """What came of each request, and when."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.times: list[float] = []

    def __call__(self, outputs: Sequence[RequestOutput]) -> None:
        self.outputs += outputs
        self.times += [time.monotonic()] * len(outputs)

    def token_ids(self, name: str) -> list[int]:
        return [token_id for output in self.outputs if output.request_id == name for token_id in output.new_token_ids]

    @property
    def ends(self) -> list[str]:
        return [output.finish_reason for output in self.outputs if output.finish_reason is not None]

    @property
    def longest_gap(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


@asynccontextmanager
async def engine_over(executor: RayExecutor, streams: Streams) -> AsyncIterator[Engine]:
    engine_settings = settings(2)
    engine = Engine(
        executor,
        lambda limits: Scheduler(engine_settings.scheduler_config(limits), limits.num_blocks),
        streams,
        engine_settings.scheduler.overlap_depth,
        deadlines=engine_settings.deadlines,
    )
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    try:
        yield engine
    finally:
        await engine.shutdown()
        await asyncio.wait_for(loop, DEADLINE)


async def run_streams(engine: Engine, streams: Streams, prefix: str, disturb: dict[int, signal.Signals]) -> None:
    """All streams together; `disturb`: after so many tokens of the first one, a signal to the last rank."""
    for index, (prompt, sampling) in enumerate(STREAMS):
        engine.add_request(Request(f"{prefix}{index}", prompt, sampling))
    disturb = dict(disturb)
    async with asyncio.timeout(2 * DEADLINE):
        while engine.num_open_requests():
            await asyncio.sleep(0.001)
            if disturb and len(streams.token_ids(f"{prefix}0")) >= min(disturb):
                victim = engine._executor.process_ids()[-1]  # type: ignore[attr-defined]
                os.kill(victim, disturb.pop(min(disturb)))


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_survive_their_ranks(kind: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    executor, streams = RayExecutor(settings(2)), Streams()
    async with engine_over(executor, streams) as engine:
        first_processes = executor.process_ids()
        await run_streams(engine, streams, "calm-", {})
        await run_streams(engine, streams, "hard-", {40: kind, 90: kind})
        for index in range(len(STREAMS)):
            calm = streams.token_ids(f"calm-{index}")
            assert len(calm) == NUM_TOKENS
            assert streams.token_ids(f"hard-{index}") == calm
        assert streams.ends == ["length"] * 2 * len(STREAMS)
        assert engine._scheduler is not None
        assert engine._scheduler.epoch == 2
        assert engine._scheduler.stats().num_used_blocks == 0
        last_processes = executor.process_ids()
        await all_gone(first_processes)
        assert all(map(is_alive, last_processes))
        logging.info("longest gap %.2f s", streams.longest_gap)
    await all_gone(last_processes)


async def test_idle_suspended_rank_is_noticed_and_replaced() -> None:
    executor, streams = RayExecutor(settings(2)), Streams()
    async with engine_over(executor, streams) as engine:
        (victim, *_) = processes = executor.process_ids()
        os.kill(victim, signal.SIGSTOP)
        suspended_at = time.monotonic()
        await until(lambda: not engine.status().ready, "its detection")
        assert time.monotonic() - suspended_at < SUSPENSION_SECONDS
        assert "rank 0 has hung" in engine.status().phase
        await run_streams(engine, streams, "", {})
        assert streams.ends == ["length"] * len(STREAMS)
        await all_gone(processes)


async def test_executor_restarts_again_and_again() -> None:
    executor = RayExecutor(settings(1))
    limits = await executor.start()
    for _ in range(2):
        processes = executor.process_ids()
        await executor.restart()
        await all_gone(processes)
        executor.check_health()
        assert executor._limits == limits
    await executor.shutdown()
    with pytest.raises(ExecutorError, match="shut down"):
        executor.check_health()

"""The engine's loop, with a fake executor and the real scheduler."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_executor import LIMITS, FakeExecutor, continuation

from cluster.engine.engine import Engine
from cluster.engine.step_log import StepLog
from cluster.engine.thread import EngineThread
from cluster.errors import EngineError, ExecutorError
from cluster.links.messages import StepRecord
from scheduler.config import SchedulerConfig
from scheduler.plan import RequestOutput, StepPlan, StepResult
from scheduler.request import Request, RequestRefused
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

DEADLINE = 20.0


def config(depth: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=LIMITS.max_model_len,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        block_size=LIMITS.block_size,
        overlap_depth=depth,
    )


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens))


class Published:
    """Collects outputs, and says when a request has ended."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}
        self._changed = asyncio.Event()

    def __call__(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self._changed.set()

    async def last(self, name: str) -> RequestOutput:
        async with asyncio.timeout(DEADLINE):
            while not (have := self.outputs.get(name)) or have[-1].finish_reason is None:
                self._changed.clear()
                await self._changed.wait()
        return self.outputs[name][-1]

    def token_ids(self, name: str) -> list[int]:
        return [token_id for output in self.outputs[name] for token_id in output.new_token_ids]

    def num_ends(self, name: str) -> int:
        return sum(output.finish_reason is not None for output in self.outputs[name])


@asynccontextmanager
async def running(executor: FakeExecutor, published: Published, depth: int) -> AsyncIterator[Engine]:
    engine = Engine(executor, lambda limits: Scheduler(config(depth), limits.num_blocks), published, depth)
    assert await engine.start() == LIMITS
    loop = asyncio.ensure_future(engine.run())
    yield engine
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)


async def turns(n: int = 20) -> None:
    """Let everything that is ready on the loop happen."""
    for _ in range(n):
        await asyncio.sleep(0)


PROMPTS = {"a": [5, 6, 7], "b": list(range(40)), "c": [9] * 17, "d": [1], "e": list(range(50, 80))}


async def generate_all(depth: int) -> tuple[dict[str, list[int]], list[StepRecord], FakeExecutor]:
    executor, published = FakeExecutor(), Published()
    async with running(executor, published, depth) as engine:
        for index, (name, prompt) in enumerate(PROMPTS.items()):
            engine.add_request(request(name, prompt, 5 + 3 * index))
            await turns(index)
        for name in PROMPTS:
            assert (await published.last(name)).finish_reason == "length"
            assert published.num_ends(name) == 1
        assert engine.num_open_requests() == 0
        return {name: published.token_ids(name) for name in PROMPTS}, engine.step_log(1000), executor


@pytest.mark.parametrize("depth", [1, 2])
async def test_outputs_are_the_models_own(depth: int) -> None:
    tokens, _, _ = await generate_all(depth)
    assert tokens == {name: continuation(prompt, 5 + 3 * index) for index, (name, prompt) in enumerate(PROMPTS.items())}


@pytest.mark.parametrize("depth", [1, 2])
async def test_step_log_shows_that_no_stream_waits(depth: int) -> None:
    _, records, executor = await generate_all(depth)
    assert [record.step_id for record in records] == [plan.step_id for plan in executor.plans]
    scheduled = [plan.num_scheduled_tokens for plan in executor.plans]
    assert [record.num_requests for record in records] == [len(tokens) for tokens in scheduled]
    assert [record.num_decode_tokens + record.num_chunk_tokens for record in records] == [
        sum(tokens.values()) for tokens in scheduled
    ]
    assert {record.num_missed_decodes for record in records} == {0}
    assert sum(record.num_chunk_tokens for record in records) == sum(map(len, PROMPTS.values()))
    assert max(record.num_decodes for record in records) >= 2
    assert {record.sent_ahead for record in records} == ({False} if depth == 1 else {False, True})


async def test_step_log_counts_a_decode_left_out() -> None:
    log = StepLog(8)
    times: dict[str, Any] = {"sent_ahead": False, "sent_at": 0.0, "received_at": 0.0, "stage_seconds": {}}
    sampled = [RequestOutput("a", [1]), RequestOutput("b", [1])]
    log.record(StepPlan(0, 0, {"a": 3, "b": 4}), StepResult(0, 0), sampled, **times)
    record = log.record(StepPlan(0, 1, {"b": 1, "c": 5}), StepResult(0, 1), [], **times)
    assert (record.num_decodes, record.num_chunk_tokens, record.num_missed_decodes) == (1, 5, 1)
    log.forget("a")
    assert log.record(StepPlan(0, 2, {"b": 1}), StepResult(0, 2), [], **times).num_missed_decodes == 0


@pytest.mark.parametrize("depth", [1, 2])
async def test_plans_in_flight(depth: int) -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, depth) as engine:
        engine.add_request(request("a", [1, 2], 4))
        await turns()
        assert executor.num_waiting == depth
        executor.release()
        await turns()
        assert published.token_ids("a") == continuation([1, 2], 1)
        assert executor.num_waiting == depth
        assert len(executor.plans) == depth + 1


async def test_added_between_steps_while_a_result_is_awaited() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, 2) as engine:
        engine.add_request(request("a", [1, 2], 8))
        await turns()
        engine.add_request(request("b", [3], 8))
        executor.release()
        await turns()
        assert set(executor.plans[-1].num_scheduled_tokens) == {"a", "b"}


async def test_refused_request_leaves_no_trace() -> None:
    executor, published = FakeExecutor(), Published()
    async with running(executor, published, 2) as engine:
        with pytest.raises(RequestRefused) as refusal:
            engine.add_request(request("long", [0] * LIMITS.max_model_len, 1))
        assert refusal.value.param == "prompt"
        engine.add_request(request("a", [1], 2))
        await published.last("a")
        assert set(published.outputs) == {"a"}


@pytest.mark.parametrize("reason", ["stop", "abort"])
async def test_finish_from_outside(reason: str) -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, 2) as engine:
        engine.add_request(request("a", [1, 2], 50))
        await turns()
        executor.release()
        await turns()
        engine.finish_request("a", reason)
        engine.finish_request("a", reason)
        engine.finish_request("unknown", reason)
        for _ in range(4):
            executor.release()
            await turns()
        assert (await published.last("a")).finish_reason == reason
        assert published.num_ends("a") == 1
        assert published.token_ids("a") == continuation([1, 2], 1)
        assert executor.num_waiting == 0


async def test_fault_in_the_loop_ends_every_request() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, 1) as engine:
        engine.add_request(request("a", [1, 2], 5))
        await turns()
        executor.release_nonsense()
        last = await published.last("a")
        assert last.finish_reason == "lost"
        assert "loop failed" in str(last.error)


async def test_shutdown_ends_every_request() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, 2) as engine:
        engine.add_request(request("a", [1, 2], 50))
        await turns()
    last = await published.last("a")
    assert (last.finish_reason, last.error) == ("lost", "the engine was shut down")
    assert executor.num_stops == 1


async def test_executor_is_stopped_when_the_scheduler_cannot_be_built() -> None:
    executor = FakeExecutor()

    def refuse(limits: object) -> Scheduler:
        raise ValueError("block_size is odd")

    engine = Engine(executor, refuse, Published(), 1)
    with pytest.raises(ValueError, match="block_size is odd"):
        await engine.start()
    assert executor.num_stops == 1


class Threaded:
    def __init__(self, executor: FakeExecutor) -> None:
        self.executor = executor
        self.outputs: list[RequestOutput] = []
        self.thread = EngineThread(self._make_engine)

    def _make_engine(self) -> Engine:
        self.engine = Engine(
            self.executor, lambda limits: Scheduler(config(2), limits.num_blocks), self.outputs.extend, 2
        )
        return self.engine


def test_thread_runs_an_engine() -> None:
    threaded = Threaded(FakeExecutor())
    assert threaded.thread.start(DEADLINE) == LIMITS
    try:
        threaded.thread.call(threaded.engine.add_request, request("a", [4, 5], 6)).result(DEADLINE)
        with pytest.raises(RequestRefused):
            threaded.thread.call(threaded.engine.add_request, request("long", [0] * 500, 6)).result(DEADLINE)
        threaded.thread.call(threaded.engine.check_health).result(DEADLINE)
    finally:
        threaded.thread.stop(DEADLINE)
    threaded.thread.stop(DEADLINE)
    assert threaded.executor.num_stops == 1
    assert threaded.outputs[-1].finish_reason in ("length", "lost")
    with pytest.raises(EngineError, match="thread has ended"):
        threaded.thread.post(threaded.engine.check_health)


def test_thread_raises_what_start_raised() -> None:
    threaded = Threaded(FakeExecutor(start_error=ExecutorError("rank 0 failed in start-up phase 'load'")))
    with pytest.raises(ExecutorError, match="rank 0 failed in start-up phase 'load'"):
        threaded.thread.start(DEADLINE)
    threaded.thread.stop(DEADLINE)

"""The engine's loop feeds its metrics: counts are exact, and gauges return to zero without traffic."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from fake_executor import LIMITS, FakeExecutor

from cluster.autoscaling.load import ReplicaLoad
from cluster.engine import recovery
from cluster.engine.engine import Engine
from cluster.errors import EngineError, ExecutorError
from cluster.metrics.engine import EngineMetrics
from cluster.metrics.snapshot import MetricsSnapshot
from scheduler.config import SchedulerConfig
from scheduler.plan import RequestOutput
from scheduler.request import Request, RequestRefused
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

DEADLINE = 20.0
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@asynccontextmanager
async def running(executor: FakeExecutor, metrics: EngineMetrics, depth: int) -> AsyncIterator[Engine]:
    config = SchedulerConfig(
        max_model_len=LIMITS.max_model_len,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        block_size=LIMITS.block_size,
        overlap_depth=depth,
    )

    def publish(outputs: Sequence[RequestOutput]) -> None:
        """Nobody listens."""

    engine = Engine(executor, lambda limits: Scheduler(config, limits.num_blocks), publish, depth, metrics)
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    yield engine
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)


def request(name: str, num_prompt_tokens: int, max_tokens: int) -> Request:
    prompt = [ord(name) % 101] * num_prompt_tokens  # no two requests share a prefix
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), arrival_time=1.0)


async def until(what: str, condition: Callable[[], bool], each_turn: Callable[[], None] = lambda: None) -> None:
    """Let the loop turn until the condition holds."""
    for _ in range(100_000):
        if condition():
            return
        each_turn()
        await asyncio.sleep(0)
    raise AssertionError(f"waited in vain for {what}")


async def until_empty(engine: Engine, metrics: EngineMetrics) -> MetricsSnapshot:
    def is_empty() -> bool:
        gauges = metrics.snapshot().gauges
        return not engine.num_open_requests() and not any(gauges[(name,)] for name in GAUGES)

    await until("gauges at zero", is_empty)
    return metrics.snapshot()


def num_running(metrics: EngineMetrics) -> float:
    return metrics.snapshot().gauges.get(("num_requests_running",), 0.0)


def count(snapshot: MetricsSnapshot, *key: str) -> int:
    return sum(snapshot.histograms[key].counts)


@pytest.mark.parametrize("depth", [1, 2])
async def test_counts_of_requests_that_run_to_their_end(depth: int) -> None:
    metrics = EngineMetrics()
    sizes = {"a": (3, 5), "b": (40, 2), "c": (17, 1), "d": (1, 9), "e": (30, 4), "f": (6, 6)}
    async with running(FakeExecutor(), metrics, depth) as engine:
        assert metrics.snapshot().gauges[("engine_up",)] == 1.0
        for name, (num_prompt, max_tokens) in sizes.items():
            engine.add_request(request(name, num_prompt, max_tokens))
        snapshot = await until_empty(engine, metrics)
    num_prompt_tokens = sum(num_prompt for num_prompt, _ in sizes.values())
    num_outputs = sum(max_tokens for _, max_tokens in sizes.values())
    assert snapshot.counters[("prompt_tokens",)] == num_prompt_tokens
    assert snapshot.counters[("generation_tokens",)] == num_outputs
    assert snapshot.counters[("request_success", "length")] == len(sizes)
    assert snapshot.counters[("request_aborts",)] == 0
    assert count(snapshot, "time_to_first_token_seconds") == len(sizes)
    assert count(snapshot, "request_queue_time_seconds") == len(sizes)
    assert count(snapshot, "inter_token_latency_seconds") == num_outputs - len(sizes)
    assert snapshot.histograms[("request_prompt_tokens",)].sum == num_prompt_tokens
    assert snapshot.histograms[("request_generation_tokens",)].sum == num_outputs
    names = ("step_prefill_tokens", "step_decode_tokens", "iteration_tokens_total")
    prefill, decode, both = (snapshot.histograms[(name,)].sum for name in names)
    assert prefill + decode == both
    # A chunk of one token that ends a prompt counts as decoding; every output but the last is computed.
    assert num_prompt_tokens - len(sizes) <= prefill <= num_prompt_tokens
    assert both >= num_prompt_tokens + num_outputs - len(sizes)
    num_steps = count(snapshot, "iteration_tokens_total")
    assert sum(count(snapshot, "step_time_seconds", kind) for kind in ("decode", "mixed", "prefill")) == num_steps
    assert count(snapshot, "device_idle_seconds") == num_steps


@pytest.mark.parametrize("depth", [1, 2])
async def test_gauges_return_to_zero_after_aborts_in_every_state(depth: int) -> None:
    metrics = EngineMetrics()
    executor = FakeExecutor(manual=True)
    async with running(executor, metrics, depth) as engine:
        for name in "abcdef":  # four seats and one partial prefill: some run, some wait
            engine.add_request(request(name, 30, 20))
        await until("four running", lambda: num_running(metrics) == 4, executor.release)
        assert metrics.snapshot().gauges[("num_requests_waiting",)] > 0
        assert metrics.snapshot().gauges[("kv_cache_usage_perc",)] > 0
        for name in "abcdef":
            engine.finish_request(name, "abort")
        await until("results in flight", lambda: not executor.num_waiting, executor.release)
        snapshot = await until_empty(engine, metrics)
    assert snapshot.counters[("request_aborts",)] == 6
    assert count(snapshot, "e2e_request_latency_seconds") == 0
    assert not metrics._requests


async def test_the_load_is_the_work_at_hand_and_nothing_when_it_is_done() -> None:
    executor = FakeExecutor(manual=True)
    async with running(executor, EngineMetrics(), 1) as engine:
        assert engine.load() == ReplicaLoad(0.0, 0.0, 0.0)
        for name in "abcdef":
            engine.add_request(request(name, 30, 20))
        await until("a plan", lambda: executor.num_waiting > 0)
        first = engine.load()
        assert first.kv_usage > 0
        for _ in range(3):  # without a step that was measured nothing is known of the speed
            await until("a result", lambda: executor.num_waiting > 0)
            executor.release()
        later = engine.load()
        assert later.kv_usage >= first.kv_usage
        assert 0 <= later.prefill_share <= 1
        for name in "abcdef":
            engine.finish_request(name, "abort")
        await until("results in flight", lambda: not executor.num_waiting, executor.release)
        assert engine.load().kv_usage == 0
        assert engine.load().queue_seconds == 0
    with pytest.raises(EngineError, match="shut down"):
        engine.load()


async def test_refusals_and_the_loss_of_the_executor_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_PAUSE_SECONDS", 0.0)
    metrics = EngineMetrics()
    executor = FakeExecutor(manual=True)
    async with running(executor, metrics, 2) as engine:
        with pytest.raises(RequestRefused):
            engine.add_request(request("a", LIMITS.max_model_len, 5))
        engine.add_request(request("b", 5, 5))
        await until("a plan", lambda: executor.num_waiting > 0)
        executor.restart_errors = [ExecutorError("no place", "startup")] * 5
        executor.fail("rank 0 died")
        await until("the end of the request", lambda: not engine.num_open_requests())
        snapshot = metrics.snapshot()
    refusals = {key[1]: value for key, value in snapshot.counters.items() if key[0] == "admission_rejections"}
    assert sum(refusals.values()) == 1
    assert not any(value for key, value in snapshot.counters.items() if key[0] == "request_success")
    assert snapshot.gauges[("engine_up",)] == 0.0

"""A lost executor is brought back in place: streams stay open, no token is lost or said twice."""

import asyncio
import time
from dataclasses import replace

import pytest
from fake_executor import LIMITS, VOCAB_SIZE, FakeExecutor, continuation
from test_engine import DEADLINE, Published, config, request, running, turns

from cluster.engine import recovery
from cluster.engine.engine import Engine, QueueTooLong
from cluster.engine.executor import NoRoom
from cluster.engine.settings import EngineDeadlines
from cluster.errors import EngineError, ExecutorError
from cluster.links.messages import EngineStatus
from cluster.metrics.engine import EngineMetrics
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from workers.config import ModelLimits

PROMPTS = {f"r{index}": [index + 1, 7, 3 * index] for index in range(6)}
NUM_TOKENS = 20
UNHEARD_OF = VOCAB_SIZE + 1
"""A token that no model says."""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_PAUSE_SECONDS", 0.0)


async def until_state(engine: Engine, phase: str) -> None:
    give_up_at = time.monotonic() + DEADLINE
    while not engine.status().phase.startswith(phase):
        assert time.monotonic() < give_up_at, engine.status()
        await turns(1)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_results", [0, 1, 7, 19])
async def test_streams_go_on_with_their_next_token(depth: int, num_results: int) -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, depth) as engine:
        for name, prompt in PROMPTS.items():
            engine.add_request(request(name, prompt, NUM_TOKENS))
        await turns()
        for _ in range(num_results):
            executor.release()
            await turns()
        executor.fail("rank 1 is gone")
        await until_state(engine, "recovering: rank 1 is gone")
        await until_state(engine, "ready")
        async with asyncio.timeout(DEADLINE):
            while engine.num_open_requests():
                executor.release()
                await asyncio.sleep(0)
        for name, prompt in PROMPTS.items():
            assert published.token_ids(name) == continuation(prompt, NUM_TOKENS)
            assert published.num_ends(name) == 1
            assert (await published.last(name)).finish_reason == "length"
        assert executor.num_restarts == 1
        assert {plan.epoch for plan in executor.plans} == {0, 1}


async def test_requests_come_and_go_while_it_recovers() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, 2) as engine:
        engine.add_request(request("a", [1, 2], 5))
        engine.add_request(request("left", [3, 4], 5))
        await turns()
        executor.may_restart.clear()
        executor.fail("rank 0 is gone")
        await until_state(engine, "recovering")
        assert engine.status() == EngineStatus(False, True, "recovering: rank 0 is gone")
        engine.check_health()
        engine.add_request(request("late", [5, 6], 5))
        engine.finish_request("left", "abort")
        assert (await published.last("left")).finish_reason == "abort"
        executor.may_restart.set()
        await until_state(engine, "ready")
        async with asyncio.timeout(DEADLINE):
            while engine.num_open_requests():
                executor.release()
                await asyncio.sleep(0)
        assert published.token_ids("a") == continuation([1, 2], 5)
        assert published.token_ids("late") == continuation([5, 6], 5)
        assert published.num_ends("left") == 1


async def test_idle_engine_recovers_too() -> None:
    executor, published = FakeExecutor(), Published()
    async with running(executor, published, 2) as engine:
        await turns()
        executor.fail("rank 0 is gone")
        await until_state(engine, "recovering")
        await until_state(engine, "ready")
        engine.add_request(request("a", [1, 2], 5))
        await published.last("a")
        assert published.token_ids("a") == continuation([1, 2], 5)


async def test_nothing_is_planned_for_ranks_that_are_lost() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, 2) as engine:
        await turns()  # it is idle
        executor.fail("rank 0 is gone")
        engine.add_request(request("a", [1, 2], 5))
        await until_state(engine, "recovering")
        assert executor.plans == []
        await until_state(engine, "ready")
        async with asyncio.timeout(DEADLINE):
            while engine.num_open_requests():
                executor.release()
                await asyncio.sleep(0)
        assert published.token_ids("a") == continuation([1, 2], 5)


async def test_recovery_ends_at_once_where_the_ranks_have_no_room() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    executor.restart_errors = [NoRoom("rank 1 was not placed", "startup")] * 5
    async with running(executor, published, 2) as engine:
        engine.add_request(request("a", [1, 2], 50))
        await turns()
        executor.fail("rank 1 is gone")
        last = await published.last("a")
        assert (last.finish_reason, str(last.error)) == (
            "lost",
            "the ranks have no room after rank 1 is gone: rank 1 was not placed",
        )
        assert executor.num_restarts == 1


async def test_failed_restarts_are_tried_again() -> None:
    executor, published = FakeExecutor(), Published()
    executor.restart_errors = [ExecutorError("no bundle", "startup")] * 3
    async with running(executor, published, 2) as engine:
        executor.fail("rank 0 is gone")
        engine.add_request(request("a", [1, 2], 5))
        await published.last("a")
        assert published.token_ids("a") == continuation([1, 2], 5)
        assert executor.num_restarts == 4


async def test_requests_are_lost_when_the_ranks_do_not_come_back() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    executor.restart_errors = [ExecutorError("no bundle", "startup")] * 5
    async with running(executor, published, 2) as engine:
        for name in ("a", "b"):
            engine.add_request(request(name, [1, 2], 50))
        await turns()
        executor.fail("rank 1 is gone")
        for name in ("a", "b"):
            last = await published.last(name)
            assert last.finish_reason == "lost"
            assert "rank 1 is gone" in str(last.error)
            assert "no bundle" in str(last.error)
            assert published.num_ends(name) == 1
        assert not engine.status().live
        with pytest.raises(EngineError, match="no bundle"):
            engine.check_health()
        with pytest.raises(EngineError, match="no bundle"):
            engine.add_request(request("late", [1], 1))


async def test_recovery_has_a_deadline() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    executor.may_restart.clear()
    deadlines = replace(EngineDeadlines(), recovery=0.2)
    engine = Engine(executor, make_scheduler, published, 2, deadlines=deadlines)
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    engine.add_request(request("a", [1, 2], 5))
    await turns()
    executor.fail("rank 1 is gone")
    last = await published.last("a")
    assert (last.finish_reason, str(last.error)[:38]) == ("lost", "the ranks did not come back within 0.2")
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)


async def test_a_pause_of_the_whole_process_does_not_count_against_the_ranks() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    executor.may_restart.clear()
    deadlines = replace(EngineDeadlines(), hand_over=0.3, recovery=0.3)
    engine = Engine(executor, make_scheduler, published, 2, deadlines=deadlines)
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    engine.add_request(request("a", [1, 2], 5))
    await turns()
    executor.fail("rank 1 is gone")
    await until_state(engine, "recovering")
    time.sleep(1.0)  # noqa: ASYNC251 - the process stands still
    await asyncio.sleep(0.05)
    executor.may_restart.set()
    await until_state(engine, "ready")
    async with asyncio.timeout(DEADLINE):
        while engine.num_open_requests():
            executor.release()
            await asyncio.sleep(0)
    assert published.token_ids("a") == continuation([1, 2], 5)
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_recovery_that_takes_too_long_gives_its_requests_back(comes_back: bool) -> None:
    executor, published = FakeExecutor(manual=True), Published()
    executor.may_restart.clear()
    deadlines = replace(EngineDeadlines(), hand_over=0.05, recovery=DEADLINE if comes_back else 0.5)
    engine = Engine(executor, make_scheduler, published, 2, deadlines=deadlines)
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    for name in ("a", "b"):
        engine.add_request(request(name, [1, 2], 5))
    await turns()
    executor.release()
    await turns()
    executor.fail("rank 1 is gone")
    for name in ("a", "b"):
        last = await asyncio.wait_for(published.last(name), 0.4)  # it does not wait for the recovery's own deadline
        assert last.finish_reason == "lost"
        assert "0.05 s after rank 1 is gone" in str(last.error)
        assert published.token_ids(name) == continuation([1, 2], 1)
    assert engine.num_open_requests() == 0
    assert engine.status() == EngineStatus(False, True, "recovering: rank 1 is gone")
    engine.check_health()
    with pytest.raises(EngineError, match="recovering: rank 1 is gone"):
        engine.add_request(request("c", [1, 2], 5))
    if comes_back:
        executor.may_restart.set()
        await until_state(engine, "ready")
        again = Request("again", [1, 2], SamplingParams(max_tokens=5), output_token_ids=continuation([1, 2], 1))
        engine.add_request(again)
        async with asyncio.timeout(DEADLINE):
            while engine.num_open_requests():
                executor.release()
                await asyncio.sleep(0)
        assert published.token_ids("again") == continuation([1, 2], 5)[1:]
    else:
        await asyncio.wait_for(loop, DEADLINE)
        assert not engine.status().live
    for name in ("a", "b"):
        assert published.num_ends(name) == 1
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)


def make_scheduler(limits: object) -> Scheduler:
    return Scheduler(config(2), LIMITS.num_blocks)


async def test_shutdown_while_it_recovers() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    executor.may_restart.clear()
    async with running(executor, published, 2) as engine:
        engine.add_request(request("a", [1, 2], 5))
        await turns()
        executor.fail("rank 1 is gone")
        await until_state(engine, "recovering")
    last = await published.last("a")
    assert (last.finish_reason, last.error) == ("lost", "the engine was shut down")
    assert executor.num_stops == 1
    assert engine.status() == EngineStatus(False, False, "the engine was shut down")


async def test_recoveries_are_counted_by_cause() -> None:
    executor, metrics = FakeExecutor(), EngineMetrics()
    published = Published()
    engine = Engine(executor, make_scheduler, published, 2, metrics)
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    for index in range(3):
        executor.fail("rank 1 is gone")
        engine.add_request(request(f"r{index}", [1, 2], 5))
        await published.last(f"r{index}")
    assert metrics.snapshot().counters[("engine_recoveries", "worker_died")] == 3
    assert metrics.snapshot().gauges[("engine_up",)] == 1.0
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)


@pytest.mark.parametrize("depth", [1, 2])
async def test_poison_fails_alone(depth: int) -> None:
    executor, published = FakeExecutor(poison=UNHEARD_OF), Published()
    async with running(executor, published, depth) as engine:
        for index in range(16):
            engine.add_request(request(f"r{index}", [index + 1, UNHEARD_OF if index == 11 else 98, 5], NUM_TOKENS))
        await turns(2)
        engine.add_request(request("late", [1, 2], NUM_TOKENS))
        for index in range(16):
            last = await published.last(f"r{index}")
            assert published.num_ends(f"r{index}") == 1
            if index == 11:
                assert last.finish_reason == "error"
                assert "died each time" in str(last.error)
            else:
                assert last.finish_reason == "length"
                assert published.token_ids(f"r{index}") == continuation([index + 1, 98, 5], NUM_TOKENS)
        await published.last("late")
        assert published.token_ids("late") == continuation([1, 2], NUM_TOKENS)
        assert executor.num_restarts <= 5
        assert engine.status().ready


async def test_poison_that_is_generated_fails_alone() -> None:
    prompts = [[index + 1, 3] for index in range(8)]
    (poison,) = set(continuation(prompts[3], 6)[-1:]) - {
        token_id for index, prompt in enumerate(prompts) if index != 3 for token_id in continuation(prompt, 8)
    }
    executor, published = FakeExecutor(poison=poison), Published()
    async with running(executor, published, 2) as engine:
        for index, prompt in enumerate(prompts):
            engine.add_request(request(f"r{index}", prompt, 8))
        reasons = [(await published.last(f"r{index}")).finish_reason for index in range(8)]
        assert reasons == ["error" if index == 3 else "length" for index in range(8)]
        for index, prompt in enumerate(prompts):
            assert published.token_ids(f"r{index}") == continuation(prompt, 8)[: 6 if index == 3 else 8]


async def test_lone_poison_is_failed_after_three_crashes() -> None:
    executor, published = FakeExecutor(poison=UNHEARD_OF), Published()
    async with running(executor, published, 2) as engine:
        engine.add_request(request("first", [1, 2], 5))
        await published.last("first")
        engine.add_request(request("a", [1, UNHEARD_OF], 5))
        assert (await published.last("a")).finish_reason == "error"
        assert executor.num_restarts <= 3
        engine.add_request(request("b", [1, 2], 5))
        assert (await published.last("b")).finish_reason == "length"


@pytest.mark.parametrize("num_requests", [1, 2, 16])
async def test_ranks_that_never_finish_a_step_lose_requests_and_fail_none(num_requests: int) -> None:
    executor, published = FakeExecutor(poison=UNHEARD_OF), Published()
    async with running(executor, published, 2) as engine:
        for index in range(num_requests):
            engine.add_request(request(f"r{index}", [UNHEARD_OF], 5))
        for index in range(num_requests):
            last = await published.last(f"r{index}")
            assert last.finish_reason == "lost"
            assert "without a step between" in str(last.error)
        assert not engine.status().live


async def test_streams_survive_deaths_before_their_first_token_is_computed_again() -> None:
    executor, published = FakeExecutor(manual=True), Published()
    async with running(executor, published, 2) as engine:
        for name in ("a", "b"):
            engine.add_request(request(name, [1, 2], 5))
        await turns()
        for num_restarts in (1, 2):
            executor.fail("rank 0 is gone")
            await until_state(engine, "recovering")
            await until_state(engine, "ready")
            await turns()
            assert executor.num_restarts == num_restarts
        async with asyncio.timeout(DEADLINE):
            while engine.num_open_requests():
                executor.release()
                await asyncio.sleep(0)
        for name in ("a", "b"):
            assert (await published.last(name)).finish_reason == "length"
            assert published.token_ids(name) == continuation([1, 2], 5)


async def test_new_requests_are_refused_while_the_queue_is_too_long() -> None:
    executor, published, metrics = FakeExecutor(manual=True), Published(), EngineMetrics()
    engine = Engine(executor, make_scheduler, published, 2, metrics, max_queue_seconds=0.05)
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    for index in range(4):  # teaches what steps take: 1 ms
        engine.add_request(request(f"first{index}", [index] * 40, 3))
    async with asyncio.timeout(DEADLINE):
        while engine.num_open_requests():
            executor.release()
            await asyncio.sleep(0)
    refusals = [refusal for index in range(50) if (refusal := refusal_of(engine, f"queued{index}")) is not None]
    assert 0 < len(refusals) < 50
    assert refusals[0].retry_after > 0
    assert metrics.snapshot().counters[("admission_rejections", "queue")] == len(refusals)
    resubmitted = Request("again", [1, 2], SamplingParams(max_tokens=5), output_token_ids=continuation([1, 2], 2))
    engine.add_request(resubmitted)
    async with asyncio.timeout(DEADLINE):
        while engine.num_open_requests():
            executor.release()
            await asyncio.sleep(0)
    assert published.token_ids("again") == continuation([1, 2], 5)[2:]
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)


async def test_a_recovery_counts_as_waiting() -> None:
    class SlowToStart(FakeExecutor):
        async def start(self) -> ModelLimits:
            await asyncio.sleep(0.3)
            return await super().start()

    executor, published = SlowToStart(), Published()
    executor.may_restart.clear()
    engine = Engine(executor, make_scheduler, published, 2, max_queue_seconds=0.1)
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    assert refusal_of(engine, "before") is None
    await published.last("before")
    executor.fail("rank 0 is gone")
    await until_state(engine, "recovering")
    refusal = refusal_of(engine, "new")
    assert refusal is not None
    assert 0.0 < refusal.retry_after < 0.25
    engine.add_request(Request("again", [1, 2], SamplingParams(max_tokens=5), resubmitted=True))
    executor.may_restart.set()
    await until_state(engine, "ready")
    assert refusal_of(engine, "after") is None
    await published.last("again")
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)


def refusal_of(engine: Engine, name: str) -> QueueTooLong | None:
    try:
        engine.add_request(request(name, [7] * 40, 3))
    except QueueTooLong as refusal:
        return refusal
    return None


async def test_waiting_work_without_steps_is_not_alive() -> None:
    executor, published = FakeExecutor(), Published()
    engine = Engine(executor, make_scheduler, published, 2, deadlines=replace(EngineDeadlines(), stall=0.05))
    await engine.start()  # its loop does not run
    time.sleep(0.1)  # noqa: ASYNC251
    assert engine.status().live  # it is idle
    engine.add_request(request("a", [1, 2], 5))
    assert engine.status().live  # before, nobody waited
    time.sleep(0.1)  # noqa: ASYNC251
    assert not engine.status().live
    with pytest.raises(EngineError, match="requests wait"):
        engine.check_health()
    await engine.shutdown()

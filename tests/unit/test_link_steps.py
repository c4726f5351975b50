"""The step link: plans to all ranks, results in order from rank 0, and every way a rank can fail."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from link_peers import DEADLINE, HOST, until

from cluster.engine.step_link import StepLink
from cluster.errors import ExecutorError
from scheduler.plan import StepPlan, StepResult
from workers.link import Link, LinkError
from workers.step_loop import ERROR, HEARTBEAT, PLAN, RESULT, rank_name
from workers.wire import decode_plan, encode

TICK = 0.02


class Ranks:
    """Ranks in this process; what they do is up to the test."""

    def __init__(self, step_link: StepLink, links: list[Link]) -> None:
        self.step_link = step_link
        self._links = links

    async def receive(self, rank: int) -> StepPlan:
        kind, payload = await asyncio.wait_for(asyncio.to_thread(self._links[rank].receive), DEADLINE)
        assert kind == PLAN
        return decode_plan(payload)

    def send(self, rank: int, kind: int, payload: bytes) -> None:
        self._links[rank].send(kind, payload)

    def reply(self, plan: StepPlan) -> None:
        self.send(0, RESULT, encode(StepResult(plan.epoch, plan.step_id, {"a": [plan.step_id]})))

    def die(self, rank: int) -> None:
        self._links[rank].close()


@asynccontextmanager
async def ranks(num_ranks: int = 2, heartbeat_seconds: float = DEADLINE) -> AsyncIterator[Ranks]:
    step_link = StepLink(num_ranks, heartbeat_seconds, TICK)
    host, port, token = await step_link.listen(HOST)
    links = [
        await asyncio.to_thread(Link.connect, host, port, token, rank_name(rank), DEADLINE) for rank in range(num_ranks)
    ]
    await step_link.wait_for_ranks(DEADLINE)
    yield Ranks(step_link, links)
    step_link.close()
    for link in links:
        link.close()
    await asyncio.sleep(0)


def plan(step_id: int) -> StepPlan:
    return StepPlan(0, step_id, {"a": 1})


async def test_every_rank_gets_every_plan_and_rank_0_answers() -> None:
    async with ranks() as group:
        futures = [group.step_link.execute(plan(step_id), DEADLINE) for step_id in (1, 2)]
        for rank in (0, 1):
            assert [await group.receive(rank) for _ in (1, 2)] == [plan(1), plan(2)]
        for step_id in (1, 2):
            group.reply(plan(step_id))
        results = await asyncio.wait_for(asyncio.gather(*futures), DEADLINE)
        assert [result.sampled_token_ids for result in results] == [{"a": [1]}, {"a": [2]}]
        group.step_link.check_health()


async def failures(group: Ranks, futures: list[asyncio.Future[StepResult]]) -> str:
    """Every plan in flight and every later one must fail with one cause, which is returned."""
    done, pending = await asyncio.wait(futures, timeout=DEADLINE)
    assert not pending
    causes = {str(future.exception()) for future in done}
    assert len(causes) == 1
    assert all(isinstance(future.exception(), ExecutorError) for future in done)
    with pytest.raises(ExecutorError) as late:
        await group.step_link.execute(plan(99), DEADLINE)
    with pytest.raises(ExecutorError) as health:
        group.step_link.check_health()
    assert {str(late.value), str(health.value)} == causes
    return causes.pop()


@pytest.mark.parametrize("rank", [0, 1])
async def test_dead_rank_fails_all_plans_and_is_named(rank: int) -> None:
    async with ranks() as group:
        futures = [group.step_link.execute(plan(step_id), DEADLINE) for step_id in (1, 2)]
        group.die(rank)
        assert (await failures(group, futures)).startswith(f"rank {rank} is gone")


async def test_rank_that_reports_an_error_is_quoted() -> None:
    async with ranks() as group:
        futures = [group.step_link.execute(plan(1), DEADLINE)]
        group.send(1, ERROR, b"RuntimeError: CUDA out of memory")
        group.die(1)
        assert await failures(group, futures) == "rank 1 failed: RuntimeError: CUDA out of memory"


async def test_rank_that_fails_because_another_died_is_not_blamed() -> None:
    async with ranks() as group:
        futures = [group.step_link.execute(plan(1), DEADLINE)]
        group.send(0, ERROR, b"RuntimeError: rank 1 has ended")
        group.die(0)
        group.die(1)
        assert (await failures(group, futures)).startswith("rank 1 is gone")
        assert kind_of_failure(group.step_link) == "worker_died"


async def test_step_deadline_names_the_step() -> None:
    async with ranks() as group:
        futures = [group.step_link.execute(plan(step_id), 0.05) for step_id in (4, 5)]
        assert await failures(group, futures) == "rank 0 gave no result of step 4 within 0.05 s"
        assert kind_of_failure(group.step_link) == "worker_hung"


async def test_step_deadline_counts_for_each_step_anew() -> None:
    async with ranks() as group:
        for step_id in range(5):
            future = group.step_link.execute(plan(step_id), 0.5)
            await asyncio.sleep(0.2)
            group.reply(plan(step_id))
            await asyncio.wait_for(future, DEADLINE)
        await asyncio.sleep(0.6)  # no plan, no deadline
        group.step_link.check_health()


async def test_silent_rank_has_hung_idle_or_not() -> None:
    async with ranks(heartbeat_seconds=0.3) as group:
        group.step_link.check_health()
        await until(lambda: not beat(group, 0))
        with pytest.raises(ExecutorError, match=r"rank 1 has hung: nothing was heard of it for 0\.3 s"):
            group.step_link.check_health()
        assert kind_of_failure(group.step_link) == "worker_hung"


def beat(group: Ranks, rank: int) -> bool:
    """One heartbeat of a rank; whether the link is healthy still."""
    if is_healthy(group.step_link):
        group.send(rank, HEARTBEAT, b"")
    return is_healthy(group.step_link)


async def test_ranks_are_not_blamed_when_the_engine_stood_still() -> None:
    async with ranks(heartbeat_seconds=0.5) as group:
        for _ in range(3):
            for rank in (0, 1):
                group.send(rank, HEARTBEAT, b"")
            time.sleep(1.0)  # noqa: ASYNC251 - the loop itself is held up
            await asyncio.sleep(2 * TICK)
            group.step_link.check_health()


@pytest.mark.parametrize(
    ("rank", "kind", "payload", "cause"),
    [
        (0, RESULT, encode(StepResult(0, 7)), "rank 0 sent the result of step 7 where step 1 was due"),
        (0, RESULT, b"\xc1", "rank 0 sent a result that cannot be read"),
        (1, RESULT, encode(StepResult(0, 1)), f"rank 1 sent a message of kind {RESULT}"),
        (0, 77, b"", "rank 0 sent a message of kind 77"),
    ],
)
async def test_nonsense_of_a_rank(rank: int, kind: int, payload: bytes, cause: str) -> None:
    async with ranks() as group:
        futures = [group.step_link.execute(plan(1), DEADLINE)]
        group.send(rank, kind, payload)
        assert (await failures(group, futures)).startswith(cause)


async def test_result_that_nobody_asked_for() -> None:
    async with ranks(1) as group:
        group.reply(plan(3))
        await until(lambda: not is_healthy(group.step_link))
        with pytest.raises(ExecutorError, match="result of step 3 where step None was due"):
            group.step_link.check_health()


def kind_of_failure(step_link: StepLink) -> str:
    with pytest.raises(ExecutorError) as failure:
        step_link.check_health()
    return failure.value.kind


def is_healthy(step_link: StepLink) -> bool:
    try:
        step_link.check_health()
    except ExecutorError:
        return False
    return True


async def test_ranks_that_do_not_dial_are_named() -> None:
    step_link = StepLink(3, DEADLINE)
    host, port, token = await step_link.listen(HOST)
    link = await asyncio.to_thread(Link.connect, host, port, token, rank_name(1), DEADLINE)
    with pytest.raises(ExecutorError, match=r"no link from rank 0, rank 2 within 0\.1 s"):
        await step_link.wait_for_ranks(0.1)
    step_link.close()
    link.close()


async def test_only_expected_ranks_are_let_in_and_once() -> None:
    step_link = StepLink(1, DEADLINE)
    host, port, token = await step_link.listen(HOST)
    first = await asyncio.to_thread(Link.connect, host, port, token, rank_name(0), DEADLINE)
    for name in (rank_name(0), rank_name(1), "front end"):
        other = await asyncio.to_thread(Link.connect, host, port, token, name, DEADLINE)
        with pytest.raises(LinkError):
            await asyncio.wait_for(asyncio.to_thread(other.receive), DEADLINE)
    await step_link.wait_for_ranks(DEADLINE)
    step_link.check_health()
    step_link.close()
    first.close()

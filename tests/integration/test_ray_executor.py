"""Ranks as Ray actors with a real tiny model: the same tokens, and no way to fail in silence."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import ray
from engine_runs import DEADLINE, all_gone, expected_tokens, generate, is_alive, settings
from ray.util.placement_group import placement_group_table

from cluster.engine.executor import InProcessExecutor, only_rank
from cluster.engine.ray_executor import RayExecutor
from cluster.errors import ExecutorError
from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("ray_session")


async def test_in_process_tokens_are_the_references() -> None:
    engine_settings = settings()
    executor = InProcessExecutor(lambda: only_rank(engine_settings.worker))
    assert await generate(executor, engine_settings) == expected_tokens()


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
async def test_tokens_are_the_references_and_no_process_is_left(tensor_parallel_size: int) -> None:
    engine_settings = settings(tensor_parallel_size)
    phases: list[tuple[str, bool]] = []
    executor = RayExecutor(engine_settings, lambda name, seconds: phases.append((name, seconds is not None)))
    assert await generate(executor, engine_settings) == expected_tokens()
    names = ["place", "load", "measure", "allocate", "profile", "link"]
    assert phases == [(name, ended) for name in names for ended in (False, True)]
    assert len(executor.process_ids()) == tensor_parallel_size
    await all_gone(executor.process_ids())
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}


def one_step(step_id: int, num_tokens: int = 8) -> StepPlan:
    new = NewRequest(f"r{step_id}", list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=1), [step_id], 0)
    return StepPlan(0, step_id, {new.request_id: num_tokens}, [new])


@pytest.mark.parametrize("rank", [0, 1])
async def test_killed_rank_fails_what_is_in_flight(rank: int) -> None:
    executor = RayExecutor(settings(2))
    await executor.start()
    await asyncio.wait_for(executor.execute_step(one_step(0), DEADLINE), DEADLINE)
    executor.check_health()
    victim = executor.process_ids()[rank]
    os.kill(victim, signal.SIGSTOP)  # so that the plans are in flight when it dies
    results = [asyncio.ensure_future(executor.execute_step(one_step(step_id), DEADLINE)) for step_id in (1, 2)]
    os.kill(victim, signal.SIGKILL)
    for outcome in await asyncio.wait_for(asyncio.gather(*results, return_exceptions=True), DEADLINE):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, ExecutorError)
    # The other rank's collective may fail before the engine sees the end of the link.
    with pytest.raises(ExecutorError, match=f"rank {rank} is gone|rank {1 - rank} failed"):
        executor.check_health()
    assert any(isinstance(future.exception(), ExecutorError) for future in results)
    await executor.shutdown()
    await all_gone(executor.process_ids())


async def test_suspended_rank_meets_the_step_deadline_and_is_killed() -> None:
    executor = RayExecutor(settings(1))
    await executor.start()
    os.kill(executor.process_ids()[0], signal.SIGSTOP)
    with pytest.raises(ExecutorError, match="rank 0 gave no result of step 3 within 1 s"):
        await asyncio.wait_for(executor.execute_step(one_step(3), 1.0), DEADLINE)
    await executor.shutdown()
    await all_gone(executor.process_ids())


async def test_plan_that_a_rank_cannot_execute() -> None:
    executor = RayExecutor(settings(1))
    await executor.start()
    with pytest.raises(ExecutorError, match="rank 0 failed: "):
        await asyncio.wait_for(executor.execute_step(StepPlan(0, 1, {"unknown": 1}), DEADLINE), DEADLINE)
    await executor.shutdown()
    await all_gone(executor.process_ids())


async def test_failed_load_names_rank_and_phase_and_leaves_nothing() -> None:
    executor = RayExecutor(settings(2, model_path="/nowhere/model"))
    with pytest.raises(ExecutorError, match=r"rank \d failed in start-up phase 'load': .*nowhere"):
        await executor.start()
    await all_gone(executor.process_ids())
    with pytest.raises(ExecutorError, match="not started"):
        executor.check_health()


async def test_no_room_in_the_cluster() -> None:
    engine_settings = settings(1)
    engine_settings = replace(engine_settings, rank_cpus=99.0, deadlines=replace(engine_settings.deadlines, place=1.0))
    with pytest.raises(ExecutorError, match="no room in the cluster for 1 ranks"):
        await RayExecutor(engine_settings).start()


async def test_ranks_die_with_the_process_that_holds_the_link() -> None:
    """The engine is killed: its ranks see EOF and go, without Ray's help; Ray ends the spares."""

    class Holder:  # Local, so that Ray ships it by value.
        async def start(self) -> list[int]:
            self.executor = RayExecutor(engine_settings)
            await self.executor.start()
            spares = [await spare.process_id.remote() for spare in self.executor._actors._spares]
            return self.executor.process_ids() + spares

        async def process_id(self) -> int:
            return os.getpid()

    engine_settings = settings(2)
    holder = ray.remote(Holder).options(num_cpus=1).remote()
    ranks = await asyncio.wait_for(holder.start.remote(), DEADLINE)
    engine = await asyncio.wait_for(holder.process_id.remote(), DEADLINE)
    assert len(ranks) == 4
    assert all(map(is_alive, [engine, *ranks]))
    os.kill(engine, signal.SIGKILL)
    await all_gone([engine, *ranks])

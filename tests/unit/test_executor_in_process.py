"""The executor that runs its one rank in a thread."""

import asyncio
import threading

import pytest
from fake_executor import LIMITS

from cluster.engine.executor import InProcessExecutor, only_rank
from cluster.errors import ExecutorError
from scheduler.plan import StepLoad, StepPlan, StepResult
from workers.config import ModelLimits, WorkerConfig

DEADLINE = 20.0
PROFILE = [(StepLoad(1, 0, 5, 0), 0.01)]


class RecordingWorker:
    def __init__(self, broken_step: int | None = None, start_error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self._broken_step = broken_step
        self._start_error = start_error

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)

    def load(self) -> None:
        self._called("load")
        if self._start_error is not None:
            raise self._start_error

    def measure(self) -> ModelLimits:
        self._called("measure")
        return LIMITS

    def allocate(self, limits: ModelLimits) -> None:
        self._called(f"allocate {limits.num_blocks}")

    def profile(self, limits: ModelLimits) -> list[tuple[StepLoad, float]]:
        self._called("profile")
        return PROFILE

    def execute_step(self, plan: StepPlan) -> StepResult:
        self._called(f"step {plan.step_id}")
        if plan.step_id == self._broken_step:
            raise RuntimeError("slot 7 is taken")
        return StepResult(plan.epoch, plan.step_id)

    def shutdown(self) -> None:
        self._called("shutdown")


def plan(step_id: int) -> StepPlan:
    return StepPlan(0, step_id, {"a": 1})


async def test_calls_in_order_on_one_thread() -> None:
    worker = RecordingWorker()
    executor = InProcessExecutor(lambda: worker)
    limits = await executor.start()
    assert limits == LIMITS
    assert limits.profile == tuple(PROFILE)
    results = await asyncio.gather(*[executor.execute_step(plan(step_id), DEADLINE) for step_id in range(4)])
    assert [result.step_id for result in results] == [0, 1, 2, 3]
    executor.check_health()
    await executor.shutdown()
    steps = [f"step {step_id}" for step_id in range(4)]
    assert worker.calls == ["load", "measure", f"allocate {LIMITS.num_blocks}", "profile", *steps, "shutdown"]
    assert len(worker.threads) == 1
    assert worker.threads != {threading.current_thread().name}


async def test_failed_step_fails_it_and_all_later_ones() -> None:
    worker = RecordingWorker(broken_step=1)
    executor = InProcessExecutor(lambda: worker)
    await executor.start()
    results = await asyncio.gather(
        *[executor.execute_step(plan(n), DEADLINE) for n in range(3)], return_exceptions=True
    )
    assert isinstance(results[0], StepResult)
    for failed in results[1:]:
        assert isinstance(failed, ExecutorError)
        assert str(failed) == "rank 0 failed: RuntimeError: slot 7 is taken"
    assert "step 2" not in worker.calls
    with pytest.raises(ExecutorError, match="slot 7 is taken"):
        executor.check_health()
    await executor.shutdown()
    assert worker.calls[-1] == "shutdown"


async def test_restart_is_a_start_with_the_limits_of_the_first() -> None:
    workers: list[RecordingWorker] = []

    def make_worker() -> RecordingWorker:
        workers.append(RecordingWorker(broken_step=1))
        return workers[-1]

    executor = InProcessExecutor(make_worker)
    await executor.start()
    with pytest.raises(ExecutorError):
        await executor.execute_step(plan(1), DEADLINE)
    await executor.restart()
    executor.check_health()
    assert (await executor.execute_step(plan(2), DEADLINE)).step_id == 2
    await executor.shutdown()
    assert workers[0].calls[-1] == "shutdown"
    assert workers[1].calls == ["load", f"allocate {LIMITS.num_blocks}", "step 2", "shutdown"]


async def test_step_that_hangs_fails_at_its_deadline_and_a_restart_leaves_it_behind() -> None:
    may_end = threading.Event()

    class Hanging(RecordingWorker):
        def execute_step(self, plan: StepPlan) -> StepResult:
            if plan.step_id == 7:
                may_end.wait(DEADLINE)
            return super().execute_step(plan)

    executor = InProcessExecutor(Hanging)
    await executor.start()
    with pytest.raises(ExecutorError, match="rank 0 gave no result of step 7") as failure:
        await executor.execute_step(plan(7), 0.05)
    assert failure.value.kind == "worker_hung"
    with pytest.raises(ExecutorError, match="rank 0 gave no result of step 7"):
        await asyncio.wait_for(executor.execute_step(plan(8), DEADLINE), 1.0)  # it does not wait for the thread
    may_end.set()
    await executor.restart()
    assert (await executor.execute_step(plan(9), DEADLINE)).step_id == 9
    await executor.shutdown()


async def test_what_an_old_life_still_does_concerns_nobody() -> None:
    hangs, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    steps: list[int] = []

    class Hanging(RecordingWorker):
        def execute_step(self, plan: StepPlan) -> StepResult:
            steps.append(plan.step_id)
            if plan.step_id == 7:
                hangs.set()
                may_end.wait(DEADLINE)
                raise RuntimeError("too late to matter")
            return super().execute_step(plan)

        def shutdown(self) -> None:
            ended.set()

    executor = InProcessExecutor(Hanging)
    await executor.start()
    hanging = asyncio.ensure_future(executor.execute_step(plan(7), DEADLINE))
    queued = asyncio.ensure_future(executor.execute_step(plan(8), DEADLINE))
    assert await asyncio.to_thread(hangs.wait, DEADLINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.engine.executor._SHUTDOWN_SECONDS", 0.05)
        await executor.restart()
    with pytest.raises(ExecutorError, match="rank 0 was shut down"):
        await queued
    may_end.set()
    with pytest.raises(ExecutorError, match="rank 0 was shut down"):
        await hanging
    assert await asyncio.to_thread(ended.wait, DEADLINE)
    executor.check_health()
    assert (await executor.execute_step(plan(9), DEADLINE)).step_id == 9
    assert steps == [7, 9]
    await executor.shutdown()


async def test_failed_start() -> None:
    executor = InProcessExecutor(lambda: RecordingWorker(start_error=FileNotFoundError("no config.json in /x")))
    with pytest.raises(ExecutorError, match=r"rank 0 failed: FileNotFoundError: no config\.json"):
        await executor.start()
    await executor.shutdown()


async def test_no_steps_after_shutdown() -> None:
    executor = InProcessExecutor(RecordingWorker)
    await executor.start()
    await executor.shutdown()
    with pytest.raises(ExecutorError, match="shut down"):
        executor.check_health()


def test_one_process_holds_one_rank() -> None:
    config = WorkerConfig("/models/x", max_num_seqs=1, max_num_batched_tokens=8, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size is 2"):
        only_rank(config)

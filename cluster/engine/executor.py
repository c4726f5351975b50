"""The seam between the engine loop and whatever executes its plans, and its simplest side."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from cluster.awake import awake_timeout
from cluster.errors import ExecutorError, LossKind
from scheduler.plan import StepLoad, StepPlan, StepResult
from workers.config import ModelLimits, WorkerConfig

T = TypeVar("T")

_SHUTDOWN_SECONDS = 10.0


class NoRoom(ExecutorError):
    """The ranks cannot be placed, and were waited for: there is no use in trying again."""


class Executor(Protocol):
    """A group of ranks seen as one device. Plans are executed strictly in the order they are given."""

    async def start(self) -> ModelLimits:
        """Start ranks, load weights, measure and allocate KV. Raises ExecutorError with the cause."""

    async def restart(self) -> None:
        """End what is left of the ranks and start them anew, empty, with the limits that `start` returned.

        Plans that are in flight fail. Raises ExecutorError with the cause; unless it is NoRoom, it may be tried again.
        """

    def execute_step(self, plan: StepPlan, seconds: float) -> Awaitable[StepResult]:
        """Send at once, without waiting; the awaitable gives the result or raises ExecutorError.

        `seconds`: how long the step may take, from when no other is before it.
        """

    def check_health(self) -> None:
        """Raises ExecutorError if a rank is known to be dead, until `restart`."""

    async def shutdown(self) -> None:
        """Stop every rank; returns within seconds, whatever state they are in."""


class RankWorker(Protocol):
    """What an executor asks of one rank; `workers.worker.Worker` is one."""

    def load(self) -> None: ...

    def measure(self) -> ModelLimits: ...

    def allocate(self, limits: ModelLimits) -> None: ...

    def profile(self, limits: ModelLimits) -> list[tuple[StepLoad, float]]: ...

    def execute_step(self, plan: StepPlan) -> StepResult: ...

    def shutdown(self) -> None: ...


def only_rank(config: WorkerConfig) -> RankWorker:
    """A group of one rank. Raises ValueError when the config asks for more."""
    if config.tensor_parallel_size != 1:
        raise ValueError(f"one process holds one rank; tensor_parallel_size is {config.tensor_parallel_size}")
    from workers.worker import Worker  # torch: seconds to import, and not needed where this is not called

    return Worker(config)


class _Life:
    """One worker and its thread, from start to failure or shutdown. What it still does after that concerns nobody."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank0")
        self.worker: RankWorker | None = None
        self.failure: ExecutorError | None = None
        self.results: set[asyncio.Future[StepResult]] = set()

    def fail(self, cause: str, kind: LossKind = "step_failed") -> ExecutorError:
        """Returns the failure; only the first counts."""
        self.failure = self.failure or ExecutorError(cause, kind)
        return self.failure

    def run(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """On the thread, unless it has failed by then. What `work` raises is its failure."""
        return asyncio.get_running_loop().run_in_executor(self.thread, self._guarded, work)

    def _guarded(self, work: Callable[[], T]) -> T:
        if self.failure is not None:
            raise self.failure
        try:
            return work()
        except Exception as error:
            raise self.fail(f"rank 0 failed: {type(error).__name__}: {error}") from error

    def execute(self, plan: StepPlan) -> "asyncio.Future[StepResult]":
        """Fails at once after a failure, for the thread may hang. Raises RuntimeError when there is no worker."""
        if self.failure is not None:
            failed: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
            failed.set_exception(self.failure)
            return failed
        if self.worker is None:
            raise RuntimeError("it was given a plan before it had started")
        result = self.run(partial(self.worker.execute_step, plan))
        self.results.add(result)
        result.add_done_callback(self.results.discard)
        return result

    async def end(self) -> None:
        """Cancel plans that have not begun, wait for the step that runs. Raises ExecutorError if that takes long."""
        self.fail("rank 0 was shut down")
        for result in tuple(self.results):
            result.cancel()
        stopped = asyncio.get_running_loop().run_in_executor(self.thread, self._stop)
        self.thread.shutdown(wait=False)
        await asyncio.wait((stopped,), timeout=_SHUTDOWN_SECONDS)
        if not stopped.done():
            raise ExecutorError(f"rank 0 did not stop within {_SHUTDOWN_SECONDS:g} s")
        stopped.result()

    def _stop(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.shutdown()


class InProcessExecutor:
    """One rank in a thread of this process: for tests, and for use without Ray.

    `make_worker` runs on that thread, as everything else of the worker does.
    """

    def __init__(self, make_worker: Callable[[], RankWorker]) -> None:
        self._make_worker = make_worker
        self._life = _Life()
        self._limits: ModelLimits | None = None

    async def start(self) -> ModelLimits:
        """Raises ExecutorError with the cause."""
        self._limits = await self._life.run(partial(self._start, self._life))
        return self._limits

    async def restart(self) -> None:
        """Raises ExecutorError with the cause. A thread cannot be killed: one that hangs is left behind."""
        with contextlib.suppress(ExecutorError):
            await self._life.end()
        self._life = _Life()
        await self.start()

    def execute_step(self, plan: StepPlan, seconds: float) -> Awaitable[StepResult]:
        """The one thread executes plans in the order they come. After a failure every plan fails.

        A plan that waits for another's end has as much time again.
        """
        return self._within(self._life, self._life.execute(plan), plan.step_id, 2 * seconds)

    async def _within(
        self, life: _Life, result: "asyncio.Future[StepResult]", step_id: int, seconds: float
    ) -> StepResult:
        with contextlib.suppress(TimeoutError):
            async with awake_timeout(seconds):
                await asyncio.wait((result,))
        if result.cancelled():
            raise life.fail(f"step {step_id} was cancelled")
        if not result.done():
            result.cancel()
            raise life.fail(f"rank 0 gave no result of step {step_id} within {seconds:g} s", "worker_hung")
        return result.result()

    def check_health(self) -> None:
        """Raises ExecutorError if start-up or a step has failed."""
        if self._life.failure is not None:
            raise self._life.failure

    async def shutdown(self) -> None:
        """Waits, for some seconds, for the step that runs; plans that have not begun fail."""
        await self._life.end()

    def _start(self, life: _Life) -> ModelLimits:
        """On the worker's thread."""
        worker = life.worker = self._make_worker()
        worker.load()
        limits = self._limits or worker.measure()
        worker.allocate(limits)
        if self._limits is None:
            return replace(limits, profile=tuple(worker.profile(limits)))
        return limits

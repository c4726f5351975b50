"""The seam between the engine loop and whatever executes its plans, and its simplest side."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from cluster.errors import ExecutorError
from scheduler.plan import StepLoad, StepPlan, StepResult
from workers.config import ModelLimits, WorkerConfig

T = TypeVar("T")

_SHUTDOWN_SECONDS = 10.0


class Executor(Protocol):
    """A group of ranks seen as one device. Plans are executed strictly in the order they are given."""

    async def start(self) -> ModelLimits:
        """Start ranks, load weights, measure and allocate KV. Raises ExecutorError with the cause."""

    async def restart(self) -> None:
        """End what is left of the ranks and start them anew, empty, with the limits that `start` returned.

        Plans that are in flight fail. Raises ExecutorError with the cause; it may be tried again.
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


def _nothing() -> None:
    """What there is to do for a worker that was never made."""


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank0")


class InProcessExecutor:
    """One rank in a thread of this process: for tests, and for use without Ray.

    `make_worker` runs on that thread, as everything else of the worker does.
    """

    def __init__(self, make_worker: Callable[[], RankWorker]) -> None:
        self._make_worker = make_worker
        self._thread = _one_thread()
        self._worker: RankWorker | None = None
        self._limits: ModelLimits | None = None
        self._failure: ExecutorError | None = None

    async def start(self) -> ModelLimits:
        """Raises ExecutorError with the cause."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, self._start)

    async def restart(self) -> None:
        """Raises ExecutorError with the cause. A thread cannot be killed: one that hangs is left behind."""
        with contextlib.suppress(ExecutorError):
            await self.shutdown()
        self._thread, self._failure = _one_thread(), None
        await self.start()

    def execute_step(self, plan: StepPlan, seconds: float) -> Awaitable[StepResult]:
        """The one thread executes plans in the order they come. After a failure every plan fails.

        A plan that waits for another's end has as much time again.
        """
        if self._worker is None:
            raise RuntimeError("it was given a plan before it had started")
        execute = partial(self._worker.execute_step, plan)
        result = asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, execute)
        return self._within(result, plan.step_id, 2 * seconds)

    async def _within(self, result: Awaitable[StepResult], step_id: int, seconds: float) -> StepResult:
        try:
            return await asyncio.wait_for(result, seconds)
        except TimeoutError:
            self._failure = ExecutorError(
                f"rank 0 gave no result of step {step_id} within {seconds:g} s", "worker_hung"
            )
            raise self._failure from None

    def check_health(self) -> None:
        """Raises ExecutorError if start-up or a step has failed."""
        if self._failure is not None:
            raise self._failure

    async def shutdown(self) -> None:
        """Waits, for some seconds, for the step that runs; plans that have not begun fail."""
        self._failure = self._failure or ExecutorError("rank 0 was shut down")
        worker, self._worker = self._worker, None
        stop = worker.shutdown if worker is not None else _nothing
        stopped = asyncio.get_running_loop().run_in_executor(self._thread, stop)
        self._thread.shutdown(wait=False)
        try:
            await asyncio.wait_for(stopped, _SHUTDOWN_SECONDS)
        except TimeoutError:
            raise ExecutorError(f"rank 0 did not stop within {_SHUTDOWN_SECONDS:g} s") from None

    # On the worker's thread

    def _guarded(self, work: Callable[[], T]) -> T:
        self.check_health()
        try:
            return work()
        except Exception as error:
            self._failure = ExecutorError(f"rank 0 failed: {type(error).__name__}: {error}")
            raise self._failure from error

    def _start(self) -> ModelLimits:
        worker = self._worker = self._make_worker()
        worker.load()
        limits = self._limits or worker.measure()
        worker.allocate(limits)
        if self._limits is None:
            self._limits = replace(limits, profile=tuple(worker.profile(limits)))
        return self._limits

"""The seam between the engine loop and whatever executes its plans, and its simplest side."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from cluster.errors import ExecutorError
from scheduler.plan import StepPlan, StepResult
from workers.config import ModelLimits, WorkerConfig

T = TypeVar("T")

_SHUTDOWN_SECONDS = 10.0


class Executor(Protocol):
    """A group of ranks seen as one device. Plans are executed strictly in the order they are given."""

    async def start(self) -> ModelLimits:
        """Start ranks, load weights, measure and allocate KV. Raises ExecutorError with the cause."""

    def execute_step(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Send at once, without waiting; the awaitable gives the result or raises ExecutorError."""

    def check_health(self) -> None:
        """Raises ExecutorError if a rank is known to be dead."""

    async def shutdown(self) -> None:
        """Stop every rank; returns within seconds, whatever state they are in."""


class RankWorker(Protocol):
    """What an executor asks of one rank; `workers.worker.Worker` is one."""

    def load(self) -> None: ...

    def measure(self) -> ModelLimits: ...

    def allocate(self, limits: ModelLimits) -> None: ...

    def execute_step(self, plan: StepPlan) -> StepResult: ...

    def shutdown(self) -> None: ...


def only_rank(config: WorkerConfig) -> RankWorker:
    """A group of one rank. Raises ValueError when the config asks for more."""
    if config.tensor_parallel_size != 1:
        raise ValueError(f"one process holds one rank; tensor_parallel_size is {config.tensor_parallel_size}")
    from workers.worker import Worker  # torch: seconds to import, and not needed where this is not called

    return Worker(config)


class InProcessExecutor:
    """One rank in a thread of this process: for tests, and for use without Ray.

    `make_worker` runs on that thread, as everything else of the worker does.
    """

    def __init__(self, make_worker: Callable[[], RankWorker]) -> None:
        self._make_worker = make_worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank0")
        self._worker: RankWorker | None = None
        self._failure: ExecutorError | None = None

    async def start(self) -> ModelLimits:
        """Raises ExecutorError with the cause."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, self._start)

    def execute_step(self, plan: StepPlan) -> Awaitable[StepResult]:
        """The one thread executes plans in the order they come. After a failure every plan fails."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, self._guarded, lambda: self._execute(plan))

    def check_health(self) -> None:
        """Raises ExecutorError if start-up or a step has failed."""
        if self._failure is not None:
            raise self._failure

    async def shutdown(self) -> None:
        """Waits, for some seconds, for the step that runs; plans that have not begun fail."""
        self._failure = self._failure or ExecutorError("rank 0 was shut down")
        stopped = asyncio.get_running_loop().run_in_executor(self._thread, self._stop)
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
        self._worker = self._make_worker()
        self._worker.load()
        limits = self._worker.measure()
        self._worker.allocate(limits)
        return limits

    def _execute(self, plan: StepPlan) -> StepResult:
        if self._worker is None:
            raise RuntimeError("it was given a plan before it had started")
        return self._worker.execute_step(plan)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

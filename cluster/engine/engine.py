"""The engine: one scheduler, one executor, and the loop between them.

Plain asyncio. It knows neither Ray nor sockets nor text: whatever executes or receives outputs is
injected. `Engine` lives on one event loop, and between two awaits of its loop nobody else touches the
scheduler: so adds and aborts, which are calls on that loop, always fall between steps.
`cluster.engine.thread` gives it a loop and a thread of its own.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.engine.executor import Executor
from cluster.engine.step_log import StepLog
from cluster.errors import EngineError
from cluster.links.messages import StepRecord
from cluster.metrics.engine import EngineMetrics
from scheduler.plan import RequestOutput, StepPlan, StepResult
from scheduler.request import Request, RequestRefused, RequestStatus
from scheduler.scheduler import Scheduler
from workers.config import ModelLimits

logger = logging.getLogger(__name__)

FINISH_STATUSES = {"stop": RequestStatus.FINISHED_STOPPED, "abort": RequestStatus.FINISHED_ABORTED}
"""How a request may be ended from outside, by the reason its last output carries."""

_RETRY_SECONDS = 0.01
"""Until the next try when open requests gave no plan: all were preempted, or wait for a grammar."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan in flight."""

    plan: StepPlan
    result: "asyncio.Future[StepResult]"
    sent_ahead: bool
    sent_at: float


class Engine:
    """Runs requests to their end. All methods belong to the loop that runs it."""

    def __init__(
        self,
        executor: Executor,
        make_scheduler: Callable[[ModelLimits], Scheduler],
        publish: Callable[[Sequence[RequestOutput]], None],
        overlap_depth: int,
        metrics: EngineMetrics | None = None,
        step_log_size: int = 4096,
        take_stage_seconds: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """`publish` gets all that one step means, at most one output a request; it must not wait.

        `take_stage_seconds`: where the engine's time has gone since it was last asked, for the step log.
        """
        self._executor = executor
        self._make_scheduler = make_scheduler
        self._publish = publish
        self._depth = overlap_depth
        self._metrics = metrics or EngineMetrics()
        self._scheduler: Scheduler | None = None
        self._log = StepLog(step_log_size)
        self._take_stage_seconds = take_stage_seconds
        self._in_flight: deque[_Step] = deque()
        self._open: set[str] = set()
        self._state: Literal["starting", "ready", "failed", "stopped"] = "starting"
        self._cause = "it has not started"
        self._wake = asyncio.Event()

    # Life

    async def start(self) -> ModelLimits:
        """Start the executor and build the scheduler from what it measured. Raises ExecutorError, ValueError."""
        limits = await self._executor.start()
        try:
            self._scheduler = self._make_scheduler(limits)
        except BaseException:
            await self._executor.shutdown()
            raise
        self._state = "ready"
        self._metrics.set_up(True)
        return limits

    async def run(self) -> None:
        """Step until `shutdown`, or until the executor is lost: then every open request ends as lost."""
        scheduler = self._ready_scheduler()
        try:
            while self._state == "ready":
                await self._step(scheduler)
        except EngineError as error:
            self._end("failed", str(error))
        except Exception as error:
            logger.exception("the engine's loop failed")
            self._end("failed", f"the engine's loop failed: {type(error).__name__}: {error}")

    async def shutdown(self) -> None:
        """End every open request as lost and stop the executor."""
        self._end("stopped", "the engine was shut down")
        await self._executor.shutdown()

    # The loop

    async def _step(self, scheduler: Scheduler) -> None:
        """Keep `overlap_depth` plans in flight; take the oldest result; say what it means."""
        while len(self._in_flight) < self._depth and (plan := scheduler.schedule()) is not None:
            self._send(plan)
        if not self._in_flight:
            await self._sleep(scheduler)
            return
        result = await self._in_flight[0].result
        step, received_at = self._in_flight.popleft(), time.perf_counter()
        if self._state != "ready":
            return
        outputs = scheduler.update_from_result(step.plan, result)
        self._emit(outputs)
        self._metrics.observe(step.plan, result, outputs, scheduler.stats(), step.sent_at, received_at)
        self._log.record(
            step.plan,
            result,
            outputs,
            sent_ahead=step.sent_ahead,
            sent_at=step.sent_at,
            received_at=received_at,
            stage_seconds=self._take_stage_seconds(),
        )

    def _send(self, plan: StepPlan) -> None:
        sent_ahead = bool(self._in_flight) and not self._in_flight[-1].result.done()
        sent_at = time.perf_counter()
        result = asyncio.ensure_future(self._executor.execute_step(plan))
        result.add_done_callback(_look_at)
        self._in_flight.append(_Step(plan, result, sent_ahead, sent_at))

    async def _sleep(self, scheduler: Scheduler) -> None:
        """Until somebody adds or ends a request; nothing is in flight."""
        self._metrics.update_stats(scheduler.stats())
        self._wake.clear()
        try:
            async with asyncio.timeout(_RETRY_SECONDS if scheduler.has_unfinished_requests() else None):
                await self._wake.wait()
        except TimeoutError:
            return

    def _emit(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._open.discard(output.request_id)
        if outputs:
            self._publish(outputs)

    # Requests

    def add_request(self, request: Request) -> None:
        """Raises RequestRefused when it can never be served, EngineError when the engine does not serve."""
        scheduler = self._ready_scheduler()
        try:
            scheduler.add_request(request)
        except RequestRefused as error:
            self._metrics.refuse(error.param or "request")
            raise
        self._open.add(request.request_id)
        self._metrics.add(request.request_id, len(request.prompt_token_ids), request.arrival_time)
        self._wake.set()

    def finish_request(self, request_id: str, reason: str) -> None:
        """End it now, for "stop" or "abort"; its last output says so. Nothing happens if it has ended already."""
        if request_id not in self._open:
            return
        self._ready_scheduler().finish_request(request_id, FINISH_STATUSES[reason])
        self._finish_between_steps([RequestOutput(request_id, [], finish_reason=reason)])
        self._wake.set()

    def _finish_between_steps(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._log.forget(output.request_id)
            self._metrics.finish(output.request_id, output.finish_reason or "lost")
        self._emit(outputs)

    def _end(self, state: Literal["failed", "stopped"], cause: str) -> None:
        """Serve no more; only the first cause counts."""
        if self._state in ("failed", "stopped"):
            return
        self._state, self._cause = state, cause
        if state == "failed":
            logger.error("the engine serves no more: %s", cause)
        self._finish_between_steps(
            [RequestOutput(request_id, [], finish_reason="lost", error=cause) for request_id in sorted(self._open)]
        )
        self._metrics.set_up(False)
        self._wake.set()

    # Looking in

    def check_health(self) -> None:
        """Raises EngineError with the cause when it does not serve, ExecutorError when a rank is dead."""
        self._ready_scheduler()
        self._executor.check_health()

    def step_log(self, n: int) -> list[StepRecord]:
        """The last n steps, oldest first."""
        return self._log.tail(n)

    def num_open_requests(self) -> int:
        return len(self._open)

    def _ready_scheduler(self) -> Scheduler:
        if self._scheduler is None or self._state != "ready":
            raise EngineError(f"the engine does not serve: {self._cause}")
        return self._scheduler


def _look_at(result: "asyncio.Future[StepResult]") -> None:
    """The loop takes the oldest failure only; asyncio need not complain about the others."""
    if not result.cancelled():
        result.exception()

"""The engine: one scheduler, one executor, and the loop between them.

Plain asyncio. It knows neither Ray nor sockets nor text: whatever executes or receives outputs is
injected. `Engine` lives on one event loop, and between two awaits of its loop nobody else touches the
scheduler: so adds and aborts, which are calls on that loop, always fall between steps.
A lost executor is brought back in place: requests stay open and are computed again.
`cluster.engine.thread` gives it a loop and a thread of its own.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.autoscaling.load import ReplicaLoad
from cluster.awake import awake_timeout
from cluster.engine.executor import Executor
from cluster.engine.isolation import Isolation
from cluster.engine.recovery import recover
from cluster.engine.settings import EngineDeadlines
from cluster.engine.step_log import StepLog
from cluster.engine.step_times import StepTimes
from cluster.errors import EngineError, ExecutorError
from cluster.links.messages import EngineStatus, StepRecord
from cluster.metrics.engine import EngineMetrics
from scheduler.first_token import queue_state
from scheduler.plan import RequestOutput, StepLoad, StepPlan, StepResult
from scheduler.request import Request, RequestRefused, RequestStatus
from scheduler.scheduler import Scheduler
from workers.config import ModelLimits

logger = logging.getLogger(__name__)

FINISH_STATUSES = {"stop": RequestStatus.FINISHED_STOPPED, "abort": RequestStatus.FINISHED_ABORTED}
"""How a request may be ended from outside, by the reason its last output carries."""

State = Literal["starting", "ready", "recovering", "overdue", "failed", "stopped"]
"""`overdue`: it still recovers, but not as it should; its requests are elsewhere and it takes none."""

_RETRY_SECONDS = 0.01
"""Until the next try when open requests gave no plan: all were preempted, or wait for a grammar."""
_IDLE_SECONDS = 0.5
"""Until the next look at the executor while there is nothing to do."""
_FUTILE_RECOVERIES = 12
"""So many without a single step between them, and it is not a request's fault."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan in flight."""

    plan: StepPlan
    load: StepLoad
    result: "asyncio.Future[StepResult]"
    sent_ahead: bool
    sent_at: float


class QueueTooLong(RequestRefused):
    """A request would wait too long for its first token. `retry_after`: seconds until it would not, most likely."""

    def __init__(self, waiting_seconds: float, max_seconds: float) -> None:
        super().__init__(
            f"the queue is too long: the first token is expected in {waiting_seconds:.1f} s, the limit is"
            f" {max_seconds:g} s"
        )
        self.retry_after = waiting_seconds - max_seconds


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
        deadlines: EngineDeadlines | None = None,
        max_queue_seconds: float | None = None,
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
        self._deadlines = deadlines or EngineDeadlines()
        self._max_queue_seconds = max_queue_seconds
        self._step_times: StepTimes
        self._isolation: Isolation
        self._recovery: asyncio.Task[float] | None = None
        self._recovery_seconds = self._deadlines.recovery
        self._hand_over_seconds = self._deadlines.hand_over
        self._usual_recovery_seconds = 0.0
        self._lost_at = 0.0
        self._futile_recoveries = 0
        self._progress_at = 0.0
        """By `time.monotonic()`: the last result, or the last time that there was nothing to do."""
        self._state: State = "starting"
        self._cause = "it has not started"
        self._wake = asyncio.Event()

    # Life

    async def start(self) -> ModelLimits:
        """Start the executor and build the scheduler from what it measured. Raises ExecutorError, ValueError."""
        began = time.monotonic()
        limits = await self._executor.start()
        start_seconds = self._usual_recovery_seconds = time.monotonic() - began
        self._recovery_seconds = max(self._recovery_seconds, 3 * start_seconds)
        self._hand_over_seconds = max(self._hand_over_seconds, 2 * start_seconds)
        try:
            scheduler = self._scheduler = self._make_scheduler(limits)
        except BaseException:
            await self._executor.shutdown()
            raise
        self._step_times = StepTimes(scheduler.config.max_num_batched_tokens, self._deadlines)
        self._step_times.seed(limits.profile)
        self._isolation = Isolation(scheduler)
        self._serve()
        return limits

    async def run(self) -> None:
        """Step until `shutdown`, or until the executor is lost for good: then every open request ends as lost."""
        scheduler = self._live_scheduler()
        try:
            while self._state == "ready":
                try:
                    await self._step(scheduler)
                except ExecutorError as loss:
                    await self._recover(scheduler, loss)
        except EngineError as error:
            self._end("failed", str(error))
        except Exception as error:
            logger.exception("the engine's loop failed")
            self._end("failed", f"the engine's loop failed: {type(error).__name__}: {error}")

    async def shutdown(self) -> None:
        """End every open request as lost and stop the executor."""
        self._end("stopped", "the engine was shut down")
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait((self._recovery,))
        await self._executor.shutdown()

    def _serve(self) -> None:
        self._state = "ready"
        self._progress_at = time.monotonic()
        self._metrics.set_up(True)

    async def _recover(self, scheduler: Scheduler, loss: ExecutorError) -> None:
        """Start over with new ranks. Open requests stay open and lose only what was computed; their tokens are here.

        When that takes too long they are given back: this engine's trouble is no reason for them to wait. It goes on
        to recover, for there may be no other engine.

        Raises ExecutorError when the ranks do not come back, or die again and again.
        """
        if self._state != "ready":
            return  # It was shut down.
        logger.error("the engine recovers: %s", loss)
        self._state, self._cause = "recovering", f"recovering: {loss}"
        self._metrics.set_up(False)
        self._metrics.recover(loss.kind)
        self._in_flight.clear()
        self._log.start_over()
        self._step_times.start_over()
        suspects = scheduler.positions_in_flight()
        scheduler.end_epoch()
        self._fail_poison(scheduler, self._isolation.crashed(suspects), loss)
        self._futile_recoveries += 1
        if self._futile_recoveries > _FUTILE_RECOVERIES:
            raise ExecutorError(f"the ranks were lost {self._futile_recoveries} times without a step between: {loss}")
        self._lost_at = time.monotonic()
        self._recovery = asyncio.ensure_future(recover(self._executor, loss, self._recovery_seconds))
        with contextlib.suppress(TimeoutError):
            async with awake_timeout(self._hand_over_seconds):
                await asyncio.wait((self._recovery,))
        if not self._recovery.done():
            self._hand_over(scheduler, loss)
            await asyncio.wait((self._recovery,))
        if self._has_ended():
            return
        self._usual_recovery_seconds = self._recovery.result()
        logger.info("the engine has recovered in %.2f s from: %s", self._usual_recovery_seconds, loss)
        self._recovery = None
        self._serve()

    def _hand_over(self, scheduler: Scheduler, loss: ExecutorError) -> None:
        """Give open requests back to their front ends, and take none until the ranks are back."""
        if self._state != "recovering":
            return  # It was shut down.
        self._state = "overdue"
        cause = f"the ranks are not back {self._hand_over_seconds:g} s after {loss}"
        logger.error("%d requests are handed over: %s", len(self._open), cause)
        outputs = [RequestOutput(name, [], finish_reason="lost", error=cause) for name in sorted(self._open)]
        for output in outputs:
            scheduler.finish_request(output.request_id, RequestStatus.FINISHED_ABORTED)
        self._isolation.observe(outputs)
        self._finish_between_steps(outputs)

    def _fail_poison(self, scheduler: Scheduler, convicted: Sequence[str], loss: ExecutorError) -> None:
        """End requests at which the ranks die each time: no other engine should be given them."""
        cause = "the ranks died each time this request was computed"
        for request_id in convicted:
            logger.error("request %s is failed: %s, the last time: %s", request_id, cause, loss)
            scheduler.finish_request(request_id, RequestStatus.FINISHED_ERROR)
        self._finish_between_steps([RequestOutput(name, [], finish_reason="error", error=cause) for name in convicted])

    # The loop

    async def _step(self, scheduler: Scheduler) -> None:
        """Keep `overlap_depth` plans in flight; take the oldest result; say what it means.

        Nothing is planned for ranks that are lost, or requests would be suspected of what nobody computed.
        """
        try:
            self._executor.check_health()
        except ExecutorError:
            if not self._in_flight:
                raise
        else:
            while len(self._in_flight) < self._depth and (plan := scheduler.schedule()) is not None:
                self._send(plan, scheduler.load_of(plan))
        if not self._in_flight:
            await self._sleep(scheduler)
            return
        result = await self._in_flight[0].result
        step, received_at = self._in_flight.popleft(), time.perf_counter()
        if self._state != "ready":
            return
        self._progress_at = time.monotonic()
        self._futile_recoveries = 0
        if (error_ratio := self._step_times.observe(step.load, result.execute_seconds)) is not None:
            self._metrics.observe_prediction(error_ratio)
        outputs = scheduler.update_from_result(step.plan, result)
        self._isolation.finished(step.plan.num_scheduled_tokens.keys())
        self._isolation.observe(outputs)
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

    def _send(self, plan: StepPlan, load: StepLoad) -> None:
        sent_ahead = bool(self._in_flight) and not self._in_flight[-1].result.done()
        sent_at = time.perf_counter()
        result = asyncio.ensure_future(self._executor.execute_step(plan, self._step_times.deadline(load)))
        result.add_done_callback(_look_at)
        self._in_flight.append(_Step(plan, load, result, sent_ahead, sent_at))

    async def _sleep(self, scheduler: Scheduler) -> None:
        """Until somebody adds or ends a request; nothing is in flight. Raises ExecutorError when a rank is lost."""
        self._metrics.update_stats(scheduler.stats())
        self._wake.clear()
        has_work = scheduler.has_unfinished_requests()
        if not has_work:
            self._progress_at = time.monotonic()
        try:
            async with asyncio.timeout(_RETRY_SECONDS if has_work else _IDLE_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            self._executor.check_health()

    def _emit(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._open.discard(output.request_id)
        if outputs:
            self._publish(outputs)

    # Requests

    def add_request(self, request: Request, delivered_at: tuple[float, float] | None = None) -> None:
        """`delivered_at`: when the first and the last token came that the request brings with it, if it brings any.

        Raises RequestRefused when it can never be served, EngineError when the engine does not serve.

        QueueTooLong, which is no judgment on the request, spares one that was served before and comes again.
        """
        scheduler = self._live_scheduler()
        if self._max_queue_seconds is not None and not request.was_resubmitted:
            self._check_queue(scheduler, self._max_queue_seconds)
        try:
            scheduler.add_request(request)
        except RequestRefused as error:
            self._metrics.refuse(error.param or "request")
            raise
        if not self._open:
            self._progress_at = time.monotonic()  # What came before was no work, perhaps not even a running process.
        self._open.add(request.request_id)
        self._isolation.added()
        self._metrics.add(
            request.request_id,
            request.num_prompt_tokens,
            request.arrival_time,
            len(request.output_token_ids),
            delivered_at,
            resubmitted=request.was_resubmitted,
        )
        self._wake.set()

    def _check_queue(self, scheduler: Scheduler, max_seconds: float) -> None:
        seconds = self._step_times.first_token_seconds(queue_state(scheduler), self._recovery_left())
        if seconds > max_seconds:
            self._metrics.refuse("queue")
            raise QueueTooLong(seconds, max_seconds)

    def _recovery_left(self) -> float:
        """Seconds until the ranks are back, if they take as long as the last time, or as the first start."""
        if self._recovery is None:
            return 0.0
        return max(0.0, self._usual_recovery_seconds - (time.monotonic() - self._lost_at))

    def finish_request(self, request_id: str, reason: str) -> None:
        """End it now, for "stop" or "abort"; its last output says so. Nothing happens if it has ended already."""
        if request_id not in self._open:
            return
        self._live_scheduler().finish_request(request_id, FINISH_STATUSES[reason])
        outputs = [RequestOutput(request_id, [], finish_reason=reason)]
        self._isolation.observe(outputs)
        self._finish_between_steps(outputs)
        self._wake.set()

    def _finish_between_steps(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._log.forget(output.request_id)
            self._metrics.finish(output.request_id, output.finish_reason or "lost")
        self._emit(outputs)

    def _end(self, state: Literal["failed", "stopped"], cause: str) -> None:
        """Serve no more; only the first cause counts."""
        if self._has_ended():
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

    def status(self) -> EngineStatus:
        """Liveness is progress: an engine with work that does not step is not alive, an idle one is."""
        if self._is_stalled():
            return EngineStatus(False, False, f"no step has ended for {self._deadlines.stall:g} s, and requests wait")
        ready = self._state == "ready"
        return EngineStatus(ready, not self._has_ended(), "ready" if ready else self._cause)

    def check_health(self) -> None:
        """Raises EngineError with the cause when it must be replaced."""
        status = self.status()
        if not status.live:
            raise EngineError(f"the engine does not serve: {status.phase}")

    def _has_ended(self) -> bool:
        return self._state in ("failed", "stopped")

    def _is_stalled(self) -> bool:
        """Steps in flight have a deadline of their own, whose end is a recovery."""
        waited = time.monotonic() - self._progress_at
        return self._state == "ready" and not self._in_flight and waited > self._deadlines.stall and bool(self._open)

    def step_log(self, n: int) -> list[StepRecord]:
        """The last n steps, oldest first."""
        return self._log.tail(n)

    def load(self) -> ReplicaLoad:
        """How much it has to do; shares of time are since the last question. Raises EngineError when it has ended."""
        scheduler = self._live_scheduler()
        stats = scheduler.stats()
        return ReplicaLoad(
            queue_seconds=self._step_times.first_token_seconds(queue_state(scheduler), recovery_seconds=0.0),
            prefill_share=self._step_times.prefill_share(time.monotonic()),
            kv_usage=stats.num_used_blocks / stats.num_blocks,
        )

    def prefill_rate(self, num_decodes: int, decode_context: int) -> float:
        """Tokens a second of a prompt beside so many decodes, which attend to `decode_context` tokens in all.

        0 while the engine does not serve.
        """
        return self._step_times.prefill_rate(num_decodes, decode_context) if self._state == "ready" else 0.0

    def num_open_requests(self) -> int:
        return len(self._open)

    def _live_scheduler(self) -> Scheduler:
        """Raises EngineError when it does not serve and will not; while it recovers, requests wait."""
        if self._scheduler is None or self._state not in ("ready", "recovering"):
            raise EngineError(f"the engine does not serve: {self._cause}")
        return self._scheduler


def _look_at(result: "asyncio.Future[StepResult]") -> None:
    """The loop takes the oldest failure only; asyncio need not complain about the others."""
    if not result.cancelled():
        result.exception()

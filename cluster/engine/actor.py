"""The central actor: one engine, its scheduler and its ranks, as a Serve replica or as a plain Ray actor.

The class knows nothing of Serve: whoever deploys it wraps it. Its constructor returns once the model
is loaded, so Serve routes only to replicas that can serve. Steps run on a thread of their own.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, astuple
from typing import TypeVar

import ray

from cluster.awake import awake_timeout
from cluster.engine.engine import Engine, QueueTooLong
from cluster.engine.profile import profile_engine
from cluster.engine.ray_executor import RayExecutor
from cluster.engine.reporter import Reporter
from cluster.engine.settings import EngineSettings
from cluster.engine.thread import EngineThread
from cluster.errors import EngineError
from cluster.links.engine_views import engine_name
from cluster.links.messages import READY, EngineStatus, GenerateRequest, GenerateSummary, StepRecord
from cluster.links.token_sender import TokenSender
from cluster.metrics.engine import EngineMetrics
from cluster.metrics.pusher import MetricsPusher
from scheduler.request import Request, RequestRefused
from scheduler.scheduler import Scheduler
from workers.config import ModelLimits
from workers.logs import log_to_stderr
from workers.stage_clock import StageClock

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_SECONDS = 10.0


def _log_failure(reporting: "asyncio.Task[None]") -> None:
    if not reporting.cancelled() and (error := reporting.exception()) is not None:
        logger.error("front ends get no reports any more, and choose engines without them", exc_info=error)


class EngineReplica:
    """One engine. Methods are coroutines, so that they run on the replica's loop and wait for nobody's thread."""

    def __init__(self, settings: EngineSettings) -> None:
        """Blocks while the ranks load. Raises ExecutorError naming the rank and the phase that failed."""
        log_to_stderr()
        self._settings = settings
        self._engine_id = engine_name(ray.get_runtime_context().get_actor_id())
        self._metrics = EngineMetrics()
        self._clock = StageClock() if settings.worker.profile_steps else None
        self._pusher = self._start_pusher()
        self._executor = RayExecutor(settings, self._show_phase)
        self._thread = EngineThread(self._make_engine)
        self._limits = self._thread.start(sum(astuple(settings.deadlines)))
        self._metrics.set_cache_config(
            self._limits.block_size, self._limits.num_blocks, settings.scheduler.enable_prefix_caching
        )
        # What start-up made lives as long as the process: no collection need look at it again.
        gc.collect()
        gc.freeze()
        logger.info("engine %s serves: %s", self._engine_id, self._limits)

    def _start_pusher(self) -> MetricsPusher | None:
        settings = self._settings
        if not settings.app_name:
            return None
        pusher = MetricsPusher(
            settings.app_name, self._engine_id, "engine", settings.model_name, self._metrics.snapshot
        )
        pusher.start()
        return pusher

    def _show_phase(self, name: str, seconds: float | None) -> None:
        if self._pusher is None:
            return
        if seconds is None:
            self._pusher.begin_phase(name)
        else:
            self._pusher.end_phase(name, seconds)

    # What front ends call

    async def generate(self, request: GenerateRequest) -> GenerateSummary:
        """Returns when the request has ended; its tokens travel on the token link to `request.reply_to`.

        Cancelled, it aborts the request. Raises EngineError when the engine does not serve.
        """
        answer: Future[GenerateSummary] = Future()
        answer.set_running_or_notify_cancel()  # It cannot be cancelled, so the engine may always answer.
        self._thread.post(self._begin, request, answer)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._thread.post(self._engine.finish_request, request.request_id, "abort")
            raise

    async def limits(self) -> ModelLimits:
        """What start-up measured."""
        return self._limits

    async def step_log(self, n: int) -> list[StepRecord]:
        """The last n steps, oldest first, as of now."""
        return await self._ask(lambda: self._engine.step_log(n))

    async def status(self) -> EngineStatus:
        """What front ends tell of it in /health; never raises."""
        try:
            return await self._ask(self._engine.status)
        except EngineError as error:
            return EngineStatus(False, False, str(error))

    async def check_health(self) -> None:
        """Raises EngineError when the engine does not live; Serve then replaces the replica."""
        await self._ask(self._engine.check_health)

    async def record_routing_stats(self) -> dict[str, bool]:
        """What Serve's routers look at; never raises."""
        return {READY: (await self.status()).ready}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve asks for autoscaling, by the names of ReplicaLoad; nothing when the engine does not serve."""
        try:
            return asdict(await self._ask(self._engine.load))
        except EngineError as error:
            logger.warning("no load is told: %s", error)
            return {}

    async def process_ids(self) -> list[int]:
        """Of the engine itself, then of its ranks in order."""
        return [os.getpid(), *self._executor.process_ids()]

    async def shutdown(self) -> None:
        """End open requests with an error and stop the ranks. A plain actor's owner calls it before it kills it."""
        await asyncio.to_thread(self._stop)

    def __del__(self) -> None:
        """Serve calls this at the end of a graceful shutdown, after it has waited for the calls that ran."""
        if hasattr(self, "_thread"):
            self._stop()

    def _stop(self) -> None:
        self._thread.stop(2 * self._settings.deadlines.shutdown)
        if self._pusher is not None:
            self._pusher.stop()

    async def _ask(self, question: Callable[[], T]) -> T:
        """Let the engine's thread answer, between steps. Raises EngineError when it does not in time."""
        try:
            async with awake_timeout(_ANSWER_SECONDS):
                return await asyncio.wrap_future(self._thread.call(question))
        except TimeoutError:
            raise EngineError(f"the engine's thread did not answer within {_ANSWER_SECONDS:g} s") from None

    # On the engine's thread

    def _make_engine(self) -> Engine:
        settings = self._settings
        engine = Engine(
            self._executor,
            self._make_scheduler,
            lambda outputs: self._sender.publish(outputs),
            settings.scheduler.overlap_depth,
            self._metrics,
            settings.step_log_size,
            dict if self._clock is None else self._clock.take,
            settings.deadlines,
            settings.max_queue_seconds,
        )
        self._sender = TokenSender(self._engine_id, engine.finish_request, settings.deadlines.orphan)
        self._sender.start()
        self._engine = engine
        return engine

    def _make_scheduler(self, limits: ModelLimits) -> Scheduler:
        scheduler = Scheduler(self._settings.scheduler_config(limits), limits.num_blocks)
        if self._clock is not None:
            profile_engine(scheduler, self._executor, self._sender, self._metrics, self._clock)
        self._reporting = asyncio.ensure_future(Reporter(scheduler, self._engine.prefill_rate, self._sender).run())
        self._reporting.add_done_callback(_log_failure)
        return scheduler

    def _begin(self, request: GenerateRequest, answer: "Future[GenerateSummary]") -> None:
        self._sender.open(request.request_id, request.reply_to, answer.set_result)
        try:
            self._engine.add_request(
                Request(
                    request.request_id,
                    request.prompt_token_ids,
                    request.sampling_params,
                    arrival_time=request.arrival_time,
                    priority=request.priority,
                    lora_id=request.lora_id,
                    cache_salt=request.cache_salt,
                    output_token_ids=request.output_token_ids,
                    resubmitted=request.resubmitted,
                ),
                request.delivered_at,
            )
        except QueueTooLong as error:
            self._sender.refuse(request.request_id, str(error), error.param, error.retry_after)
        except RequestRefused as error:
            self._sender.refuse(request.request_id, str(error), error.param)
        except Exception as error:
            self._sender.drop(request.request_id)
            answer.set_exception(error)
        else:
            self._sender.admit(request.request_id)

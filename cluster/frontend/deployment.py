"""The front end: a Serve deployment that speaks HTTP, tokenises, and knows no tensor."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.awake import awake_timeout
from cluster.errors import EngineError
from cluster.frontend.absence import Absence
from cluster.frontend.api import ApiServer, build_app
from cluster.frontend.batches import add_batches
from cluster.frontend.debug import debug_router
from cluster.frontend.generation_defaults import GenerationDefaults
from cluster.frontend.health import Health
from cluster.frontend.open_generations import DrainReport
from cluster.frontend.settings import FrontendSettings
from cluster.frontend.tokenizer import Tokenizer
from cluster.links.engine_statuses import ask_statuses
from cluster.links.engine_views import process_views
from cluster.links.messages import StepRecord
from cluster.links.serve_engine_client import ServeEngineClient
from cluster.links.serve_request_stream import ClientDeadlines
from cluster.links.token_receiver import TokenReceiver
from cluster.metrics.actor import create_metrics_actor
from cluster.metrics.frontend import FrontendMetrics
from cluster.metrics.pusher import MetricsPusher
from cluster.metrics.render import CONTENT_TYPE
from cluster.metrics.totals import SourceStatus
from workers.logs import log_to_stderr

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 2.0
"""An engine answers between two steps, so at once."""
_ANSWER_SECONDS = 5.0
"""What an engine or the metrics actor may take to answer a question about itself."""


@serve.ingress()
class Frontend:
    """One front-end replica. Serve's router spreads its requests over the engines behind `engine_handle`."""

    def __init__(self, settings: FrontendSettings, engine_handle: Any) -> None:
        """Raises ModelError when the tokenizer or the model's configuration cannot be read."""
        log_to_stderr()
        self._settings = settings
        self._engine = engine_handle
        self._frontend_metrics = FrontendMetrics()
        self._pusher = MetricsPusher(
            settings.app_name,
            f"frontend-{uuid.uuid4().hex[:8]}",
            "frontend",
            settings.model_name,
            self._frontend_metrics.snapshot,
        )
        self._pusher.start()
        self._tokenizer = Tokenizer.load(settings.model_path)
        self._defaults = GenerationDefaults.load(settings.model_path)
        self._receiver = TokenReceiver(views=process_views() if settings.uses_views else None)
        process_views().on_route = self._frontend_metrics.observe_route
        self._absence = Absence(self._read_engine_status, _STATUS_SECONDS)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor, on the loop that then serves. Raises LinkError."""
        await self._receiver.start(ray.util.get_node_ip_address())
        app = build_app(
            self._settings,
            self._tokenizer,
            self._defaults,
            ServeEngineClient(self._engine, self._receiver, self._client_deadlines()),
            self._render_metrics,
            self._check_health,
            self._frontend_metrics,
            echo_request_id=False,  # Serve does
        )
        app.include_router(debug_router(self._last_steps))
        self._batches = add_batches(app, self._settings)
        self._server: ApiServer = app.state.server
        return app

    async def drain(self, seconds: float) -> DrainReport:
        """Refuse what is new, and return when all that is open has ended, after `seconds` by force.

        A batch goes on in another front end or after the next start: nobody waits for its requests.
        """
        if self._batches is not None:
            self._batches.cancel()
        return await self._server.open_generations.drain(seconds)

    async def __del__(self) -> None:
        """Serve calls this at the end of a graceful shutdown."""
        if hasattr(self, "_batches") and self._batches is not None:
            self._batches.cancel()
        if hasattr(self, "_receiver"):
            await self._receiver.close()
        if hasattr(self, "_pusher"):
            await asyncio.to_thread(self._pusher.stop)

    async def _render_metrics(self) -> tuple[bytes, str]:
        return await self._ask(lambda: self._call_metrics_actor("render")), CONTENT_TYPE

    async def _last_steps(self, n: int) -> Sequence[StepRecord]:
        records: Sequence[StepRecord] = await self._ask(lambda: self._engine.step_log.remote(n))
        return records

    async def _check_health(self) -> Health:
        try:
            statuses = await ask_statuses(self._engine, _STATUS_SECONDS)
        except EngineError as error:
            logger.info("not healthy: %s", error)
            statuses = []
        if any(status.ready for status in statuses):
            return Health(True, True, "ready")
        if not statuses and self._settings.wake_seconds and (phase := await self._absence.phase()) is not None:
            return Health(True, True, phase)
        live = not statuses or any(status.live for status in statuses)
        # Behind the colon is the cause, for the log alone.
        phases = dict.fromkeys(status.phase.partition(":")[0] for status in statuses)
        return Health(False, live, ", ".join(phases) or await self._phase())

    def _read_engine_status(self) -> tuple[str, Mapping[str, int]]:
        status = serve.status().applications[self._engine.app_name].deployments[self._engine.deployment_name]
        return status.status.value, status.replica_states

    def _client_deadlines(self) -> ClientDeadlines:
        usual, wake_seconds = ClientDeadlines(), self._settings.wake_seconds
        return usual if wake_seconds is None else usual.with_waking(wake_seconds)

    async def _phase(self) -> str:
        try:
            statuses: list[SourceStatus] = await self._ask(lambda: self._call_metrics_actor("status"))
        except EngineError:
            return "no engine answers"
        phases = [status.phase for status in statuses if status.role == "engine" and status.phase is not None]
        return ", ".join(dict.fromkeys(phases)) or "no engine answers"

    async def _call_metrics_actor(self, method: str) -> Any:
        # Finding an actor blocks while Ray's control plane is slow: not the loop that writes streams.
        actor = await asyncio.to_thread(create_metrics_actor, self._settings.app_name)
        return await getattr(actor, method).remote()

    async def _ask(self, question: Callable[[], Awaitable[Any]]) -> Any:
        """What an engine or the metrics actor answers. Raises EngineError when it does not."""
        try:
            async with awake_timeout(_ANSWER_SECONDS):
                return await question()
        except (RayError, RayServeException) as error:
            raise EngineError(f"no answer: {type(error).__name__}") from error
        except TimeoutError:
            raise EngineError(f"no answer within {_ANSWER_SECONDS:g} s") from None

"""The application on a connected Ray: deployed, watched while it loads, asked what it runs on, drained."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.engine.settings import EngineSettings
from cluster.errors import EngineError
from cluster.frontend.open_generations import DrainReport
from cluster.frontend.settings import FrontendSettings
from cluster.launch.app import ENGINE, FRONTEND, build_app
from cluster.launch.cluster_nodes import possible_nodes
from cluster.launch.deploy_failure import cause_of
from cluster.launch.placement import demand_of, placement_problems
from cluster.launch.signals import StopSignals
from cluster.metrics.actor import create_metrics_actor
from cluster.settings.tree import APP_NAME, Settings
from workers.config import ModelLimits

Say = Callable[[str], None]

_POLL_SECONDS = 0.25
_ASK_SECONDS = 10.0
_TELL_SECONDS = 20.0
_PLACE_SECONDS = 600.0
"""A cluster may have to start a node first."""
_HEALTH_SECONDS = 60.0
"""From the application's being deployed to the first good /health through the proxy."""


class Service:
    """One application, from its deployment to its end. Every wait has a deadline or ends with the application."""

    def __init__(self, settings: Settings, engine: EngineSettings, frontend: FrontendSettings, say: Say) -> None:
        self._settings = settings
        self._engine = engine
        self._frontend = frontend
        self._say = say
        self._failure: str | None = None
        self._metrics: Any = None
        self._bundles = engine.placement_bundles()
        self._shown: dict[str, set[str]] = {}
        self._engine_seen = False
        self._told = False

    @property
    def base_url(self) -> str:
        """Where clients find the service. An address for every interface is shown as this machine's."""
        host = self._settings.server.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self._settings.server.port}"

    def deploy(self) -> None:
        """Start the proxy and hand the application to Serve, which builds front ends and engines at once.

        Raises EngineError with the cause if the cluster cannot hold it or Serve does not start.
        """
        demand = demand_of(self._settings, self._engine)
        if problems := placement_problems(demand, possible_nodes(demand)):
            raise EngineError(f"the application cannot be placed: {'; '.join(problems)}")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what it tells, `say` tells
        server = self._settings.server
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": server.host, "port": server.port})
        except RayError as error:
            raise EngineError(f"Ray Serve does not start: {cause_of(str(error))}") from error
        self._metrics = create_metrics_actor(APP_NAME)
        app = build_app(self._settings, self._engine, self._frontend)
        self._deploying = threading.Thread(target=self._run, args=(app,), name="deploy", daemon=True)
        self._deploying.start()

    def _run(self, app: Any) -> None:
        try:
            serve.run(app, name=APP_NAME, route_prefix="/")
        except Exception as error:  # of whatever kind: the waiting thread reports it
            self._failure = repr(error)
            self._failure += f"\n{_messages_of_deployments()}"

    def wait_ready(self, stop: StopSignals, check_ray: Callable[[], None]) -> bool:
        """Show phases until /health is good; False when a stop was asked for. Raises EngineError with the cause."""
        started = time.monotonic()
        while self._deploying.is_alive():
            if stop.wait(_POLL_SECONDS):
                return False
            check_ray()
            self.show_phases()
            self._check_placed(time.monotonic() - started)
        if self._failure is not None:
            raise EngineError(cause_of(self._failure))
        self.show_phases()
        deadline = time.monotonic() + _HEALTH_SECONDS
        while (answer := self._ask_health()) != "200":
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.base_url}/health was not good within {_HEALTH_SECONDS:.0f} s of loading; last: {answer}"
                )
            if stop.wait(_POLL_SECONDS):
                return False
        return True

    def _check_placed(self, waited: float) -> None:
        """An engine shows its phases from its first second on: one that shows none has no place in the cluster."""
        if self._engine_seen or waited < _TELL_SECONDS:
            return
        asks = f"an engine asks for the bundles {self._bundles}; free are {ray.available_resources()}"
        if waited > _PLACE_SECONDS:
            raise EngineError(f"Ray has placed no engine within {_PLACE_SECONDS:.0f} s: {asks}")
        if not self._told:
            self._told = True
            self._say(f"Ray has placed no engine yet: {asks}")

    def _ask_health(self) -> str:
        """ "200", or what was answered instead."""
        try:
            response = httpx.get(f"{self.base_url}/health", timeout=_ASK_SECONDS, trust_env=False)
        except httpx.HTTPError as error:
            return repr(error)
        return "200" if response.status_code == 200 else f"{response.status_code} {response.text[:200]}"

    def show_phases(self) -> None:
        """Say each phase that is new: once when it begins, and once with its time when it has ended."""
        try:
            statuses = ray.get(self._metrics.status.remote(), timeout=_ASK_SECONDS)
        except RayError:
            return  # it is started again by Ray; phases are only shown
        for status in statuses:
            self._engine_seen |= status.role == "engine"
            shown = self._shown.setdefault(status.source_id, set())
            who = f"engine {status.engine}" if status.role == "engine" else status.role
            for phase, seconds in status.finished_phases.items():
                if f"{phase} done" not in shown:
                    shown.add(f"{phase} done")
                    self._say(f"{who}: {phase} took {seconds:.1f} s")
            if status.phase is not None and status.phase not in shown:
                shown.add(status.phase)
                self._say(f"{who}: {status.phase} ...")

    def describe(self) -> list[str]:
        """What was measured and chosen, one fact a line. Raises EngineError if no engine answers."""
        handle = serve.get_deployment_handle(ENGINE, APP_NAME)
        try:
            limits: ModelLimits = handle.limits.remote().result(timeout_s=_ASK_SECONDS)
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineError(f"no engine told its limits: {error!r}") from error
        return [
            f"KV cache: {limits.num_blocks} blocks of {limits.block_size} tokens",
            f"max_model_len: {limits.max_model_len}",
            f"dtype: {limits.dtype}",
            f"attention: {limits.attention_backend}",
            f"proxy: {proxy_in_use()}",
        ]

    def drain(self, seconds: float, check_ray: Callable[[], None]) -> str:
        """Every front end refuses what is new and ends what is open, after `seconds` by force; how that went.

        A signal to the whole process group ends Ray too: then there is nothing left to drain.
        """
        outcome: list[str] = []
        draining = threading.Thread(target=lambda: outcome.append(self._drain(seconds)), name="drain", daemon=True)
        draining.start()
        deadline = time.monotonic() + seconds + 2 * _ASK_SECONDS
        while draining.is_alive():
            try:
                check_ray()
            except EngineError as error:
                return f"not drained: {error}"
            if time.monotonic() > deadline:
                return "not drained: front ends do not answer"
            draining.join(_POLL_SECONDS)
        return outcome[0] if outcome else "not drained"

    def _drain(self, seconds: float) -> str:
        handle = serve.get_deployment_handle(FRONTEND, APP_NAME)
        try:
            reports: list[DrainReport] = handle.broadcast("drain", seconds).results(timeout_s=seconds + _ASK_SECONDS)
        except (RayError, RayServeException, TimeoutError) as error:
            return f"not every front end has drained: {error!r}"
        ended, forced, unwritten = (
            sum(counts) for counts in zip(*(dataclasses.astuple(report) for report in reports), strict=True)
        )
        said = f"drained: {ended} open requests ended by themselves, {forced} with an error after {seconds:g} s"
        return said + (f", {unwritten} of them unread" if unwritten else "")


def _messages_of_deployments() -> str:
    """What Serve tells of each deployment; in a failed one's message is the traceback of its constructor."""
    application = serve.status().applications.get(APP_NAME)
    if application is None:
        return ""
    return "\n".join(deployment.message for deployment in application.deployments.values())


def proxy_in_use() -> str:
    """Whose HTTP proxy serves: a cluster that was started without HAProxy has Serve's own."""
    from ray.serve.context import _get_global_client

    proxies = ray.get(_get_global_client()._controller.get_proxies.remote(), timeout=_ASK_SECONDS)
    return "HAProxy" if any("HAProxy" in repr(proxy) for proxy in proxies.values()) else "Serve's Python proxy (slower)"

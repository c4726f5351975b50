"""The Serve application: engines with their ranks, and front ends before them."""

import hashlib
from importlib.metadata import version
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cluster.autoscaling.serve_policy import autoscaling_config
from cluster.engine.actor import EngineReplica
from cluster.engine.settings import EngineSettings
from cluster.frontend.deployment import Frontend
from cluster.frontend.settings import FrontendSettings
from cluster.launch.placement import FRONTEND_CPUS
from cluster.links.predicted_router import PredictedRouter
from cluster.links.ready_router import ROUTING_SECONDS, ReadyRouter
from cluster.settings.tree import RouterName, Settings, autoscaling_options

FRONTEND = "frontend"
ENGINE = "engine"
ROUTERS: dict[RouterName, type] = {"predicted": PredictedRouter, "power_of_two": ReadyRouter}
"""By `parallel.router`."""

MAX_ONGOING_REQUESTS = 4096
"""Above what engines admit, so that queueing, priorities and refusals are the scheduler's and not Serve's."""
STOP_SECONDS = 15.0
"""What a front end may take to stop beyond the time its requests get."""
HAND_OVER_SECONDS = 5.0
"""What an engine's requests get when it is to stop; then they go on at another one. It takes no new ones meanwhile, and
when it is the only one, those wait until its successor has started.
"""


def build_app(settings: Settings, engine: EngineSettings, frontend: FrontendSettings) -> Any:
    """The application to deploy.

    Deployed over one that runs, it replaces what was built from other settings, and nothing else: front ends, and the
    connections through them, outlive a change of the engine.
    """
    engines = _versioned(
        EngineReplica,
        engine,
        name=ENGINE,
        ray_actor_options={"num_cpus": engine.engine_cpus},
        placement_group_bundles=engine.placement_bundles(),
        placement_group_strategy=engine.strategy,
        graceful_shutdown_timeout_s=HAND_OVER_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTERS[settings.parallel.router], request_routing_stats_period_s=ROUTING_SECONDS
        ),
        **_common(),
        **_num_replicas(settings),
    ).bind(engine)
    return _versioned(
        Frontend,
        frontend,
        name=FRONTEND,
        ray_actor_options={"num_cpus": FRONTEND_CPUS},
        num_replicas=settings.server.num_frontends,
        graceful_shutdown_timeout_s=settings.server.drain_seconds + STOP_SECONDS,
        **_common(),
    ).bind(frontend, engines)


def _versioned(replica: type, settings: object, **options: Any) -> Any:
    """A deployment whose replicas stay when it is deployed again with equal settings: Serve would replace them all."""
    built_from = hashlib.sha256(f"{version('chunkserve')} {settings!r}".encode()).hexdigest()
    return serve.deployment(replica, **options).options(version=built_from, _internal=True)


def _common() -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        # A crash is noticed at a check, so the period is how long a dead replica keeps its place.
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 5.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        # What fails when it is built fails again: show the cause instead of trying thrice.
        "max_constructor_retry_count": 1,
        "logging_config": LoggingConfig(enable_access_log=False),
    }


def _num_replicas(settings: Settings) -> dict[str, Any]:
    options = autoscaling_options(settings)
    if options is None:
        return {"num_replicas": settings.parallel.num_replicas}
    return {"autoscaling_config": autoscaling_config(options)}

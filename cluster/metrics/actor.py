"""The one small actor per application that everybody pushes metrics to, and any front end reads."""

import threading
import time
from functools import cache
from typing import Any

import ray

from cluster.metrics.render import render
from cluster.metrics.snapshot import MetricsSnapshot, MetricsSource
from cluster.metrics.totals import ServiceTotals, SourceStatus

NAMESPACE = "chunkserve"
ORPHAN_SECONDS = 600.0
"""An actor to which nobody has pushed for this long belongs to an application that is gone."""


class MetricsActor:
    """Totals of one application. It is detached, so it outlives every engine and front end.

    It ends by `remove_metrics_actor`, with its Ray cluster, or by itself once nobody has pushed for
    `orphan_seconds`. Handles of it are ordinary Ray actor handles: `await handle.render.remote()`.
    """

    def __init__(self, app_name: str, orphan_seconds: float = ORPHAN_SECONDS) -> None:
        self._app_name = app_name
        self._totals = ServiceTotals()
        self._last_push_at = time.monotonic()
        threading.Thread(target=self._end_as_orphan, args=(orphan_seconds,), daemon=True).start()

    def push(self, source: MetricsSource, snapshot: MetricsSnapshot) -> None:
        """Called each second by every engine and front end, idle or not."""
        self._last_push_at = time.monotonic()
        self._totals.push(source, snapshot, self._last_push_at)

    def leave(self, source_id: str) -> None:
        """A source stops on purpose."""
        self._totals.leave(source_id, time.monotonic())

    def render(self) -> bytes:
        """Everything, as Prometheus text (content type `cluster.metrics.render.CONTENT_TYPE`)."""
        return render(self._totals.samples(time.monotonic()))

    def status(self) -> list[SourceStatus]:
        """Living sources, engines first, each with its start-up phase."""
        return self._totals.status(time.monotonic())

    def _end_as_orphan(self, orphan_seconds: float) -> None:
        while (left := self._last_push_at + orphan_seconds - time.monotonic()) > 0:
            time.sleep(left)
        ray.kill(get_metrics_actor(self._app_name), no_restart=True)


def _actor_name(app_name: str) -> str:
    return f"chunkserve-metrics:{app_name}"


@cache
def _remote_class() -> Any:
    """Made once, because Ray exports each one anew."""
    return ray.remote(MetricsActor)


def create_metrics_actor(app_name: str, orphan_seconds: float = ORPHAN_SECONDS) -> Any:
    """The application's actor, created if there is none yet. Needs Ray to be initialised; takes no core."""
    return (
        _remote_class()
        .options(
            name=_actor_name(app_name),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
        )
        .remote(app_name, orphan_seconds)
    )


def get_metrics_actor(app_name: str) -> Any:
    """A handle of the application's actor. Raises ValueError, from Ray, if there is none."""
    return ray.get_actor(_actor_name(app_name), namespace=NAMESPACE)


def remove_metrics_actor(app_name: str) -> None:
    """End the application's actor, if there is one."""
    try:
        ray.kill(get_metrics_actor(app_name), no_restart=True)
    except ValueError:
        return

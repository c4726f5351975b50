"""The thread that tells the metrics actor, once a second, what its process measures.

An engine replica, before it loads:

    metrics = EngineMetrics()
    pusher = MetricsPusher(app_name, replica_id, "engine", model_name, metrics.snapshot)
    pusher.start()
    pusher.begin_phase("load")
    ...
    pusher.end_phase("load", seconds)
    metrics.set_cache_config(limits.block_size, limits.num_blocks, enable_prefix_caching)
    metrics.set_up(True)  # then the loop feeds `metrics`; `pusher.stop()` at shutdown

A front end does the same with `FrontendMetrics` and the role "frontend". `GET /metrics` answers with
`await get_metrics_actor(app_name).render.remote()` as `CONTENT_TYPE`; `/health` reads `status`.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.metrics.actor import create_metrics_actor
from cluster.metrics.snapshot import MetricsSnapshot, MetricsSource, SourceRole

logger = logging.getLogger(__name__)

PUSH_SECONDS = 1.0
_CALL_SECONDS = 5.0


class MetricsPusher:
    """Pushes for one source. `start` it before the process loads anything: it is also the sign of life.

    It pushes whether or not there is traffic, so gauges return to zero without any. A push that fails
    is logged and made good by the next one, because snapshots are totals.
    """

    def __init__(
        self,
        app_name: str,
        source_id: str,
        role: SourceRole,
        model_name: str,
        snapshot: Callable[[], MetricsSnapshot],
    ) -> None:
        """`snapshot` is called on the pusher's thread; start-up phases are put to what it returns."""
        self._app_name = app_name
        self._source = MetricsSource(source_id, time.time_ns(), role, model_name)
        self._snapshot = snapshot
        self._phase: str | None = None
        self._finished_phases: dict[str, float] = {}
        self._actor: Any = None
        self._failing = False
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="metrics-pusher", daemon=True)

    def start(self) -> None:
        """Begin to push. Needs Ray to be initialised; creates the application's actor if there is none."""
        self._thread.start()

    def begin_phase(self, name: str) -> None:
        """The source is in phase `name` from now on. Returns at once, as `end_phase` does."""
        self._phase = name
        self._wake.set()

    def end_phase(self, name: str, seconds: float) -> None:
        """Phase `name` took `seconds`."""
        self._finished_phases = self._finished_phases | {name: seconds}
        if self._phase == name:
            self._phase = None
        self._wake.set()

    def stop(self) -> None:
        """Push a last time and leave; waits for a few seconds at most."""
        self._stopped = True
        self._wake.set()
        self._thread.join(2 * _CALL_SECONDS)

    def _run(self) -> None:
        while not self._stopped:
            self._push()
            self._wake.wait(PUSH_SECONDS)
            self._wake.clear()
        self._push()
        self._call("leave", self._source.source_id)

    def _push(self) -> None:
        snapshot = self._snapshot()
        snapshot.phase = self._phase
        snapshot.finished_phases = self._finished_phases
        self._call("push", self._source, snapshot)

    def _call(self, method: str, *args: object) -> None:
        if not ray.is_initialized():
            return  # Ray went first; any call would start a cluster of its own.
        try:
            if self._actor is None:
                self._actor = create_metrics_actor(self._app_name)
            ray.get(getattr(self._actor, method).remote(*args), timeout=_CALL_SECONDS)
            self._failing = False
        except RayError as error:
            if not self._failing:
                logger.warning("%s cannot reach the metrics actor: %s", self._source.source_id, error)
            self._failing = True
            self._actor = None

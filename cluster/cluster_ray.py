"""A Ray cluster that was there before us: used, and left as it was found."""

import sys

from cluster.errors import EngineError
from cluster.local_ray import within

DELETE_SECONDS = 30.0


class ClusterRay:
    """A connection to a running cluster. `stop` takes away what this run put there, and nothing else."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._started_serve = False

    def describe(self) -> str:
        return f"connecting to Ray at {self._address}"

    def start(self) -> None:
        """Connect. Raises EngineError if no cluster answers, or if it serves an application of ours already."""
        import ray
        from ray import serve

        from cluster.app import APP_NAME

        try:
            ray.init(address=self._address, log_to_driver=False, logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineError(f"no Ray cluster answers at {self._address}: {error}") from error
        status = serve.status()
        if APP_NAME in status.applications:
            raise EngineError(f"the cluster at {self._address} runs an application {APP_NAME!r} already")
        self._started_serve = not status.proxies

    def check(self) -> None:
        """Raises EngineError if the connection is gone."""
        import ray

        if not ray.is_initialized():
            raise EngineError(f"the connection to Ray at {self._address} is lost")

    def stop(self, *, keep_logs: bool) -> None:
        """Delete the application, and Serve if it was not running before; logs are the cluster's own.

        Raises EngineError if the cluster does not confirm in time.
        """
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        removed = within(DELETE_SECONDS, self._remove)
        within(10.0, ray.shutdown)
        if not removed:
            raise EngineError(
                f"the cluster at {self._address} did not confirm in {DELETE_SECONDS:g} s that all is removed"
            )

    def kill(self) -> None:
        """Nothing of a cluster is a process of ours."""

    def _remove(self) -> None:
        from ray import serve

        from cluster.app import APP_NAME
        from cluster.metrics_actor import remove_metrics_actor

        serve.delete(APP_NAME)
        if self._started_serve:
            serve.shutdown()
        remove_metrics_actor(APP_NAME)

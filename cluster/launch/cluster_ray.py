"""A Ray cluster that was there before us: used, and left as it was found."""

import socket
import sys

from cluster.errors import EngineError
from cluster.launch.local_ray import within
from cluster.launch.watchdog import Watchdog
from cluster.settings.tree import APP_NAME

CONNECT_SECONDS = 10.0
REMOVE_SECONDS = 30.0
ABANDONED_SECONDS = 90.0
"""Nobody has drained what a killed launcher leaves: engines and front ends first wait for their open requests."""


class ClusterRay:
    """A connection to a running cluster. `stop` takes away what this run put there, and nothing else."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._started_serve = False
        self._watchdog: Watchdog | None = None

    def describe(self) -> str:
        return f"connecting to Ray at {self._address}"

    def start(self) -> None:
        """Connect. Raises EngineError if no cluster answers, or if it serves an application of ours already."""
        connect(self._address)
        from ray import serve

        status = serve.status()
        if APP_NAME in status.applications:
            raise EngineError(f"the cluster at {self._address} runs an application {APP_NAME!r} already")
        self._started_serve = not status.proxies
        self._watchdog = Watchdog("application", self._address, *(["serve"] if self._started_serve else []))

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
        if self._watchdog is None or ray is None:
            return
        removed = within(REMOVE_SECONDS, lambda: _remove(with_serve=self._started_serve))
        within(10.0, ray.shutdown)
        if not removed:  # The watchdog stays, to try again when this process has ended.
            raise EngineError(
                f"the cluster at {self._address} did not confirm in {REMOVE_SECONDS:g} s that all is removed"
            )
        self._watchdog.dismiss()

    def kill(self) -> None:
        """Nothing of a cluster is a process of ours; the watchdog removes the application."""


def connect(address: str) -> None:
    """Make it this process's Ray. Raises EngineError if no cluster answers."""
    check_address(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(f"no Ray cluster answers at {address}: {error}") from error


def check_address(address: str) -> None:
    """Raises EngineError if nothing listens at host:port; Ray itself would try for minutes, deaf to signals.

    Other forms of address ("auto", ray://...) are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"no Ray cluster answers at {address}: {error}") from error


def remove_application(address: str, *, with_serve: bool) -> bool:
    """What the watchdog does for a launcher that was killed; False if the cluster does not confirm in time."""
    import ray

    def connect_and_remove() -> None:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        _remove(with_serve=with_serve)

    return within(ABANDONED_SECONDS, connect_and_remove)


def _remove(*, with_serve: bool) -> None:
    from ray import serve

    from cluster.metrics.actor import remove_metrics_actor

    # A run that ends before it has deployed has no application, and perhaps no Serve that could delete one.
    if APP_NAME in serve.status().applications:
        serve.delete(APP_NAME)
    if with_serve:
        serve.shutdown()
    remove_metrics_actor(APP_NAME)

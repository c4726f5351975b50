"""A Ray of our own on this machine: started for one run, in one directory, and ended to the last process."""

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from cluster.errors import EngineError
from cluster.launch import processes
from cluster.launch.environment import CLUSTER_ENVIRONMENT
from cluster.launch.proxy import find_haproxy, write_proxy_starter
from cluster.launch.watchdog import Watchdog

_QUIET = {
    # Ray's daemons report on themselves many times a second, and every report takes a processor from the model.
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "LOG_NAME_UPDATE_INTERVAL_S": "60",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}
"""Only of Ray's own view of itself; nothing of ours depends on it."""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def serve_environment(run_directory: Path, proxy_starter: Path | None) -> dict[str, str]:
    """What Ray and Serve must find in their environment when they start; all paths lie in the run's directory.

    HAProxy's sockets get a node's id of 56 characters put into their path, and may have 97 in all.
    """
    stats_port, metrics_port, fallback_port, fallback_grpc_port = free_ports(4)
    haproxy = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    if proxy_starter is not None:
        haproxy = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_BINARY_PATH": str(proxy_starter)}
    return (
        haproxy
        | {
            # Left to itself, `ray.init` would leave a token in the home directory that later clusters demand.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_HAPROXY_NBTHREAD": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(run_directory / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(run_directory / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(run_directory / "stats.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(run_directory),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(run_directory / "server-state"),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
            # Where HAProxy turns when no front end lives: never to another run's.
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        }
        | CLUSTER_ENVIRONMENT
        | _QUIET
    )


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Run `action` in a thread; whether it has returned by then. A hanging one is left behind.

    What it raises goes to standard error, and counts as not returned.
    """
    returned = threading.Event()

    def act() -> None:
        action()
        returned.set()

    thread = threading.Thread(target=act, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    return returned.is_set()


class LocalRay:
    """One run of Ray. `stop` ends every process of it, whatever state they are in."""

    def __init__(self, num_cpus: int, root: Path) -> None:
        """Choose the directory and start the watchdog; no Ray yet. `root` holds chunkserve's packages."""
        self.directory = Path(tempfile.mkdtemp(prefix="chunkserve-", dir="/tmp"))
        self._num_cpus = num_cpus
        self._root = root
        self._watchdog = Watchdog("processes", str(self.directory))
        self._pillars: list[psutil.Process] = []

    def start(self) -> None:
        """Start Ray here, with a session of its own even where other Rays run. Takes seconds.

        Raises EngineError with the cause. Ray and Serve read the environment when they are imported: nothing may have
        imported them before.
        """
        haproxy = find_haproxy()
        starter = None if haproxy is None else write_proxy_starter(self.directory, haproxy)
        os.environ.update(serve_environment(self.directory, starter))
        paths = [str(self._root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        import ray

        try:
            ray.init(
                address="local",
                num_cpus=self._num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="WARNING",
                _temp_dir=str(self.directory),
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:  # Ray raises bare Exceptions too
            raise EngineError(f"Ray does not start: {error}; its logs are in {self.directory}") from error
        children = psutil.Process().children()
        self._pillars = [child for child in children if child.name() in ("raylet", "gcs_server")]

    def describe(self) -> str:
        return f"starting Ray with its logs in {self.directory}"

    def check(self) -> None:
        """Raises EngineError if a process without which Ray cannot live has ended."""
        for process in self._pillars:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise EngineError(f"Ray's process {process.pid} has died; its logs are in {self.directory}")

    def stop(self, *, keep_logs: bool) -> None:
        """End everything within about 20 s, and remove the run's directory unless its logs are to be kept.

        Raises EngineError naming processes that do not end.
        """
        if "ray" in sys.modules:
            within(10.0, sys.modules["ray"].shutdown)
        living = self.kill()
        self._watchdog.dismiss()
        if living:
            raise EngineError(f"processes {living} of this run do not end")
        if not keep_logs:
            shutil.rmtree(self.directory)

    def kill(self) -> list[int]:
        """End every process of the run at once; returns those that live on (none, unless the kernel holds them)."""
        return processes.end(self.directory, 10.0, exclude=[self._watchdog.pid])

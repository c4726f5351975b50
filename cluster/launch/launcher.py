"""`chunkserve serve`: from settings to a running service and back to nothing.

The order is: everything that can be refused is refused, the model is found, Ray starts, the application is deployed
and watched until it is ready, and then nothing is done until a signal. Whatever happens in between, what was started
is stopped; if this process is killed, its watchdog does that.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cluster.engine.settings import EngineSettings
from cluster.errors import ConfigError
from cluster.frontend.api_keys import read_keys
from cluster.frontend.settings import FrontendSettings
from cluster.launch.cluster_ray import ClusterRay
from cluster.launch.kernel_build import KernelBuild
from cluster.launch.local_ray import LocalRay
from cluster.launch.placement import cpus_needed
from cluster.launch.signals import Stopped, StopSignals
from cluster.models.store import open_store
from cluster.packages import check_packages
from cluster.settings.source import ResolvedSettings
from cluster.settings.tree import Settings, engine_settings, frontend_settings

Say = Callable[[str], None]


class RayRun(Protocol):
    """The Ray that a run works on: our own, or one that was there before."""

    def describe(self) -> str:
        """What `start` will do, in a line."""

    def start(self) -> None:
        """Start or connect. Raises EngineError."""

    def check(self) -> None:
        """Raises EngineError if it has died."""

    def stop(self, *, keep_logs: bool) -> None:
        """Take everything of this run away, within a deadline. Raises EngineError naming what remains."""

    def kill(self) -> object:
        """End at once what can be ended."""


_WATCH_SECONDS = 1.0


class Launcher:
    """One run. `say` prints one line, to which the time since the start is put."""

    def __init__(self, resolved: ResolvedSettings, address: str | None, say: Say) -> None:
        self._settings: Settings = resolved.settings
        self._device = resolved.device
        self._address = address
        self._started = time.monotonic()
        self._print = say
        self._stop = StopSignals()

    def run(self) -> int:
        """Serve until a signal; the exit status. Raises ConfigError, ModelError or EngineError with the cause."""
        self._stop.install()
        try:
            root = check_packages()
            check_port(self._settings.server.host, self._settings.server.port)
            if self._settings.server.api_key_file is not None:
                read_keys(Path(self._settings.server.api_key_file).expanduser())
            model = open_store(self._say).resolve(self._settings.model.path)
            self._say(
                f"model {self._settings.model.path} from {model.source}: {model.directory} ({model.seconds:.1f} s)"
            )
            engine = engine_settings(self._settings, str(model.directory), self._device)
            frontend = frontend_settings(self._settings, str(model.directory))
            run = ClusterRay(self._address) if self._address else LocalRay(cpus_needed(self._settings, engine), root)
            return self._run(run, engine, frontend)
        except Stopped:
            return 0

    def _say(self, line: str) -> None:
        self._print(f"[{time.monotonic() - self._started:6.1f} s] {line}")

    def _run(self, run: RayRun, engine: EngineSettings, frontend: FrontendSettings) -> int:
        self._stop.install(force=run.kill)
        kernels = None if self._device.kind == "cuda" else KernelBuild()
        failed = True
        try:
            self._say(run.describe())
            try:
                run.start()
            except SystemExit:  # Ray's own answer to SIGTERM, which is in place until ours is again
                self._stop.note()
            self._stop.install(force=run.kill)
            if kernels is not None:
                kernels.wait(self._say)
            self._serve(run, engine, frontend)
            failed = False
        finally:
            if failed:
                self._say("failed; stopping what was started, logs stay where they are")
            run.stop(keep_logs=failed)
        self._say("stopped")
        return 0

    def _serve(self, run: RayRun, engine: EngineSettings, frontend: FrontendSettings) -> None:
        from cluster.launch.service import Service  # imports Ray, which must find its environment set

        service = Service(self._settings, engine, frontend, self._say)
        if self._stop:
            return
        self._say("starting Ray Serve, front ends and engines")
        service.deploy()
        if not service.wait_ready(self._stop, run.check):
            return
        for line in service.describe():
            self._say(line)
        self._say(f"ready at {service.base_url}/v1 after {time.monotonic() - self._started:.1f} s (Ctrl-C stops it)")
        while not self._stop.wait(_WATCH_SECONDS):
            run.check()
            service.show_phases()
        seconds = self._settings.server.drain_seconds
        self._say(f"stopping: new requests are refused, running ones have {seconds:g} s (Ctrl-C again ends them)")
        self._say(service.drain(seconds, run.check))


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if `host`:`port` cannot be listened on; HAProxy itself would share it with another."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"server.host {host!r} is no address: {error.strerror}") from error
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"server.port {port} is in use on {host}; choose another") from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error

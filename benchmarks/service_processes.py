"""The processes of a service that runs on this machine, found by their titles and their sockets."""

from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.errors import BenchmarkError

ENGINE, FRONTEND = "ray::ServeReplica:chunkserve:engine", "ray::ServeReplica:chunkserve:frontend"
WORKER = "ray::WorkerActor"
Link = tuple[tuple[str, int], tuple[str, int]]
"""Own host and port, the peer's host and port."""


class FaultError(BenchmarkError):
    """The fault cannot be made here; the message says why."""


class ServiceProcesses:
    """The processes of one service: all that `root` has started, or without a root all of this machine."""

    def __init__(self, root: int | None = None) -> None:
        self._root = root

    def named(self, title: str) -> list[psutil.Process]:
        """Those whose title begins so, the oldest first. Raises FaultError when there is none."""
        found = [process for process in self._all() if _title(process).startswith(title)]
        if not found:
            raise FaultError(f"no process is called {title!r}")
        return sorted(found, key=lambda process: (process.create_time(), process.pid))

    def python(self) -> list[psutil.Process]:
        """All that Ray runs in Python for the service."""
        return [process for process in self._all() if _title(process).startswith("ray::")]

    def far_raylets(self) -> list[psutil.Process]:
        """Those of nodes that are not the head. Raises FaultError when there is none."""
        raylets = [process for process in self._all() if _title(process).endswith("/raylet")]
        far = [process for process in raylets if "--head" not in process.cmdline()]
        if not far:
            raise FaultError("the service has no node but the head")
        return far

    def head_raylet(self) -> psutil.Process:
        """Raises FaultError when there is none."""
        for process in self._all():
            if _title(process).endswith("/raylet") and "--head" in process.cmdline():
                return process
        raise FaultError("no Ray runs")

    def launcher(self) -> psutil.Process:
        """Raises FaultError when there is none."""
        for process in self._all():
            with suppress(psutil.Error):
                if _serves(process.cmdline()):
                    return process
        raise FaultError("no `chunkserve serve` runs")

    def ranks(self) -> list[psutil.Process]:
        """Workers that serve an engine; a spare that waits for its turn has no link. Raises FaultError for none."""
        links = set(self.step_links())
        found = [process for process in self.named(WORKER) if links.intersection(_dialled(process))]
        if not found:
            raise FaultError("no worker has a link to an engine")
        return found

    def step_links(self) -> list[Link]:
        """(worker's end, engine's end) of each link on which steps are executed."""
        dialled = [pair for process in self.named(WORKER) for pair in _dialled(process)]
        accepted = {(theirs, ours) for process in self.named(ENGINE) for ours, theirs in _dialled(process)}
        return [pair for pair in dialled if pair in accepted]

    def _all(self) -> list[psutil.Process]:
        if self._root is None:
            return list(psutil.process_iter())
        with suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self._root).children(recursive=True))
        raise FaultError(f"the service's process {self._root} is gone")


def _serves(command: list[str]) -> bool:
    """Whether it is `python -m cluster serve ...` or `python .../bin/chunkserve serve ...`."""
    words = command[1:4]
    return words == ["-m", "cluster", "serve"] or (words[1:2] == ["serve"] and Path(words[0]).name == "chunkserve")


def _dialled(process: psutil.Process) -> list[Link]:
    """(own address, peer's address) of open connections whose own port is not one that the process listens on: an
    engine stops to listen once its ranks have dialled, and Ray never does."""
    with suppress(psutil.Error):
        connections = process.net_connections("tcp")
        listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
        return [
            (tuple(each.laddr), tuple(each.raddr))
            for each in connections
            if each.status == psutil.CONN_ESTABLISHED and each.laddr.port not in listening
        ]
    return []


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return str((process.cmdline() or [""])[0])
    return ""

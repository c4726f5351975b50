"""Whether the machine was ours while we measured, and keeping it so."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


class CpuWatch:
    """CPU time since it was built: of this process and all that it started, and of everything else."""

    def __init__(self) -> None:
        self._own, self._busy, self._started = _own_seconds(), _busy_seconds(), time.monotonic()

    def other_cores(self) -> float:
        """Cores that others kept busy on average, the kernel and the host's theft included; about 0 on a quiet machine.

        A process of ours that ended meanwhile counts as another's.
        """
        used = sum(max(0.0, seconds - self._own.get(pid, 0.0)) for pid, seconds in _own_seconds().items())
        return max(0.0, _busy_seconds() - self._busy - used) / (time.monotonic() - self._started)


def children() -> set[int]:
    """The processes that this one started itself."""
    return {process.pid for process in psutil.Process().children()}


def cores_used_by(pid: int, seconds: float) -> float:
    """Cores that this process and all that it started keep busy, over so many seconds from now."""
    before = _tree_seconds(pid)
    time.sleep(seconds)
    after = _tree_seconds(pid)
    return sum(used - before.get(process, used) for process, used in after.items()) / seconds


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop this process and all that it started (SIGSTOP); they go on at the end."""
    stopped: list[psutil.Process] = []
    try:
        while started := [process for process in _tree(pid) if process not in stopped]:
            for process in started:  # parents first; what they started until then is found by the next look
                stopped.append(process)
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
        yield
    finally:
        for process in reversed(stopped):
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _own_seconds() -> dict[int, float]:
    return _tree_seconds(os.getpid())


def _tree_seconds(pid: int) -> dict[int, float]:
    found = {}
    for process in _tree(pid):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # It just ended.
        found[process.pid] = times.user + times.system
    return found


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in names))

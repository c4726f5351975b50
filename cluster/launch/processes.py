"""The processes of one run, found by its directory, so that none is left behind however the run ended.

A run keeps everything (Ray's session, HAProxy's files, every log) under one directory of its own, and names it in the
environment that its processes inherit. Ray renames its workers, which destroys their environment as seen from
outside: those are known by the log files they hold open. Descendants of either belong to the run too. No register
has to be kept: a launcher that was killed needs nobody's memory.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def find(run_directory: Path, exclude: Iterable[int] = ()) -> list[psutil.Process]:
    """Living processes of the run, without `exclude` and the caller itself."""
    marker = str(run_directory)
    mine = psutil.Process().pid
    left_out = {mine, *exclude}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid in left_out or process.pid in found or not _is_marked(process, marker):
            continue
        found[process.pid] = process
        for child in _descendants(process):
            if child.pid not in left_out:
                found[child.pid] = child
    return list(found.values())


def end(run_directory: Path, seconds: float, exclude: Iterable[int] = ()) -> list[int]:
    """Kill the run's processes until none is found; returns the ids that still live after `seconds`.

    Looks again after each round, because a process may be born while its parent is killed.
    """
    deadline = time.monotonic() + seconds
    excluded = list(exclude)
    while True:
        living = find(run_directory, excluded)
        if not living or time.monotonic() > deadline:
            return [process.pid for process in living]
        for process in living:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(living, timeout=max(0.0, min(1.0, deadline - time.monotonic())))


def _is_marked(process: psutil.Process, marker: str) -> bool:
    """Whether a process that is ours to look at names the run's directory."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if any(value.startswith(marker) for value in process.environ().values()):
            return True
        command = process.cmdline()
        return bool(command) and command[0].startswith("ray::") and _holds_open(process.pid, marker)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _holds_open(pid: int, marker: str) -> bool:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
    for link in links:
        try:
            if str(link.readlink()).startswith(marker):
                return True
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []

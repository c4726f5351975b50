"""CPU time of a service's processes, by the part they play."""

from collections import Counter

import psutil

from benchmarks.service_processes import ENGINE, FRONTEND, WORKER

PARTS = {
    FRONTEND: "front end",
    ENGINE: "engine",
    WORKER: "ranks",
    "haproxy": "HAProxy",
}
"""By what the first word of the command line holds; all other processes of the service are Ray's."""
RAY = "Ray"
CLIENT = "client"


def cpu_seconds() -> Counter[str]:
    """Seconds used so far by this process, the client, and by all that it has started, by part.

    A process that ends takes its seconds with it: differences are right while none does.
    """
    found: Counter[str] = Counter()
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            part = CLIENT if process == this else _part(process)
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[part] += times.user + times.system
    return found


def _part(process: psutil.Process) -> str:
    # Ray puts the method that runs behind an actor's name.
    words = process.cmdline()[:1] or [process.name()]
    return next((part for name, part in PARTS.items() if name in words[0]), RAY)

"""What a service's processes hold: file descriptors, threads, sockets, memory. What faults leave behind shows in it."""

from contextlib import suppress
from dataclasses import dataclass, fields

import psutil

from benchmarks.service_processes import ENGINE, FRONTEND, WORKER, FaultError, ServiceProcesses

PARTS = {"engine": ENGINE, "front end": FRONTEND, "workers": WORKER}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of all processes that play one part."""

    processes: int
    descriptors: int
    threads: int
    sockets: int
    megabytes: int
    """Resident."""

    def change_to(self, after: "Footprint") -> str:
        """`before -> after` of each number that is not the same, or "the same"."""
        pairs = [(each.name, getattr(self, each.name), getattr(after, each.name)) for each in fields(self)]
        return ", ".join(f"{name} {before} -> {now}" for name, before, now in pairs if before != now) or "the same"


def footprints(processes: ServiceProcesses) -> dict[str, Footprint]:
    """By part."""
    found = {}
    for part, title in PARTS.items():
        with suppress(FaultError):
            found[part] = _measure(processes.named(title))
    found["all of Ray's Python"] = _measure(processes.python())
    return found


def _measure(processes: list[psutil.Process]) -> Footprint:
    numbers = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            numbers.append(
                (
                    1,
                    process.num_fds(),
                    process.num_threads(),
                    len(process.net_connections()),
                    process.memory_info().rss >> 20,
                )
            )
    return Footprint(*(sum(column) for column in zip(*numbers, strict=True)))

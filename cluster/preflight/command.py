"""`chunkserve preflight`: connects as `chunkserve serve` would, checks, prints, and leaves Ray as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.launch.cluster_ray import connect
from cluster.launch.local_ray import LocalRay, within
from cluster.launch.placement import cpus_needed
from cluster.packages import check_packages
from cluster.preflight.row import lines
from cluster.settings.tree import Device, Settings, engine_settings

Say = Callable[[str], None]


def preflight(settings: Settings, device: Device, address: str | None, say: Say) -> int:
    """Print a table of checks; the exit status: 0 if none failed, else 1. Raises EngineError if there is no Ray."""
    num_cpus = cpus_needed(settings, engine_settings(settings, settings.model.path, device))
    with _connected(address, num_cpus, say):
        from cluster.preflight.checks import check_all  # it imports Ray, which reads its environment

        rows = check_all(settings, device)
    for line in lines(rows):
        say(line)
    return 1 if any(row.state == "failed" for row in rows) else 0


@contextmanager
def _connected(address: str | None, num_cpus: int, say: Say) -> Iterator[None]:
    """A running cluster at `address`, else a Ray of our own, like the one that would serve."""
    if address is not None:
        connect(address)
        import ray

        try:
            yield
        finally:
            within(10.0, ray.shutdown)
        return
    run = LocalRay(num_cpus, check_packages())
    try:
        say(run.describe())
        run.start()
        yield
    finally:
        run.stop(keep_logs=False)

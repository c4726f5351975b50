"""The Ray shell of one rank: explicit methods for start-up, then a thread that executes plans.

The only place of this room that knows Ray. The process ends when its engine link does, within a second, whatever
its step waits for, so that no rank outlives its engine.
"""

import os
import socket
import threading
from typing import TYPE_CHECKING

import ray

from scheduler.plan import StepLoad
from workers.config import ModelLimits, WorkerConfig
from workers.link import Link
from workers.logs import log_to_stderr
from workers.step_loop import rank_name, serve_heartbeats, serve_plans

if TYPE_CHECKING:
    from workers.worker import Worker

_CONNECT_SECONDS = 10.0


def free_port(host: str) -> int:
    """A TCP port of `host` that nobody listens on now. Whoever uses it must expect to lose the race for it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class WorkerActor:
    """One rank. Methods are called once each, in the order they stand here; a spare that never serves only warms up.

    `process_id` is asked at any time, and again and again until the call fails: then the rank is gone.
    """

    def __init__(self, config: WorkerConfig, rank: int) -> None:
        log_to_stderr()
        self._config = config
        self._rank = rank
        self._worker: Worker | None = None

    def warm_up(self) -> None:
        """Import what a rank needs: most of what its start takes."""
        import workers.worker  # noqa: F401

    def process_id(self) -> int:
        return os.getpid()

    def rendezvous(self) -> str:
        """Where rank 0 will serve torch.distributed's rendezvous: this node, a free port."""
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{free_port(host)}"

    def load(self, rendezvous: str) -> None:
        """Join the group and read this rank's slices of the weights."""
        from workers.worker import Worker  # here, so that the engine knows this class without loading torch

        self._worker = Worker(self._config, self._rank, rendezvous)
        self._worker.load()

    def measure(self) -> ModelLimits:
        """What this rank could hold."""
        return self._loaded().measure()

    def allocate(self, limits: ModelLimits) -> None:
        """Take the KV cache that the whole group agreed on."""
        self._loaded().allocate(limits)

    def profile(self, limits: ModelLimits) -> list[tuple[StepLoad, float]]:
        """What a few steps take. Of a group that is started anew it is not asked."""
        return self._loaded().profile(limits)

    def connect_link(self, host: str, port: int, token: str) -> None:
        """Dial the engine and execute its plans from now on. Raises LinkError when it cannot be reached."""
        worker = self._loaded()
        link = Link.connect(host, port, token, rank_name(self._rank), _CONNECT_SECONDS)
        threading.Thread(target=serve_heartbeats, args=(link,), name="heartbeats", daemon=True).start()
        if worker.clock is not None:
            from workers.profile import profile_link

            profile_link(link, worker.clock)
        threading.Thread(target=serve_plans, args=(link, worker, self._rank), name="steps", daemon=True).start()

    def _loaded(self) -> "Worker":
        if self._worker is None:
            raise RuntimeError(f"rank {self._rank} was asked for more before it had loaded")
        return self._worker

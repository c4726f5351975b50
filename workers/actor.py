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


def listen_for_ranks(host: str) -> tuple[socket.socket, str]:
    """A socket at a free port of `host`, and the rendezvous it is: held from now on, so that nobody else takes it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    shown = f"[{host}]" if ":" in host else host
    return listener, f"tcp://{shown}:{listener.getsockname()[1]}"


class WorkerActor:
    """One rank. Methods are called once each, in the order they stand here; a spare that never serves only warms up.

    Which rank it is, it learns when it loads: ranks are numbered once it is known where they are. `process_id` is
    asked at any time, and again and again until the call fails: then the rank is gone.
    """

    def __init__(self, config: WorkerConfig) -> None:
        log_to_stderr()
        self._config = config
        self._rank = 0
        self._listener: socket.socket | None = None
        self._worker: Worker | None = None

    def warm_up(self) -> None:
        """Import what a rank needs: most of what its start takes."""
        import workers.worker  # noqa: F401

    def process_id(self) -> int:
        return os.getpid()

    def node_id(self) -> str:
        """Ray's name of the node that this runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def rendezvous(self) -> str:
        """Where the ranks meet. Only rank 0 is asked, and listens there, on this node, from now on."""
        self._listener, rendezvous = listen_for_ranks(ray.util.get_node_ip_address())
        return rendezvous

    def load(self, rank: int, rendezvous: str) -> None:
        """Join the group as this rank and read its slices of the weights."""
        from workers.worker import Worker  # here, so that the engine knows this class without loading torch

        self._rank = rank
        self._worker = Worker(self._config, rank, rendezvous, self._listener)
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
            raise RuntimeError("a rank was asked for more before it had loaded")
        return self._worker

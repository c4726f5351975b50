"""Serve's router interface (alpha in Ray 2.60): engines that say they are not ready get no requests."""

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import RunningReplica

from cluster.links.messages import READY

ROUTING_SECONDS = 1.0
"""Between two questions to an engine."""


class ReadyRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]  # Ray has no types
    """Power-of-two choices among engines that are ready, among all when none is.

    Without it an engine that recovers for long, and gives back what it holds, would look like the least busy one.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list, or what an engine says of itself, has changed."""
        ready = [replica for replica in replicas if replica.routing_stats.get(READY, True)]
        super().update_replicas(ready or replicas)

"""Serve's router interface around the choice of `scheduler.routing`."""

from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.links.engine_views import engine_name, process_views
from cluster.links.messages import GenerateRequest
from cluster.links.ready_router import ReadyRouter


class PredictedRouter(ReadyRouter):
    """A request goes to the engine with the least predicted time to first token, of those that are ready."""

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """The engine is for the call that it was chosen for. Serve knows calls by the client's request, which may make
        several: when the one that is known by it has its engine, the others get theirs in the order in which they came.
        """
        if self._get_pending_request_matching_internal_request_id(request_metadata) is None:
            super()._fulfill_next_pending_request(replica, request_metadata)
        else:
            RequestRouter._fulfill_next_pending_request(self, replica, request_metadata)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list, or what an engine says of itself, has changed."""
        super().update_replicas(replicas)
        process_views().keep({_name(replica) for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks: the best one first, then all others, in case that it does not answer Serve or is full.

        Where there is no choice, or nothing is known, and for questions about engines, it is power-of-two choices.
        """
        if pending_request is not None and len(candidate_replicas) > 1:
            request = pending_request.args[0] if pending_request.args else None
            if isinstance(request, GenerateRequest):
                by_name = {_name(replica): replica for replica in candidate_replicas}
                route = process_views().route(request, list(by_name))
                if route.replicas:
                    pending_request.routing_context.should_backoff = True
                    best, *others = (by_name[name] for name in route.replicas)
                    return [[best], others]
        ranks: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        return ranks


def _name(replica: RunningReplica) -> str:
    return engine_name(replica.actor_id.hex())

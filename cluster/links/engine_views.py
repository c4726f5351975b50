"""What this front end knows of the engines, between the links that bring it and the router that asks.

Links live on the front end's loop, and Serve runs its router on a loop and thread of its own: hence the lock.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence

from cluster.links.messages import GenerateRequest
from cluster.links.token_link import HEARTBEAT_SECONDS
from scheduler.plan import ReplicaReport
from scheduler.routing import Route, RoutedRequest, RouteReason, RoutingTable

MAX_AGE_SECONDS = 2.5 * HEARTBEAT_SECONDS
"""An engine reports once a heartbeat at least: so it has missed two."""

OnRoute = Callable[[RouteReason, float], None]
"""(reason, age of the view in seconds): a request was routed."""


def engine_name(actor_id: str) -> str:
    """How an engine calls itself on its links and in metrics, and how Serve's replica of that actor is found there."""
    return f"engine-{actor_id[:8]}"


class EngineViews:
    """A `RoutingTable` for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._table = RoutingTable(MAX_AGE_SECONDS)
        self.on_route: OnRoute = lambda reason, view_age: None

    def update(self, engine: str, report: ReplicaReport) -> bool:
        """False: a report was missed, and a snapshot must be asked for."""
        with self._lock:
            return self._table.update(engine, report, self._clock())

    def admitted(self, request_id: str) -> None:
        """An engine has it in its queue."""
        with self._lock:
            self._table.admitted(request_id)

    def settled(self, request_id: str) -> None:
        """Its first token has come, or nothing more will."""
        with self._lock:
            self._table.settled(request_id)

    def lost(self, engine: str) -> None:
        """Nothing is heard of it any more."""
        with self._lock:
            self._table.lost(engine, self._clock())

    def keep(self, engines: Collection[str]) -> None:
        """Those that Serve knows; the others are gone."""
        with self._lock:
            self._table.keep(engines)

    def route(self, request: GenerateRequest, engines: Sequence[str]) -> Route:
        """Choose one of `engines`, at least one."""
        asked = RoutedRequest(
            request.request_id,
            [*request.prompt_token_ids, *request.output_token_ids],
            request.lora_id,
            request.cache_salt,
            request.sampling_params.num_prompt_logprobs is None,
        )
        with self._lock:
            route = self._table.route(asked, engines, self._clock())
        self.on_route(route.reason, route.view_age)
        return route


def process_views() -> EngineViews:
    """Of this process, which holds one front end. Serve builds its router from a class alone: here the two meet."""
    return _views


_views = EngineViews()

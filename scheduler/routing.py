"""Which replica gets a request: the one with the least predicted time to its first token."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scheduler.block_hashes import chain, root_hash
from scheduler.plan import ReplicaReport
from scheduler.replica_view import Promise, ReplicaView

RouteReason = Literal["hit", "least_work", "stale"]
ROUTE_REASONS: tuple[RouteReason, ...] = ("hit", "least_work", "stale")
"""The chosen replica holds the beginning of the prompt; it does not, and would still be first; views are too old."""

_TOLERANCE = 0.1
"""Relative: predictions are no better."""
_FAIR_SHARE = 1.1
_EXCESS_WEIGHT = 10.0
"""Prefills of the whole prompt that a share of 1 above the fair one is worth. A miss costs two, so that the holder of a
prefix passes it on when its share is 0.2 above the fair one.
"""
_SHARE_PRIOR = 30.0
"""Requests that each replica is taken to have had: the first few say nothing about shares."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What the choice looks at."""

    request_id: str
    token_ids: Sequence[int]
    """All that are known: the prompt, and the output that another replica gave."""
    lora_id: str | None = None
    cache_salt: str | None = None
    uses_cache: bool = True
    """False for one that wants log-probabilities of its prompt."""
    _hashes: dict[int, list[bytes]] = field(default_factory=dict)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Of its full blocks that the prefix cache may serve and keep."""
        if not self.uses_cache:
            return []
        if block_size not in self._hashes:
            root = root_hash(self.lora_id, self.cache_salt)
            self._hashes[block_size] = chain(root, self.token_ids, block_size)
        return self._hashes[block_size]


@dataclass(frozen=True, slots=True)
class Route:
    """A choice. `replicas`: all that may be asked, best first; empty when `reason` is "stale"."""

    reason: RouteReason
    replicas: list[str] = field(default_factory=list)
    num_hit_tokens: int = 0
    seconds: float = 0.0
    """Predicted, to the first token."""
    view_age: float = 0.0
    """Seconds since the chosen replica's last report."""


class RoutingTable:
    """Views of all replicas that were heard of or sent to, by name. One thread calls it; times are by any one clock."""

    def __init__(self, max_age: float) -> None:
        """`max_age`: seconds after which a report says nothing any more."""
        self._max_age = max_age
        self._views: dict[str, ReplicaView] = {}
        self._replica_of: dict[str, str] = {}
        """request id -> where its promise is."""

    # What is heard

    def update(self, replica: str, report: ReplicaReport, now: float) -> bool:
        """Take a report. False: an earlier one was missed, and a snapshot must be asked for."""
        view = self._view(replica)
        for request_id in view.broken_promises(now):
            self.settled(request_id)
        return view.update(report, now)

    def admitted(self, request_id: str) -> None:
        """Its replica has it in its queue: the next report counts it."""
        promise = self._promise(request_id)
        if promise is not None:
            promise.admitted = True

    def settled(self, request_id: str) -> None:
        """Its first token has come, or it has ended, or it is nowhere: nothing of it is expected any more."""
        replica = self._replica_of.pop(request_id, None)
        if replica is not None and replica in self._views:
            self._views[replica].promises.pop(request_id, None)

    def lost(self, replica: str, now: float) -> None:
        """It is silent, and perhaps gone for good: `keep` then does without it."""
        self._view(replica).shun(now)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all others."""
        self._views = {name: view for name, view in self._views.items() if name in replicas}

    # The choice

    def route(self, request: RoutedRequest, candidates: Sequence[str], now: float) -> Route:
        """Choose among `candidates` (at least one), and count the request to the chosen one until it is settled.

        The prediction is (queued tokens + tokens left after the hit) / prefill rate. To that comes what the request
        costs those after it. Tokens left count twice, for they delay everybody: with the prediction alone, replicas
        under load copy each other's prefixes, evict, compute more, and copy more. And a replica that lately got more
        than its share of the requests counts as slower by the excess, so that it passes a prefix on before its queue
        grows. Costs that differ by less than predictions can tell are ties: the least work before it wins, then who was
        sent the least lately. Without that a new prefix would always go to the replica that seems a little faster.

        A replica that has never reported (it has just started) is taken for empty, and for as fast as the fastest. One
        whose report is too old is not asked, nor for some time one that was lost, or to which this request was sent
        before in vain. When no report counts, the reason is "stale", and the caller falls back to power-of-two choices.
        """
        self._judge_last_choice(request.request_id, now)
        self.settled(request.request_id)
        views = {name: self._view(name) for name in candidates}
        fresh = {
            name: view for name, view in views.items() if view.sequence >= 0 and now - view.reported_at <= self._max_age
        }
        new = {name: view for name, view in views.items() if not view.block_size and now >= view.shunned_until}
        if not fresh and len(new) < len(views):
            return Route("stale")
        size, rate = max(((view.block_size, view.prefill_rate) for view in fresh.values()), key=_rate, default=_UNKNOWN)
        outlooks = [_outlook(name, view, request, view.block_size, view.prefill_rate) for name, view in fresh.items()]
        outlooks += [_outlook(name, view, request, size, rate) for name, view in new.items()]
        sent = {outlook.name: outlook.view.recently_sent(now) + _SHARE_PRIOR for outlook in outlooks}
        mean = sum(sent.values()) / len(sent)
        ranked = sorted(((each.cost(sent[each.name] / mean), each) for each in outlooks), key=lambda pair: pair[0])
        ties = [outlook for cost, outlook in ranked if cost <= ranked[0][0] * (1 + _TOLERANCE)]
        best = min(ties, key=lambda outlook: (outlook.work, sent[outlook.name]))
        return self._send(request, best, [outlook.name for _, outlook in ranked if outlook is not best], now)

    def _send(self, request: RoutedRequest, best: "_Outlook", others: list[str], now: float) -> Route:
        best.view.promise(request.request_id, Promise(best.num_left, request.block_hashes(best.block_size), now))
        self._replica_of[request.request_id] = best.name
        num_hit_tokens = len(request.token_ids) - best.num_left
        return Route(
            "hit" if num_hit_tokens else "least_work",
            [best.name, *others],
            num_hit_tokens,
            best.seconds,
            now - best.view.reported_at if best.view.block_size else 0.0,
        )

    def _judge_last_choice(self, request_id: str, now: float) -> None:
        """It comes again: has the replica that was chosen for it spoken since?"""
        promise = self._promise(request_id)
        if promise is None or promise.admitted:
            return
        view = self._views[self._replica_of[request_id]]
        if view.reported_at < promise.sent_at:
            view.shun(now)

    def _view(self, replica: str) -> ReplicaView:
        return self._views.setdefault(replica, ReplicaView())

    def _promise(self, request_id: str) -> Promise | None:
        replica = self._replica_of.get(request_id)
        return None if replica is None or replica not in self._views else self._views[replica].promises.get(request_id)


_UNKNOWN = (16, 1.0)
"""Block size and rate while nothing has reported: replicas then differ by what was sent to them."""


def _rate(size_and_rate: tuple[int, float]) -> float:
    return size_and_rate[1]


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What a request would meet at a replica."""

    name: str
    view: ReplicaView
    block_size: int
    rate: float
    work: int
    """Tokens before it."""
    num_left: int
    """Its own, after the hit."""
    num_tokens: int

    @property
    def seconds(self) -> float:
        """To its first token."""
        return (self.work + self.num_left) / self.rate if self.rate > 0 else math.inf

    def cost(self, share: float) -> float:
        """Seconds, those of others included. `share`: of the requests of late, 1 is the mean."""
        others = self.num_left + _EXCESS_WEIGHT * max(0.0, share - _FAIR_SHARE) * self.num_tokens
        return self.seconds + others / self.rate if self.rate > 0 else math.inf


def _outlook(name: str, view: ReplicaView, request: RoutedRequest, size: int, rate: float) -> _Outlook:
    num_tokens = len(request.token_ids)
    # At least one token is computed, or there would be no logits to sample from.
    num_hit = min(view.num_hit_blocks(request.block_hashes(size)), (num_tokens - 1) // size) * size
    return _Outlook(name, view, size, rate, view.work(), num_tokens - num_hit, num_tokens)

"""What is known of one replica: what it last reported, and what was sent to it since."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.plan import ReplicaReport

_HALF_LIFE = 30.0
_PATIENCE_SECONDS = 10.0
_SHUN_SECONDS = 30.0
"""A replica that is dead is replaced within that time; one that lives and has nothing to say must be asked again."""


@dataclass(slots=True)
class Promise:
    """A request sent to a replica that has not given its first token yet: what it will find there, others will."""

    num_tokens: int
    """That it has to compute."""
    block_hashes: Sequence[bytes]
    sent_at: float
    admitted: bool = False
    """The replica has said so: its next report counts the tokens."""


class ReplicaView:
    """A copy of a replica's prefix cache as a set of hashes, and its queue.

    100,000 blocks take 11 MB: 64 bytes for each hash of 16, and 42 for its place in the set.
    """

    def __init__(self) -> None:
        self.block_hashes: set[bytes] = set()
        self.block_size = 0
        """0: it has not reported yet."""
        self.sequence = -1
        self.queued_tokens = 0
        self.prefill_rate = 0.0
        self.reported_at = -math.inf
        self.shunned_until = -math.inf
        """It was silent when it should have spoken: until then, or until it reports, it is not asked."""
        self.promises: dict[str, Promise] = {}
        self._sent = 0.0
        self._sent_at = 0.0

    def update(self, report: ReplicaReport, now: float) -> bool:
        """Take a report. False: one before it was missed, and only a snapshot can follow."""
        if report.is_snapshot:
            self.block_hashes = set(report.added)
        elif report.sequence == self.sequence + 1:
            self.block_hashes.difference_update(report.removed)
            self.block_hashes.update(report.added)
        else:
            self.sequence = -1
            return False
        self.sequence = report.sequence
        self.block_size = report.block_size
        self.queued_tokens = report.queued_tokens
        self.prefill_rate = report.prefill_rate
        self.reported_at = now
        self.shunned_until = -math.inf
        for promise in self.promises.values():
            if promise.admitted:
                promise.num_tokens = 0
        return True

    def shun(self, now: float) -> None:
        """Nothing is known of it any more, and for a while nothing is expected of it."""
        self.block_hashes = set()
        self.block_size = 0
        self.sequence = -1
        self.shunned_until = now + _SHUN_SECONDS

    def work(self) -> int:
        """Tokens to be computed before those of a request that is sent now."""
        return self.queued_tokens + sum(promise.num_tokens for promise in self.promises.values())

    def promise(self, request_id: str, promise: Promise) -> None:
        """A request is sent there."""
        self.promises[request_id] = promise
        self._sent, self._sent_at = self.recently_sent(promise.sent_at) + 1, promise.sent_at

    def broken_promises(self, now: float) -> list[str]:
        """Requests that the replica has not answered: their sender gave up before they were sent, or they were lost."""
        return [
            request_id
            for request_id, promise in self.promises.items()
            if not promise.admitted and now - promise.sent_at > _PATIENCE_SECONDS
        ]

    def recently_sent(self, now: float) -> float:
        """Requests sent here, each worth half after `_HALF_LIFE` seconds."""
        return self._sent * math.exp2((self._sent_at - now) / _HALF_LIFE)

    def num_hit_blocks(self, block_hashes: Sequence[bytes]) -> int:
        """Leading blocks that a request finds here, those included that are promised."""
        num_hit = 0
        while num_hit < len(block_hashes) and block_hashes[num_hit] in self.block_hashes:
            num_hit += 1
        return max([num_hit, *(_num_common(promise.block_hashes, block_hashes) for promise in self.promises.values())])


def _num_common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Leading blocks of both, by bisection: equal hashes have equal parents."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low

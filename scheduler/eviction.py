"""What preempting some running requests would give to a waiting one, before any of them is touched."""

from collections import Counter
from collections.abc import Collection, Mapping

from scheduler.kv_cache_manager import KVCacheManager
from scheduler.request import Request


class Eviction:
    """A set of victims, imagined gone, and the sum of what they would leave. Empty when built."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        hit: Collection[int],
        num_scheduled_tokens: Mapping[str, int],
        partials: Mapping[str, Request],
    ) -> None:
        """`hit`: cached blocks of the waiting request's head. The mappings are those of the step in the making."""
        self._kv = kv_cache_manager
        self._hit = frozenset(hit)
        self._num_scheduled_tokens = num_scheduled_tokens
        self._partials = partials
        self._references: Counter[int] = Counter()
        self.victims: dict[str, Request] = {}
        self.num_tokens = 0
        """Tokens of this step's budget."""
        self.num_partials = 0
        self.num_long_partials = 0
        self.num_owed_blocks = 0
        """Blocks that no running chunk would owe any more."""
        self.num_free_blocks = 0
        """Blocks whose references all belong to the victims."""
        self.num_free_hit_blocks = 0
        """Those of them that are part of the hit."""

    def add(self, victim: Request) -> None:
        self.victims[victim.request_id] = victim
        self._count(victim, 1)
        ref_counts = self._kv.block_pool.ref_counts
        for block_id in self._kv.tables[victim.request_id]:
            self._references[block_id] += 1
            if self._references[block_id] == ref_counts[block_id]:
                self._count_free(block_id, 1)

    def remove(self, victim: Request) -> None:
        del self.victims[victim.request_id]
        self._count(victim, -1)
        ref_counts = self._kv.block_pool.ref_counts
        for block_id in self._kv.tables[victim.request_id]:
            if self._references[block_id] == ref_counts[block_id]:
                self._count_free(block_id, -1)
            self._references[block_id] -= 1

    def _count(self, victim: Request, sign: int) -> None:
        self.num_tokens += sign * self._num_scheduled_tokens.get(victim.request_id, 0)
        if victim.request_id in self._partials:
            self.num_partials += sign
            self.num_long_partials += sign * victim.is_long_prefill
            if not victim.is_decoding:
                self.num_owed_blocks += sign * self._kv.num_owed_blocks(victim)

    def _count_free(self, block_id: int, sign: int) -> None:
        self.num_free_blocks += sign
        self.num_free_hit_blocks += sign * (block_id in self._hit)

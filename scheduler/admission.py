"""Whether a waiting request can be admitted now, and who would have to go for it. Changes nothing."""

from collections.abc import Sequence
from enum import Enum, auto

from scheduler.config import SchedulerConfig
from scheduler.eviction import Eviction
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.limits import is_long_prefill, num_new_tokens
from scheduler.request import Request
from scheduler.step import Step


class Lack(Enum):
    """Why a waiting request cannot be admitted now."""

    PLACE = auto()
    """Held back by the partial-prefill limits: it is not ready, so it is skipped."""
    SEAT = auto()
    BLOCKS = auto()
    BUDGET = auto()


class Admission:
    """The tests that a waiting request must pass."""

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self._config = config
        self._kv = kv_cache_manager

    def try_to_fit(
        self,
        request: Request,
        hit: Sequence[int],
        running: Sequence[Request],
        step: Step,
        gone: Eviction | None = None,
    ) -> tuple[int, Lack | None]:
        """How many tokens the request could compute now, and what it lacks; None: it fits.

        `hit`: the cached blocks of its head. `gone`: running requests imagined gone.

        The blocks of its whole sequence must be there, though they are allocated chunk by chunk:
        prompts that admitted themselves chunk by chunk would end in a preemption storm. For the same
        reason running chunks keep what they still owe, and each running request one block.
        """
        if gone is None:
            gone = Eviction(self._kv, hit, step.num_scheduled_tokens, step.partials)
        num_computed = len(hit) * self._config.block_size
        num_tokens = num_new_tokens(self._config, request, num_computed, step.budget + gone.num_tokens)
        if self._is_held_back(request, num_computed, num_tokens, step, gone):
            return num_tokens, Lack.PLACE
        num_running = len(running) - len(gone.victims)
        if num_running >= self._config.max_num_seqs:
            return num_tokens, Lack.SEAT
        pool = self._kv.block_pool
        num_free = pool.num_free_blocks + gone.num_free_blocks
        num_free_hit = sum(pool.ref_counts[block_id] == 0 for block_id in hit) + gone.num_free_hit_blocks
        num_owed = sum(self._kv.num_owed_blocks(chunk) for chunk in step.partials.values() if not chunk.is_decoding)
        num_available = num_free - num_free_hit - (num_owed - gone.num_owed_blocks) - num_running
        if self._kv.num_blocks_for(request.num_tokens) - len(hit) > num_available:
            return num_tokens, Lack.BLOCKS
        return num_tokens, Lack.BUDGET if num_tokens <= 0 else None

    def is_surely_held_back(self, request: Request, step: Step, may_evict: bool) -> bool:
        """Whether it lacks a place whatever the cache holds, told without going through the cache.

        Spares long queues of prompts that wait for a place: only a hit could make it fit (it would then
        be computed whole, or not be long any more), and the cache lacks a block of such a hit.
        """
        gone = step.vain_eviction if may_evict else None
        if not self._config.enable_chunked_prefill or (may_evict and gone is None):
            return False
        num_partials, num_long, budget = len(step.partials), step.num_long_partials, step.budget
        if gone is not None:
            num_partials -= gone.num_partials
            num_long -= gone.num_long_partials
            budget += gone.num_tokens
        threshold = self._config.long_prefill_token_threshold
        if num_partials >= self._config.max_num_partial_prefills:
            most_owed = min(budget, threshold) if threshold else budget
        elif num_long >= self._config.max_long_partial_prefills:
            most_owed = threshold or budget
        else:
            return False
        return request.num_tokens > most_owed and not self._kv.may_hit(request, request.num_tokens - most_owed)

    def find_victims(
        self, request: Request, hit: Sequence[int], running: Sequence[Request], step: Step
    ) -> list[Request]:
        """Running requests of lower priority, worst first, whose eviction makes the request fit; none if nothing does.

        Imagines them gone from the worst on until it fits, then spares those that were not needed,
        best first.
        """
        vain = step.vain_eviction
        if vain is not None and self.try_to_fit(request, hit, running, step, vain)[1] is Lack.PLACE:
            return []  # its own candidates are among those: no need to go through them again
        gone = Eviction(self._kv, hit, step.num_scheduled_tokens, step.partials)
        candidates = [other for other in running if other.priority > request.priority]
        candidates.sort(key=lambda other: other.order_key, reverse=True)
        for victim in candidates:
            gone.add(victim)
            if self.try_to_fit(request, hit, running, step, gone)[1] is None:
                break
        else:
            step.vain_eviction = gone
            return []
        for victim in reversed(list(gone.victims.values())):
            gone.remove(victim)
            if self.try_to_fit(request, hit, running, step, gone)[1] is not None:
                gone.add(victim)
        return [victim for victim in candidates if victim.request_id in gone.victims]

    def _is_held_back(self, request: Request, num_computed: int, num_tokens: int, step: Step, gone: Eviction) -> bool:
        """Whether it would still be partial after this step, and one partial prefill too many."""
        if not self._config.enable_chunked_prefill or num_computed + num_tokens >= request.num_tokens:
            return False
        if len(step.partials) - gone.num_partials >= self._config.max_num_partial_prefills:
            return True
        if not is_long_prefill(self._config, request, num_computed):
            return False
        return step.num_long_partials - gone.num_long_partials >= self._config.max_long_partial_prefills

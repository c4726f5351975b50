"""Block tables of requests, and the prefix cache seen from a request."""

from collections.abc import Mapping, Sequence

from scheduler.block_hashes import chain, root_hash
from scheduler.block_pool import BlockPool
from scheduler.request import Request

_HASHES_AHEAD = 16
"""Blocks hashed at once while a hit is followed: a prompt that misses early is not hashed to its end."""


class KVCacheManager:
    """Which blocks hold which request's KV. A request has a table while it runs, and only then."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks, enable_caching)
        self.tables: dict[str, list[int]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def uses_cache(self, request: Request) -> bool:
        """Whether the prefix cache may serve it. A request that wants prompt logprobs computes every token."""
        return self.block_pool.enable_caching and request.sampling_params.num_prompt_logprobs is None

    def find_hit(self, request: Request) -> list[int]:
        """Cached blocks that hold the head of its tokens, in order; takes no reference.

        At most `num_tokens - 1` tokens: at least one is computed, or there would be no logits to
        sample from.
        """
        if not self.uses_cache(request):
            return []
        hit: list[int] = []
        max_blocks = (request.num_tokens - 1) // self.block_size
        for index in range(max_blocks):
            if index == len(request.block_hashes):
                self.extend_block_hashes(request, min(index + _HASHES_AHEAD, max_blocks))
            block_id = self.block_pool.lookup(request.block_hashes[index])
            if block_id is None:
                break
            hit.append(block_id)
        return hit

    def may_hit(self, request: Request, num_tokens: int) -> bool:
        """Whether a hit could hold this many tokens. One look at the cache: False is certain, True is not."""
        last = min(self.num_blocks_for(num_tokens), len(request.block_hashes)) - 1
        return last < 0 or self.block_pool.lookup(request.block_hashes[last]) is not None

    def admit(self, request: Request, hit: Sequence[int]) -> None:
        """Start its table with the blocks of a hit."""
        self.block_pool.acquire(hit)
        self.tables[request.request_id] = list(hit)
        request.num_published_blocks = len(hit)

    def allocate(self, request: Request, num_tokens: int) -> Sequence[int] | None:
        """Extend its table to hold its first `num_tokens` tokens.

        Returns the blocks appended, none in most steps of a decode, or None if too few are free.
        """
        table = self.tables[request.request_id]
        if num_tokens <= len(table) * self.block_size:
            return ()
        num_missing = self.num_blocks_for(num_tokens) - len(table)
        if num_missing > self.block_pool.num_free_blocks:
            return None
        block_ids = self.block_pool.allocate(num_missing)
        table += block_ids
        return block_ids

    def capacity(self, request: Request) -> int:
        """Tokens its table could hold if it took every free block."""
        return (len(self.tables[request.request_id]) + self.block_pool.num_free_blocks) * self.block_size

    def num_owed_blocks(self, request: Request) -> int:
        """Blocks that its known tokens still lack."""
        return max(0, self.num_blocks_for(request.num_tokens) - len(self.tables[request.request_id]))

    def publish(self, request: Request, num_tokens: int) -> None:
        """Offer the full blocks among its first `num_tokens` tokens (all known) to the prefix cache."""
        num_full = num_tokens // self.block_size
        first = request.num_published_blocks
        if num_full <= first or not self.block_pool.enable_caching:
            return
        table = self.tables[request.request_id]
        block_hashes = self.extend_block_hashes(request, num_full)
        for index in range(first, num_full):
            self.block_pool.publish(table[index], block_hashes[index])
        request.num_published_blocks = num_full

    def withdraw(self, request: Request) -> None:
        """Take every block of its table out of the prefix cache."""
        self.block_pool.withdraw(self.tables[request.request_id])

    def free(self, request: Request) -> None:
        """Give its blocks back, last one first, so that the tail of a sequence is evicted before its head."""
        self.block_pool.release(reversed(self.tables.pop(request.request_id)))
        request.num_published_blocks = 0

    def extend_block_hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Make `request.block_hashes` cover its first `num_blocks` blocks, and return it."""
        block_hashes = request.block_hashes
        first = len(block_hashes)
        if first < num_blocks:
            parent = block_hashes[-1] if block_hashes else root_hash(request.lora_id, request.cache_salt)
            block_hashes += chain(
                parent, request.all_token_ids[first * self.block_size : num_blocks * self.block_size], self.block_size
            )
        return block_hashes

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Prove pool and tables, and that cached blocks hold what their hash says. Raises AssertionError."""
        self.block_pool.check_integrity(self.tables)
        for request_id, table in self.tables.items():
            request = requests[request_id]
            if len(table) * self.block_size < request.num_computed_tokens:
                raise AssertionError(f"{request!r} has only {len(table)} blocks of {self.block_size} tokens")
            for index, block_id in enumerate(table):
                block_hash = self.block_pool.block_hash(block_id)
                if block_hash is not None and block_hash not in request.block_hashes[index : index + 1]:
                    raise AssertionError(f"block {block_id} of {request!r} carries the hash of other content")

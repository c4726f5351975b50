"""What lies before a request that comes now: tokens to compute first, and decodes that share its steps."""

from dataclasses import dataclass

from scheduler.kv_cache_manager import KVCacheManager
from scheduler.request import Request
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Backlog:
    """As of now."""

    num_tokens: int
    """Tokens that chunks and waiting requests owe before their next output, less what the prefix cache gives."""
    num_decodes: int
    decode_context: int
    """Sum over the decoding requests of the tokens that each attends to."""


def measure(scheduler: Scheduler) -> Backlog:
    """Goes through all requests: to be asked some times a second, not once a step.

    A waiting request is expected to find in the cache what is there now, and what those before it will have left.
    """
    kv = scheduler.kv_cache_manager
    num_tokens = num_decodes = decode_context = 0
    expected: set[bytes] = set()
    for request in scheduler.running:
        if request.is_decoding:
            num_decodes += 1
            decode_context += request.num_computed_tokens
        else:
            num_tokens += request.num_tokens - request.num_computed_tokens
            if kv.block_pool.enable_caching:
                expected.update(kv.extend_block_hashes(request, request.num_tokens // kv.block_size))
    for request in scheduler.waiting:
        num_tokens += request.num_tokens - _expected_hit(kv, request, expected)
    return Backlog(num_tokens, num_decodes, decode_context)


def _expected_hit(kv: KVCacheManager, request: Request, expected: set[bytes]) -> int:
    """Tokens, by bisection: whoever holds a block mostly holds those before it, for tails are evicted first."""
    if not kv.uses_cache(request):
        return 0
    block_hashes = kv.extend_block_hashes(request, request.num_tokens // kv.block_size)
    low, high = 0, (request.num_tokens - 1) // kv.block_size
    while low < high:
        middle = (low + high + 1) // 2
        block_hash = block_hashes[middle - 1]
        if block_hash in expected or kv.block_pool.lookup(block_hash) is not None:
            low = middle
        else:
            high = middle - 1
    expected.update(block_hashes)
    return low * kv.block_size

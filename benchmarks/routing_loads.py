"""What routers are compared on: prompts that share beginnings, some far more often than others."""

import json
import random
from pathlib import Path

from benchmarks.workloads import PlannedRequest, Workload

PREFIX_TOKENS = 1024
NUM_PREFIXES = 12
TAIL_TOKENS = 64
OUTPUT_TOKENS = 8
_LOW, _HIGH = 3, 259
_BLOCK_TOKENS = 16
"""What a block of 512 tokens of the trace is scaled to."""


def _ids(seed: str, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(_LOW, _HIGH) for _ in range(num_tokens)]


def zipf(seed: str, count: int, rate: float, exponent: float) -> Workload:
    """Poisson arrivals, `rate` a second. The k-th most frequent prefix has the weight 1 / k ** `exponent`.

    The prefixes are always the same; which requests come when changes with the seed.
    """
    rng = random.Random(seed)
    prefixes = [_ids(f"prefix {rank}", PREFIX_TOKENS) for rank in range(NUM_PREFIXES)]
    weights = [1 / (rank + 1) ** exponent for rank in range(NUM_PREFIXES)]
    now, requests = 0.0, []
    for index in range(count):
        now += rng.expovariate(rate)
        prompt = rng.choices(prefixes, weights)[0] + _ids(f"{seed} {index}", TAIL_TOKENS)
        requests.append(PlannedRequest("req", prompt, len(prompt), OUTPUT_TOKENS, now))
    return Workload("zipf", requests)


def mooncake(path: Path, seed: str, count: int, rate: float, max_tokens: int) -> Workload:
    """About `count` requests of a Mooncake trace (FAST 2025): whole conversations, which the seed draws.

    In order, with times scaled to `rate` requests a second and lengths to 1/32; prompts are cut at `max_tokens`.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    conversations: dict[int, list[int]] = {}
    for index, line in enumerate(lines):
        # All begin with the block of the system's prompt; the next one tells conversations apart.
        conversations.setdefault(line["hash_ids"][:2][-1], []).append(index)
    drawn = list(conversations.values())
    random.Random(seed).shuffle(drawn)
    chosen: list[int] = []
    while len(chosen) < count and drawn:
        chosen += drawn.pop()
    chosen.sort()
    began, seconds = lines[chosen[0]]["timestamp"], lines[chosen[-1]]["timestamp"] - lines[chosen[0]]["timestamp"]
    requests = []
    for line in (lines[index] for index in chosen):
        prompt = [token for block in line["hash_ids"] for token in _ids(f"block {block}", _BLOCK_TOKENS)]
        prompt = prompt[: min(max_tokens, max(1, line["input_length"] * _BLOCK_TOKENS // 512))]
        at = (line["timestamp"] - began) / seconds * len(chosen) / rate
        requests.append(PlannedRequest("req", prompt, len(prompt), OUTPUT_TOKENS, at))
    return Workload("mooncake", requests)

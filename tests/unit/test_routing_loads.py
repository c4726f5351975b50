"""The loads that routers are compared on."""

import json
from collections import Counter
from pathlib import Path

from benchmarks.routing_loads import NUM_PREFIXES, PREFIX_TOKENS, TAIL_TOKENS, mooncake, zipf


def test_zipf_prefixes_are_the_same_in_every_run_and_tails_are_not() -> None:
    first, second = zipf("1", 400, 20.0, 1.4), zipf("2", 400, 20.0, 1.4)
    prefixes = Counter(tuple(request.prompt[:PREFIX_TOKENS]) for request in first.requests)
    assert len(prefixes) == NUM_PREFIXES
    assert prefixes.keys() == {tuple(request.prompt[:PREFIX_TOKENS]) for request in second.requests}
    assert max(prefixes.values()) > 0.35 * 400
    tails = {tuple(request.prompt[PREFIX_TOKENS:]) for load in (first, second) for request in load.requests}
    assert len(tails) == 800
    assert {len(request.prompt) for request in first.requests} == {PREFIX_TOKENS + TAIL_TOKENS}
    assert 15 < first.requests[-1].start_at < 25


def test_conversations_of_a_trace_are_kept_whole_and_scaled(tmp_path: Path) -> None:
    """Ten conversations of three turns: each turn begins with the one before it."""
    lines = []
    for turn in range(3):
        for conversation in range(10):
            blocks = [0, *(100 * conversation + block for block in range(1, 3 + turn))]
            at = 1000 * (10 * turn + conversation)
            lines.append(json.dumps({"timestamp": at, "input_length": 512 * len(blocks) - 256, "hash_ids": blocks}))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    requests = mooncake(path, "1", 12, 4.0, max_tokens=60).requests
    assert len(requests) == 12
    assert [request.num_prompt_tokens for request in requests] == [40] * 4 + [56] * 4 + [60] * 4
    for early, late in zip(requests[:4], requests[4:8], strict=True):
        assert early.prompt[:32] == late.prompt[:32]
    assert requests[0].start_at == 0.0
    assert requests[-1].start_at == 3.0

"""A stand-in for the decoder whose next token is a hash of the whole context, read back through the paged cache.

Its one "KV cache" holds token ids, so a wrong slot, block, position or input shows in the tokens.
"""

import torch

from workers.attention.metadata import AttentionMetadata

VOCAB_SIZE = 97


def next_token(tokens: list[int]) -> int:
    """The greedy continuation of a context."""
    value = len(tokens)
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCAB_SIZE


def continuation(tokens: list[int], count: int) -> list[int]:
    """The next `count` greedy tokens."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]


class CountingModel:
    """Forward gives [num_tokens, 1]: the next token of every row, -1 in rows whose logits are to be NaN."""

    def __init__(self, block_size: int, broken_tokens: frozenset[int] = frozenset()) -> None:
        self.block_size = block_size
        self.broken_tokens = broken_tokens
        """A row whose own token is one of these gives NaN."""
        self.num_forwards = 0

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        self.num_forwards += 1
        cache = kv_caches[0]
        cache[metadata.slot_mapping] = input_ids
        hidden: list[int] = []
        starts = metadata.query_start_loc.tolist()
        for request, seq_len in enumerate(metadata.seq_lens.tolist()):
            query_len = starts[request + 1] - starts[request]
            for position in range(seq_len - query_len, seq_len):
                row = len(hidden)
                assert int(positions[row]) == position
                blocks = metadata.block_table[request].tolist()
                context = [
                    int(cache[blocks[p // self.block_size] * self.block_size + p % self.block_size])
                    for p in range(position + 1)
                ]
                hidden.append(-1 if context[-1] in self.broken_tokens else next_token(context))
        return torch.tensor(hidden, dtype=torch.float32).unsqueeze(1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.squeeze(1).to(torch.int64)
        logits = torch.nn.functional.one_hot(tokens.clamp(min=0), VOCAB_SIZE).float()
        logits[tokens < 0] = torch.nan
        return logits

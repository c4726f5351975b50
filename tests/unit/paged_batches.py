"""Drives a model or an attention backend through a paged cache whose blocks are handed out in random order."""

import random
from collections.abc import Sequence

import torch

from workers.attention import AttentionBackend, AttentionMetadata
from workers.kv_cache import allocate_kv_caches
from workers.models import DecoderModel
from workers.tensor_parallel import TensorParallel


def build_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: str = "cpu",
) -> AttentionMetadata:
    """Metadata of requests whose block tables are as long as needed or longer."""
    slots = [
        blocks[position // block_size] * block_size + position % block_size
        for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    width = max(map(len, block_tables))
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.tensor(
            [[*blocks, *[0] * (width - len(blocks))] for blocks in block_tables], dtype=torch.int32, device=device
        ),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        host_query_lens=list(query_lens),
        host_seq_lens=list(seq_lens),
    )


def shuffled_tables(seq_lens: Sequence[int], block_size: int, seed: int) -> tuple[list[list[int]], int]:
    """(block tables that interleave at random, number of blocks); a few blocks belong to nobody."""
    counts = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(counts) + 3
    ids = random.Random(seed).sample(range(num_blocks), num_blocks)
    return [[ids.pop() for _ in range(count)] for count in counts], num_blocks


def chunked_logits(
    model: DecoderModel,
    tp: TensorParallel,
    backend: AttentionBackend,
    sequences: Sequence[Sequence[int]],
    chunks: Sequence[Sequence[int]],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Logits [length, vocab] of each sequence, computed in steps: step i takes chunks[r][i] tokens of sequence r.

    A sequence is in no step beyond its list of chunks, so steps mix chunks and single tokens.
    """
    tables, num_blocks = shuffled_tables([len(s) for s in sequences], block_size, seed=7)
    caches = allocate_kv_caches(
        backend,
        model.num_layers,
        num_blocks,
        block_size,
        model.num_kv_heads,
        model.head_dim,
        dtype,
        torch.device("cpu"),
    )
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in range(max(map(len, chunks))):
        rows = [r for r in range(len(sequences)) if step < len(chunks[r])]
        query_lens = [chunks[r][step] for r in rows]
        seq_lens = [done[r] + n for r, n in zip(rows, query_lens, strict=True)]
        ids = [t for r, end, n in zip(rows, seq_lens, query_lens, strict=True) for t in sequences[r][end - n : end]]
        positions = [p for end, n in zip(seq_lens, query_lens, strict=True) for p in range(end - n, end)]
        metadata = build_metadata(query_lens, seq_lens, [tables[r] for r in rows], block_size)
        hidden = model.forward(torch.tensor(ids), torch.tensor(positions), caches, metadata)
        full = tp.gather_vocab(model.compute_logits(hidden), model.vocab_shard_sizes)
        for r, end, part in zip(rows, seq_lens, full.split(query_lens), strict=True):
            done[r] = end
            logits[r].append(part)
    return [torch.cat(parts) for parts in logits]

"""Naive attention in float64, one request at a time: what every backend must equal."""

from collections.abc import Sequence
from typing import Any

import torch
from paged_batches import build_metadata, shuffled_tables

from workers.attention import AttentionBackend


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """q [rows, heads, dim], the last tokens of a sequence with k and v [tokens, kv_heads, dim] -> like q, float64."""
    rows, tokens, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    at = torch.arange(tokens - rows, tokens)[:, None]
    keys = torch.arange(tokens)
    hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def write(
    backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, step: Any
) -> torch.Tensor:
    """Puts k and v into the cache, rotated by nothing -> q as the backend hands it back."""
    cos_sin = torch.tensor([1.0, 0.0]).repeat(len(q), 1)[:, :, None].expand(-1, -1, q.shape[2]).to(q.dtype)
    qkv = torch.cat((q, k, v), dim=1).flatten(1).to(cache.device)
    return backend.rotate_and_write(qkv, cos_sin.contiguous().to(cache.device), None, q.shape[1], cache, step)


def largest_error(
    backend: AttentionBackend,
    query_lens: Sequence[int],
    contexts: Sequence[int],
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    stale: float = float("nan"),
) -> float:
    """Largest absolute difference from dense attention over one mixed step.

    The contexts' KV is written by a step of its own, through permuted block tables. All slots hold `stale` before.
    """
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    tables, num_blocks = shuffled_tables(seq_lens, block_size, seed)
    keys = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
    values = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
    q = torch.randn(sum(query_lens), query_heads, head_dim, generator=generator).to(dtype)
    scale = head_dim**-0.5
    shape = backend.kv_cache_shape(num_blocks, block_size, kv_heads, head_dim)
    cache = torch.full(shape, stale, dtype=dtype, device=device)

    before = [i for i, c in enumerate(contexts) if c]
    if before:
        lens = [contexts[i] for i in before]
        metadata = build_metadata(lens, lens, [tables[i] for i in before], block_size, device)
        step = backend.prepare(metadata, cache, window)
        k, v = (torch.cat([x[i][: contexts[i]] for i in before]) for x in (keys, values))
        write(backend, torch.zeros(len(k), query_heads, head_dim, dtype=dtype), k, v, cache, step)

    metadata = build_metadata(query_lens, seq_lens, tables, block_size, device)
    step = backend.prepare(metadata, cache, window)
    k, v = (torch.cat([x[i][c:] for i, c in enumerate(contexts)]) for x in (keys, values))
    out = backend.attend(write(backend, q, k, v, cache, step), cache, step, scale).cpu()
    assert out.shape == q.shape
    expected = [
        dense_attention(rows, keys[i], values[i], scale, window) for i, rows in enumerate(q.split(list(query_lens)))
    ]
    return float((out.double() - torch.cat(expected)).abs().max())

"""Naive attention in float64, one request at a time: what every backend must equal."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from paged_batches import build_metadata, shuffled_tables

from workers.attention import AttentionBackend
from workers.rope import HeadNorms


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


def rotated(x: torch.Tensor, angles: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    """x [tokens, heads, dim] as complex numbers turned by angles [tokens, dim / 2], after RMSNorm; float64."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


@st.composite
def batches(draw: st.DrawFn, head_dims: Sequence[int], block_sizes: Sequence[int]) -> dict[str, Any]:
    """Arguments of `largest_error`."""
    num_reqs = draw(st.integers(1, 6))
    kv_heads = draw(st.integers(1, 3))
    lens = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 70))
    contexts = st.one_of(st.just(0), st.integers(0, 90), st.integers(200, 600))
    return {
        "query_lens": draw(st.lists(lens, min_size=num_reqs, max_size=num_reqs)),
        "contexts": draw(st.lists(contexts, min_size=num_reqs, max_size=num_reqs)),
        "query_heads": kv_heads * draw(st.integers(1, 9)),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from(head_dims)),
        "block_size": draw(st.sampled_from(block_sizes)),
        "window": draw(st.one_of(st.none(), st.integers(1, 100), st.integers(100, 400))),
        "turns": draw(st.booleans()),
        "norms": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


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
    turns: bool = False,
    norms: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    stale: float = float("nan"),
) -> float:
    """Largest absolute difference from dense attention over one mixed step.

    The contexts' KV is written by a step of its own, through permuted block tables. All slots hold `stale` before.
    `turns`: queries and keys are rotated by random angles; `norms`: they are normed before.
    """
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    tables, num_blocks = shuffled_tables(seq_lens, block_size, seed)
    heads = query_heads + 2 * kv_heads
    qkv = [torch.randn(n, heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
    angles = [torch.randn(n, head_dim // 2, generator=generator).double() * turns for n in seq_lens]
    weights = [(1 + 0.3 * torch.randn(head_dim, generator=generator)).to(dtype) for _ in "qk"]
    head_norms = HeadNorms(*(w.to(device) for w in weights), 1e-5) if norms else None
    scale = head_dim**-0.5
    shape = backend.kv_cache_shape(num_blocks, block_size, kv_heads, head_dim)
    cache = torch.full(shape, stale, dtype=dtype, device=device)

    def written(rows: Sequence[slice], lens: Sequence[int], requests: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """The queries that come back of these rows of the requests, and the step."""
        metadata = build_metadata(
            [r.stop - r.start for r in rows], lens, [tables[i] for i in requests], block_size, device
        )
        step = backend.prepare(metadata, cache, window)
        packed = torch.cat([qkv[i][r] for i, r in zip(requests, rows, strict=True)]).flatten(1)
        turned = torch.cat([cos_sin(angles[i][r]) for i, r in zip(requests, rows, strict=True)]).to(dtype)
        return backend.rotate_and_write(
            packed.to(device), turned.to(device), head_norms, query_heads, cache, step
        ), step

    before = [i for i, c in enumerate(contexts) if c]
    if before:
        written([slice(0, contexts[i]) for i in before], [contexts[i] for i in before], before)
    rows = [slice(c, n) for c, n in zip(contexts, seq_lens, strict=True)]
    q, step = written(rows, seq_lens, range(len(seq_lens)))
    out = backend.attend(q, cache, step, scale).cpu()
    assert out.shape == (sum(query_lens), query_heads, head_dim)

    expected = []
    for x, turned, new in zip(qkv, angles, rows, strict=True):
        q_norm, k_norm = ((w, 1e-5) if norms else None for w in weights)
        q, k, v = x.split([query_heads, kv_heads, kv_heads], dim=1)
        q, k = rotated(q[new], turned[new], q_norm), rotated(k, turned, k_norm)
        expected.append(dense_attention(q, k, v, scale, window))
    return float((out.double() - torch.cat(expected)).abs().max())


def cos_sin(angles: torch.Tensor) -> torch.Tensor:
    """angles [tokens, dim / 2] -> [tokens, 2, dim], rows as `workers.rope.cos_sin_table` makes them."""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)

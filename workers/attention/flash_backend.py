"""A thin leaf over the FlashAttention 2 package: its varlen call reads paged KV by block table."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workers.attention.metadata import AttentionMetadata
from workers.rope import HeadNorms, norm_and_rotate


@dataclass(frozen=True, slots=True)
class FlashStep:
    """One step as the kernel wants it."""

    metadata: AttentionMetadata
    cu_seqlens_k: torch.Tensor  # [num_reqs + 1] int32
    window_size: tuple[int, int]


class FlashAttention:
    """Cache layout [2, num_blocks, block_size, num_kv_heads, head_dim].

    FlashAttention 2 pages only in blocks of a multiple of 256 tokens.
    """

    name = "flash"
    block_size = 256
    block_size_multiple = 256

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Raises ValueError naming what is missing: a CUDA device, a half-precision dtype, the package."""
        if device.type != "cuda":
            raise ValueError(f"attention backend 'flash' needs a CUDA device; this one is {device}")
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"attention backend 'flash' needs float16 or bfloat16; the dtype is {dtype}")
        if head_dim > 256 or head_dim % 8:
            raise ValueError(f"attention backend 'flash' needs a head_dim of a multiple of 8 up to 256, not {head_dim}")
        try:
            module = importlib.import_module("flash_attn")
        except ImportError as error:
            raise ValueError(f"attention backend 'flash' needs the package flash-attn ({error})") from error
        self._varlen: Callable[..., Any] = module.flash_attn_varlen_func

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        if block_size % self.block_size_multiple:
            raise ValueError(
                f"block_size is {block_size}; attention backend 'flash' needs a multiple of {self.block_size_multiple}"
            )
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def prepare(self, metadata: AttentionMetadata, kv_cache: torch.Tensor, window: int | None) -> FlashStep:
        cu_seqlens_k = torch.nn.functional.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        # The kernel counts the keys left of a query, without its own.
        return FlashStep(metadata, cu_seqlens_k, (-1, -1) if window is None else (window - 1, 0))

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: HeadNorms | None,
        num_query_heads: int,
        kv_cache: torch.Tensor,
        step: FlashStep,
    ) -> torch.Tensor:
        q, k, v = norm_and_rotate(qkv, cos_sin, norms, num_query_heads, kv_cache.shape[3])
        slots = step.metadata.slot_mapping
        keys, values = kv_cache.flatten(1, 2)  # [num_slots, num_kv_heads, head_dim] each
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
        return q

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, step: FlashStep, scale: float) -> torch.Tensor:
        metadata = step.metadata
        out: torch.Tensor = self._varlen(
            q,
            kv_cache[0],
            kv_cache[1],
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=step.cu_seqlens_k,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=scale,
            causal=True,  # aligned to the bottom right: the last query row sees every key
            window_size=step.window_size,
            block_table=metadata.block_table,
        )
        return out

"""Paged attention in C++ for the CPU: one call a layer for chunks and decodes together, one for what precedes it.

A query row's result depends on its own sequence alone, to the bit: neither on the batch nor on how the prompt was
cut into chunks. It needs no mask and copies no keys.
"""

import ctypes

import torch

from workers.attention.metadata import AttentionMetadata
from workers.kernels.build import BuildError
from workers.kernels.library import FLOAT, POINTER, SIZE, SUFFIXES, library
from workers.rope import HeadNorms

_PAGE = 16
"""Keys that lie side by side in the cache."""
_MAX_HEAD_DIM = 256
_MAX_GROUP = 48
"""Query heads that may share a KV head: they are computed together."""
_PIECE_WORDS, _MERGE_WORDS = 8, 4
"""int32 of `Piece` and `Merge` in attention_plan.h."""


class _Step(ctypes.Structure):
    """`Step` in attention_plan.h."""

    _fields_ = (
        ("block_table", POINTER),
        ("table_stride", SIZE),
        ("query_start", POINTER),
        ("seq_lens", POINTER),
        ("requests", SIZE),
        ("query_heads", SIZE),
        ("kv_heads", SIZE),
        ("head_dim", SIZE),
        ("block_pages", SIZE),
        ("window", SIZE),
        ("pieces", POINTER),
        ("num_pieces", SIZE),
        ("merges", POINTER),
        ("num_merges", SIZE),
        ("partials", POINTER),
        ("num_partials", SIZE),
        ("work", SIZE),
    )


class NativeStep:
    """One step's work, cut into pieces for the threads. Holds the memory that the pieces lie in."""

    def __init__(self, metadata: AttentionMetadata, kv_cache: torch.Tensor, window: int | None) -> None:
        self.metadata = metadata
        self.slots = metadata.slot_mapping.data_ptr()
        _, self.kv_heads, self.block_pages, _, _, self.head_dim = kv_cache.shape
        self._window = window or 0
        self._held: list[torch.Tensor] = []
        self._planned: _Step | None = None

    def address(self, num_query_heads: int) -> int:
        """Of the plan, which is made for the first layer. Raises ValueError for heads it cannot serve."""
        if self._planned is None:
            self._planned = self._plan(num_query_heads)
        return ctypes.addressof(self._planned)

    def _plan(self, num_query_heads: int) -> _Step:
        if num_query_heads % self.kv_heads or num_query_heads > _MAX_GROUP * self.kv_heads:
            raise ValueError(
                f"attention backend 'native' needs up to {_MAX_GROUP} query heads for every KV head,"
                f" not {num_query_heads} for {self.kv_heads}"
            )
        metadata = self.metadata
        step = _Step(
            block_table=metadata.block_table.data_ptr(),
            table_stride=metadata.block_table.stride(0),
            query_start=metadata.query_start_loc.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            requests=metadata.seq_lens.shape[0],
            query_heads=num_query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_pages=self.block_pages,
            window=self._window,
        )
        plan = library().function("attention_plan", POINTER)
        plan(ctypes.addressof(step))  # counts
        pieces = torch.empty(step.num_pieces * _PIECE_WORDS, dtype=torch.int32)
        merges = torch.empty(step.num_merges * _MERGE_WORDS, dtype=torch.int32)
        partials = torch.empty(step.num_partials, dtype=torch.float32)
        self._held = [pieces, merges, partials]
        step.pieces, step.merges, step.partials = (held.data_ptr() for held in self._held)
        plan(ctypes.addressof(step))
        return step


class NativeAttention:
    """Cache layout [num_blocks, num_kv_heads, pages of 16 keys a block, keys and values, 16, head_dim].

    What lies in a page is the kernels' own (paged.h): any two tokens' dimensions interleave.
    """

    name = "native"
    block_size = _PAGE
    block_size_multiple = _PAGE

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Raises ValueError naming what is missing: a CPU, a dtype or head_dim with kernels, a compiler."""
        if device.type != "cpu":
            raise ValueError(f"attention backend 'native' needs a CPU; this device is {device}")
        if dtype not in SUFFIXES:
            raise ValueError(f"attention backend 'native' needs float32 or bfloat16; the dtype is {dtype}")
        if head_dim > _MAX_HEAD_DIM or head_dim % _PAGE:
            raise ValueError(
                f"attention backend 'native' needs a head_dim of a multiple of {_PAGE} up to {_MAX_HEAD_DIM},"
                f" not {head_dim}"
            )
        suffix = SUFFIXES[dtype]
        try:
            self._attend = library().function("attend" + suffix, POINTER, SIZE, POINTER, POINTER, FLOAT, POINTER)
        except (BuildError, OSError) as error:
            raise ValueError(f"attention backend 'native' needs its compiled kernels ({error})") from error
        self._rotate_and_write = library().function(
            "rotate_and_write" + suffix,
            POINTER, POINTER, POINTER, POINTER, FLOAT, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE, SIZE,
        )  # fmt: skip

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        if block_size % _PAGE:
            raise ValueError(f"block_size is {block_size}; attention backend 'native' needs a multiple of {_PAGE}")
        return (num_blocks, num_kv_heads, block_size // _PAGE, 2, _PAGE, head_dim)

    def prepare(self, metadata: AttentionMetadata, kv_cache: torch.Tensor, window: int | None) -> NativeStep:
        return NativeStep(metadata, kv_cache, window)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: HeadNorms | None,
        num_query_heads: int,
        kv_cache: torch.Tensor,
        step: NativeStep,
    ) -> torch.Tensor:
        tokens, width = qkv.shape
        self._rotate_and_write(
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            None if norms is None else norms.q_weight.data_ptr(),
            None if norms is None else norms.k_weight.data_ptr(),
            0.0 if norms is None else norms.eps,
            kv_cache.data_ptr(),
            step.slots,
            tokens,
            num_query_heads,
            step.kv_heads,
            step.head_dim,
            step.block_pages,
        )
        return qkv.as_strided((tokens, num_query_heads, step.head_dim), (width, step.head_dim, 1))

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, step: NativeStep, scale: float) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        self._attend(q.data_ptr(), q.stride(0), kv_cache.data_ptr(), step.address(q.shape[1]), scale, out.data_ptr())
        return out

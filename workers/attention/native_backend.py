"""Paged attention in C++ for the CPU: one call a layer for chunks and decodes together, one for what precedes it.

A query row's result depends on its own sequence alone, to the bit: neither on the batch nor on how the prompt was
cut into chunks. It needs no mask and copies no keys.
"""

import ctypes

import torch

from workers.attention.metadata import AttentionMetadata
from workers.kernels.build import BuildError
from workers.kernels.library import FLOAT, LONG_WORK, POINTER, SIZE, SUFFIXES, library
from workers.rope import HeadNorms

_PAGE = 16
"""Keys that lie side by side in the cache."""
_MAX_HEAD_DIM = 256
"""As in paged.h."""
_MAX_GROUP = 48
"""Query heads that may share a KV head: they are computed together, as PIECE_ROWS rows in attention_plan.h at most."""
_PIECE_WORDS, _MERGE_WORDS = 8, 4
"""int32 of `Piece` and `Merge` in attention_plan.h."""
_BLOCK_WORK = 4 * 256
"""What a row's dimension costs over a block of 256 keys, weights included, in multiplications of a product."""


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
        """Raises ValueError naming what would be misread."""
        _check_metadata(metadata, kv_cache)
        self.metadata = metadata
        self.slots = metadata.slot_mapping.data_ptr()
        (self.tokens,) = metadata.slot_mapping.shape
        self.cache_shape = kv_cache.shape
        _, self.kv_heads, self.block_pages, _, _, self.head_dim = kv_cache.shape
        self.is_long = False
        """Whether attention over it gives up the interpreter's lock; known from `address` on."""
        self.checked: tuple[torch.Tensor | None, ...] = (None, None, None)
        """The rotation, the cache and the queries of the last layer: objects that are known to be right."""
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
        self.is_long = step.work * self.head_dim * _BLOCK_WORK >= LONG_WORK
        return step


class NativeAttention:
    """Cache layout [num_blocks, num_kv_heads, pages of 16 keys a block, keys and values, 16, head_dim].

    What lies in a page is the kernels' own (paged.h): any two tokens' dimensions interleave.
    """

    name = "native"
    block_size = _PAGE
    block_size_multiple = _PAGE

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int, group_heads: int = 1) -> None:
        """Raises ValueError naming what is missing: a CPU, a dtype or sizes with kernels, a compiler."""
        if device.type != "cpu":
            raise ValueError(f"attention backend 'native' needs a CPU; this device is {device}")
        if dtype not in SUFFIXES:
            raise ValueError(f"attention backend 'native' needs float32 or bfloat16; the dtype is {dtype}")
        if head_dim > _MAX_HEAD_DIM or head_dim % _PAGE:
            raise ValueError(
                f"attention backend 'native' needs a head_dim of a multiple of {_PAGE} up to {_MAX_HEAD_DIM},"
                f" not {head_dim}"
            )
        if group_heads > _MAX_GROUP:
            raise ValueError(
                f"attention backend 'native' needs up to {_MAX_GROUP} query heads for every KV head, not {group_heads}"
            )
        self._dtype = dtype
        suffix = SUFFIXES[dtype]
        arguments = POINTER, SIZE, POINTER, POINTER, FLOAT, POINTER
        try:
            self._attend = library().function("attend" + suffix, *arguments)
            self._attend_long = library().function("attend" + suffix, *arguments, releases_lock=True)
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
        """As the protocol says; raises ValueError naming what would be misread."""
        tokens, width = step.tokens, (num_query_heads + 2 * step.kv_heads) * step.head_dim
        if qkv.shape != (tokens, width) or qkv.dtype is not self._dtype or not qkv.is_contiguous():
            raise _misread("queries, keys and values", qkv, self._dtype, (tokens, width))
        if cos_sin is not step.checked[0]:
            self._check("rotations", cos_sin, (tokens, 2, step.head_dim))
        self._check("the cache", kv_cache, step.cache_shape)
        if norms is not None:
            self._check("the queries' norm", norms.q_weight, (step.head_dim,))
            self._check("the keys' norm", norms.k_weight, (step.head_dim,))
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
        q = qkv.as_strided((tokens, num_query_heads, step.head_dim), (width, step.head_dim, 1))
        step.checked = (cos_sin, kv_cache, q)
        return q

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, step: NativeStep, scale: float) -> torch.Tensor:
        """As the protocol says; raises ValueError naming what would be misread."""
        _, known_cache, known_q = step.checked
        if kv_cache is not known_cache:
            self._check("the cache", kv_cache, step.cache_shape)
        heads = q.shape[1]
        if q is not known_q and (
            q.shape != (step.tokens, heads, step.head_dim)
            or q.dtype is not self._dtype
            or q.stride()[1:] != (step.head_dim, 1)
        ):
            raise _misread("queries", q, self._dtype, (step.tokens, heads, step.head_dim))
        address = step.address(heads)
        attend = self._attend_long if step.is_long else self._attend
        out = q.new_empty((step.tokens, heads, step.head_dim))
        attend(q.data_ptr(), q.stride(0), kv_cache.data_ptr(), address, scale, out.data_ptr())
        return out

    def _check(self, what: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
        if x.shape != shape or x.dtype is not self._dtype or not x.is_contiguous():
            raise _misread(what, x, self._dtype, shape)


def _check_metadata(metadata: AttentionMetadata, kv_cache: torch.Tensor) -> None:
    if kv_cache.dim() != 6 or kv_cache.shape[3:5] != (2, _PAGE):
        raise ValueError(f"a cache of {list(kv_cache.shape)} is not laid out by attention backend 'native'")
    requests, width = len(metadata.host_seq_lens), metadata.block_table.shape[-1]
    for what, x, dtype, shape in (
        ("query_start_loc", metadata.query_start_loc, torch.int32, (requests + 1,)),
        ("seq_lens", metadata.seq_lens, torch.int32, (requests,)),
        ("block_table", metadata.block_table, torch.int32, (requests, width)),
        ("slot_mapping", metadata.slot_mapping, torch.int64, (sum(metadata.host_query_lens),)),
    ):
        if x.shape != shape or x.dtype is not dtype or not x.is_contiguous():
            raise _misread(what, x, dtype, shape)
    if width * kv_cache.shape[2] * _PAGE < metadata.max_seq_len:
        raise ValueError(f"a block table of {width} columns ends before token {metadata.max_seq_len}")


def _misread(what: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"attention backend 'native' needs {what} of {dtype} {list(shape)} without gaps,"
        f" not {x.dtype} {list(x.shape)} with strides {list(x.stride())}"
    )

"""Attention in plain torch: the reference, and the leaf that runs wherever torch does.

Rows are grouped by query length, and by KV length up to a factor of two, so that a step needs one gather and one
scaled_dot_product_attention a group, whatever the number of decodes. Softmax runs in float32 inside it.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from workers.attention.metadata import AttentionMetadata
from workers.device import to_device
from workers.rope import HeadNorms, norm_and_rotate

# Longest query (a decode and its drafts) that is batched with others of its length; above it a call is busy by itself.
_SHORT = 16
# Query rows of a long chunk that share one mask: bounds the mask, and skips keys that none of these rows may see.
_TILE = 1024

# (request, its first query row, keys up to its last row's own), of a request's rows or of a tile of them
_Member = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Equally many query rows of each of some requests, attended in one call."""

    rows: slice | torch.Tensor  # where the group's query rows lie in the batch, request after request
    num_reqs: int
    query_len: int
    kv_rows: torch.Tensor  # [num_reqs * num_kv_heads * blocks], rows of [num_blocks * num_kv_heads, ...]
    mask: torch.Tensor | None  # [num_reqs * num_kv_heads or 1, 1, query_len, keys]; None: causal, from the first key


@dataclass(frozen=True, slots=True)
class TorchStep:
    """One step's indices, shared by the layers."""

    slots: torch.Tensor  # [num_tokens * num_kv_heads], rows of a cache seen as [num_blocks * heads * block_size, dim]
    groups: list[RowGroup]
    fresh_blocks: torch.Tensor | None  # blocks that this step starts and leaves partly unwritten


class TorchAttention:
    """Cache layout [2, num_blocks, num_kv_heads, block_size, head_dim]: a head's keys are contiguous in a block."""

    name = "torch"
    block_size = 16
    block_size_multiple = 1

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def prepare(self, metadata: AttentionMetadata, kv_cache: torch.Tensor, window: int | None) -> TorchStep:
        _, _, num_kv_heads, block_size, _ = kv_cache.shape
        slots = metadata.slot_mapping
        blocks = slots.div(block_size, rounding_mode="floor")
        rows = _head_rows(blocks[:, None], num_kv_heads) * block_size + slots.remainder(block_size)[:, None]
        groups = [
            _row_group(members, query_len, metadata, kv_cache, window)
            for query_len, members in _grouped(metadata, block_size)
        ]
        return TorchStep(rows.flatten(), groups, _fresh_blocks(metadata, block_size))

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: HeadNorms | None,
        num_query_heads: int,
        kv_cache: torch.Tensor,
        step: TorchStep,
    ) -> torch.Tensor:
        q, k, v = norm_and_rotate(qkv, cos_sin, norms, num_query_heads, kv_cache.shape[2])
        if step.fresh_blocks is not None:
            # What a former owner left behind is masked, but if it is not finite even a weight of 0 spreads it.
            kv_cache.index_fill_(1, step.fresh_blocks, 0)
        keys, values = kv_cache.view(2, -1, kv_cache.shape[-1]).unbind(0)
        keys.index_copy_(0, step.slots, k.reshape(-1, k.shape[-1]))
        values.index_copy_(0, step.slots, v.reshape(-1, v.shape[-1]))
        return q

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, step: TorchStep, scale: float) -> torch.Tensor:
        if len(step.groups) == 1:
            return _attend_group(q, kv_cache, step.groups[0], scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in step.groups:
            out[group.rows] = _attend_group(q[group.rows], kv_cache, group, scale)
        return out


def _attend_group(q: torch.Tensor, kv_cache: torch.Tensor, group: RowGroup, scale: float) -> torch.Tensor:
    """Output for a group's rows q [num_reqs * query_len, num_query_heads, head_dim].

    A KV head is one entry of the batch and its query heads are the entry's heads, so keys and values are never
    repeated. Where each has a single row, the query heads become rows of one head: a key is read once for all.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    length, per_group = group.query_len, q.shape[1] // num_kv_heads
    entries = group.num_reqs * num_kv_heads
    keys, values = (
        half.reshape(-1, block_size * head_dim).index_select(0, group.kv_rows).view(entries, 1, -1, head_dim)
        for half in kv_cache
    )
    if length == 1:
        out = F.scaled_dot_product_attention(
            q.reshape(entries, 1, per_group, head_dim), keys, values, attn_mask=group.mask, scale=scale
        )
        return out.view(q.shape)
    if group.mask is None:
        keys, values = keys[:, :, :length], values[:, :, :length]
    out = F.scaled_dot_product_attention(
        q.view(group.num_reqs, length, num_kv_heads, per_group, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(entries, per_group, length, head_dim),
        keys.expand(-1, per_group, -1, -1),
        values.expand(-1, per_group, -1, -1),
        attn_mask=group.mask,
        is_causal=group.mask is None,
        scale=scale,
    )
    return out.view(group.num_reqs, num_kv_heads, per_group, length, head_dim).permute(0, 3, 1, 2, 4).reshape(q.shape)


def _grouped(metadata: AttentionMetadata, block_size: int) -> list[tuple[int, list[_Member]]]:
    """(query length, members) of each group; members of a group are in batch order."""
    short: defaultdict[tuple[int, int], list[_Member]] = defaultdict(list)
    tiles: list[tuple[int, list[_Member]]] = []
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(metadata.host_query_lens, metadata.host_seq_lens, strict=True)):
        if query_len <= _SHORT:
            short[query_len, ((seq_len - 1) // block_size).bit_length()].append((request, row, seq_len))
        else:
            for offset in range(0, query_len, _TILE):
                length = min(_TILE, query_len - offset)
                tiles.append((length, [(request, row + offset, seq_len - query_len + offset + length)]))
        row += query_len
    return [(query_len, members) for (query_len, _), members in short.items()] + tiles


def _fresh_blocks(metadata: AttentionMetadata, block_size: int) -> torch.Tensor | None:
    """A request's last block, where its first slot is written in this step and its last is not."""
    at = [
        (request, seq_len // block_size)
        for request, (query_len, seq_len) in enumerate(
            zip(metadata.host_query_lens, metadata.host_seq_lens, strict=True)
        )
        if 0 < seq_len % block_size <= query_len
    ]
    if not at:
        return None
    requests, columns = to_device(np.array(at, np.int64), metadata.block_table.device).unbind(1)
    return metadata.block_table[requests, columns].long()


def _row_group(
    members: list[_Member], length: int, metadata: AttentionMetadata, kv_cache: torch.Tensor, window: int | None
) -> RowGroup:
    num_kv_heads, block_size = kv_cache.shape[2:4]
    device = metadata.block_table.device
    requests, first_rows, kv_lens = to_device(np.array(members, np.int64), device).unbind(1)
    # With a window, reading starts at the block of the first key that the first row sees.
    reach = kv_lens.new_zeros(len(members)) if window is None else (kv_lens - length - window + 1).clamp(min=0)
    first_blocks = reach.div(block_size, rounding_mode="floor")
    num_blocks = max(_num_blocks(kv_len, length, block_size, window) for _, _, kv_len in members)
    columns = first_blocks[:, None] + torch.arange(num_blocks, device=device)
    # A shorter request repeats its own last block, so that it depends on no other's.
    columns = columns.minimum((kv_lens - 1).div(block_size, rounding_mode="floor")[:, None])
    blocks = metadata.block_table[requests[:, None], columns].long()  # [num_reqs, num_blocks]
    return RowGroup(
        rows=_rows(members, first_rows, length),
        num_reqs=len(members),
        query_len=length,
        kv_rows=_head_rows(blocks[:, None, :], num_kv_heads, dim=1).flatten(),
        mask=_mask(members, length, kv_lens, first_blocks * block_size, num_blocks * block_size, kv_cache, window),
    )


def _num_blocks(kv_len: int, length: int, block_size: int, window: int | None) -> int:
    first = 0 if window is None else max(kv_len - length - window + 1, 0) // block_size
    return -(-kv_len // block_size) - first


def _rows(members: list[_Member], first_rows: torch.Tensor, length: int) -> slice | torch.Tensor:
    start, last = members[0][1], members[-1][1]
    if last - start == (len(members) - 1) * length:  # members are in batch order, so nobody lies between
        return slice(start, last + length)
    return (first_rows[:, None] + torch.arange(length, device=first_rows.device)).flatten()


def _head_rows(blocks: torch.Tensor, num_kv_heads: int, dim: int = -1) -> torch.Tensor:
    """Block ids, with a dimension of size 1 at `dim` -> rows of [num_blocks * num_kv_heads], one a head there."""
    heads = torch.arange(num_kv_heads, device=blocks.device)
    return blocks * num_kv_heads + (heads if dim == -1 else heads[:, None])


def _mask(
    members: list[_Member],
    length: int,
    kv_lens: torch.Tensor,
    first_keys: torch.Tensor,
    num_keys: int,
    kv_cache: torch.Tensor,
    window: int | None,
) -> torch.Tensor | None:
    """0 where a row sees a key, -inf elsewhere, as `RowGroup.mask`.

    None for a first chunk of more than one row, for which the kernel's own causal mask holds and skips work.
    """
    if len(members) == 1 and 1 < length == members[0][2] and (window is None or window >= length):
        return None
    device = kv_lens.device
    queries = (kv_lens - length)[:, None] + torch.arange(length, device=device)  # [num_reqs, query_len] positions
    keys = first_keys[:, None] + torch.arange(num_keys, device=device)  # [num_reqs, keys] positions
    hidden = keys[:, None, :] > queries[:, :, None]
    if window is not None:
        hidden |= keys[:, None, :] <= queries[:, :, None] - window
    mask = torch.zeros(hidden.shape, dtype=kv_cache.dtype, device=device).masked_fill_(hidden, float("-inf"))
    # Entries of the call are (request, KV head) pairs; a single request's mask is broadcast over them.
    return mask[:, None] if len(members) == 1 else mask[:, None].repeat_interleave(kv_cache.shape[2], dim=0)

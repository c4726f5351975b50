"""The interface of an attention backend."""

from typing import Any, Protocol

import torch

from workers.attention.metadata import AttentionMetadata
from workers.rope import HeadNorms


class AttentionBackend(Protocol):
    """Paged causal attention with grouped query heads: one varlen call for chunks and decodes together."""

    @property
    def name(self) -> str:
        """The name it is selected by."""

    @property
    def block_size(self) -> int:
        """Preferred tokens a KV block; every block size it accepts is a multiple of `block_size_multiple`."""

    @property
    def block_size_multiple(self) -> int: ...

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache, keys and values together. Raises ValueError for a block size it cannot use."""

    def prepare(self, metadata: AttentionMetadata, kv_cache: torch.Tensor, window: int | None) -> Any:
        """What the two calls below share over the layers of a step (indices, masks); one call a step and window.

        `window`: keys a query sees, its own included; None: all. `kv_cache` gives the layout only.
        """

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: HeadNorms | None,
        num_query_heads: int,
        kv_cache: torch.Tensor,
        step: Any,
    ) -> torch.Tensor:
        """Put the keys and values of qkv into their slots -> its queries [num_tokens, num_query_heads, head_dim].

        qkv [num_tokens, (num_query_heads + 2 * num_kv_heads) * head_dim], contiguous, may be overwritten. Queries
        and keys are normed, where `norms` are given, and rotated, as `workers.rope.norm_and_rotate` does.
        """

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, step: Any, scale: float) -> torch.Tensor:
        """q [num_tokens, num_query_heads, head_dim] over what the cache holds -> the same shape."""

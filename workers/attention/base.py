"""The interface of an attention backend."""

from typing import Any, Protocol

import torch

from workers.attention.metadata import AttentionMetadata


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
        """What `write_kv` and `attend` share over the layers of a step (indices, masks); one call a step and window.

        `window`: keys a query sees, its own included; None: all. `kv_cache` gives the layout only.
        """

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, step: Any) -> None:
        """Put k and v [num_tokens, num_kv_heads, head_dim] into their slots."""

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, step: Any, scale: float) -> torch.Tensor:
        """q [num_tokens, num_query_heads, head_dim] over what the cache holds -> the same shape."""

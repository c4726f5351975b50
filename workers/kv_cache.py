"""Size and allocation of this rank's paged KV cache: one tensor a layer."""

import math

import torch

from workers.attention.base import AttentionBackend
from workers.host_memory import HugePages, touch_behind


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of `block_size` tokens takes on this rank, over all layers, keys and values."""
    return 2 * num_layers * num_kv_heads * head_dim * block_size * dtype.itemsize


def allocate_kv_caches(
    backend: AttentionBackend,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """One cache a layer in the backend's layout, zeroed: a kernel may read past a sequence's end within its last
    block, and 0 times garbage must not be NaN. On a CPU the memory is not waited for.

    Raises ValueError for a block size that the backend cannot use.
    """
    shape = backend.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim)
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
    memory = HugePages().take(num_layers * math.prod(shape) * dtype.itemsize)
    touch_behind(memory)
    return list(memory.view(dtype).view(num_layers, *shape))

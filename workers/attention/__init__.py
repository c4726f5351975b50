"""Attention backends behind one lazy registry: a leaf is imported only when it is chosen."""

import logging
from collections.abc import Callable

import torch

from workers.attention.base import AttentionBackend
from workers.attention.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

__all__ = ["AttentionBackend", "AttentionMetadata", "select_backend"]


def _torch(device: torch.device, dtype: torch.dtype, head_dim: int, group_heads: int) -> AttentionBackend:
    from workers.attention.torch_backend import TorchAttention

    return TorchAttention()


def _flash(device: torch.device, dtype: torch.dtype, head_dim: int, group_heads: int) -> AttentionBackend:
    from workers.attention.flash_backend import FlashAttention

    return FlashAttention(device, dtype, head_dim)


def _native(device: torch.device, dtype: torch.dtype, head_dim: int, group_heads: int) -> AttentionBackend:
    from workers.attention.native_backend import NativeAttention

    return NativeAttention(device, dtype, head_dim, group_heads)


_FACTORIES: dict[str, Callable[[torch.device, torch.dtype, int, int], AttentionBackend]] = {
    "torch": _torch,
    "flash": _flash,
    "native": _native,
}


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int = 0, group_heads: int = 1
) -> AttentionBackend:
    """The backend called `name`; "auto" takes flash on CUDA and native on a CPU where they can run, else torch.

    `block_size`: tokens a KV block where they are fixed already, 0 where the backend may choose. `group_heads`: the
    most query heads that share a KV head on any rank, so that all ranks choose alike. Raises ValueError for an unknown
    name, and for a choice that cannot run here, naming what is missing.
    """
    if name == "auto":
        try:
            return _fastest(device, dtype, head_dim, block_size, group_heads)
        except ValueError as error:
            logger.info("%s: using 'torch'", error)
            return _torch(device, dtype, head_dim, group_heads)
    if name not in _FACTORIES:
        raise ValueError(f"attention backend {name!r} is unknown; there are: auto, {', '.join(_FACTORIES)}")
    return _FACTORIES[name](device, dtype, head_dim, group_heads)


def _fastest(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, group_heads: int
) -> AttentionBackend:
    """Raises ValueError where it cannot run."""
    if device.type == "cuda":
        return _flash(device, dtype, head_dim, group_heads)
    backend = _native(device, dtype, head_dim, group_heads)
    backend.kv_cache_shape(1, block_size or backend.block_size, 1, head_dim)  # refuses a wrong size
    logger.info("attention backend 'native': compiled for this processor, %s", dtype)
    return backend

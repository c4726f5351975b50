"""Attention backends behind one lazy registry: a leaf is imported only when it is chosen."""

import logging
from collections.abc import Callable

import torch

from workers.attention.base import AttentionBackend
from workers.attention.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

__all__ = ["AttentionBackend", "AttentionMetadata", "select_backend"]


def _torch(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    from workers.attention.torch_backend import TorchAttention

    return TorchAttention()


def _flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    from workers.attention.flash_backend import FlashAttention

    return FlashAttention(device, dtype, head_dim)


_FACTORIES: dict[str, Callable[[torch.device, torch.dtype, int], AttentionBackend]] = {
    "torch": _torch,
    "flash": _flash,
}


def select_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The backend called `name`; "auto" takes flash where it can run, else torch.

    Raises ValueError for an unknown name, and for a choice that cannot run here, naming what is missing.
    """
    if name == "auto":
        try:
            return _flash(device, dtype, head_dim)
        except ValueError as error:
            logger.info("%s: using 'torch'", error)
            return _torch(device, dtype, head_dim)
    if name not in _FACTORIES:
        raise ValueError(f"attention backend {name!r} is unknown; there are: auto, {', '.join(_FACTORIES)}")
    return _FACTORIES[name](device, dtype, head_dim)

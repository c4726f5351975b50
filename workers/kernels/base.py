"""The interface of a set of kernels: it turns weights into callables that a layer holds."""

from collections.abc import Callable
from typing import Protocol

import torch

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, in] -> [rows, out], a new tensor."""
AddNorm = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(residual [rows, size], delta or None): adds delta to the residual in place and returns the sum's norm."""


class Kernels(Protocol):
    """Layers of one dtype on one kind of device."""

    @property
    def name(self) -> str:
        """For logs."""

    @property
    def has_products(self) -> bool:
        """Whether products are its own and not torch's."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        """x W^T + b with W [out, in]. May keep another form of the weights and drop this one."""

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        """silu(gate) * up, where gate and up are the halves of x W^T + b with W [2 * out, in], gate first."""

    def add_norm(self, weight: torch.Tensor, eps: float) -> AddNorm:
        """x / rms(x) * weight over the last dimension, computed in float32 as in Hugging Face transformers."""

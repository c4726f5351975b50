"""The kernels in plain torch: the reference, and what runs where no others do."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.kernels.base import AddNorm, Product


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """As `Kernels.linear`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TorchGatedLinear:
    """As `Kernels.gated_linear`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.weight, self.bias).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class TorchAddNorm:
    """As `Kernels.add_norm`."""

    weight: torch.Tensor
    eps: float

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        if delta is not None:
            residual += delta
        return F.rms_norm(residual, self.weight.shape, self.weight, self.eps)


class TorchKernels:
    """For every device and dtype."""

    name = "torch"
    has_products = False

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        return TorchLinear(weight, bias)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        return TorchGatedLinear(weight, bias)

    def add_norm(self, weight: torch.Tensor, eps: float) -> AddNorm:
        return TorchAddNorm(weight, eps)

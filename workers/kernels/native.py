"""The kernels in C++, for float32 and bfloat16 on the CPU.

Products of float32, and of bfloat16 on a processor without its instructions, are torch's.
"""

from collections.abc import Callable

import torch

from workers.kernels.base import AddNorm, Product
from workers.kernels.library import FLOAT, POINTER, SIZE, SUFFIXES, library
from workers.kernels.linear import PackedGatedLinear, PackedLinear, supports
from workers.kernels.torch_kernels import TorchLinear


class NativeAddNorm:
    """As `Kernels.add_norm`."""

    def __init__(self, weight: torch.Tensor, eps: float, function: Callable[..., int]) -> None:
        self.weight = weight.contiguous()
        self._size = weight.shape[0]
        self._eps = eps
        self._function = function

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty_like(residual)
        self._function(
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            self.weight.data_ptr(),
            out.data_ptr(),
            residual.shape[0],
            self._size,
            self._eps,
        )
        return out


class NativeGatedLinear:
    """As `Kernels.gated_linear`, in two passes."""

    def __init__(self, linear: Product, function: Callable[..., int]) -> None:
        self._linear = linear
        self._function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self._linear(x)
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._function(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out


class NativeKernels:
    """Kernels of one dtype."""

    name = "native"

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype without kernels, BuildError and OSError when there is no library."""
        if dtype not in SUFFIXES:
            raise ValueError(f"there are no native kernels for {dtype}")
        suffix = SUFFIXES[dtype]
        self.has_products = supports(dtype)
        self._add_norm = library().function(
            "add_rms_norm" + suffix, POINTER, POINTER, POINTER, POINTER, SIZE, SIZE, FLOAT
        )
        self._silu_and_mul = library().function("silu_and_mul" + suffix, POINTER, POINTER, SIZE, SIZE)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        return PackedLinear(weight, bias) if self.has_products else TorchLinear(weight, bias)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        if self.has_products and bias is None:
            return PackedGatedLinear(*weight.chunk(2))
        return NativeGatedLinear(self.linear(weight, bias), self._silu_and_mul)

    def add_norm(self, weight: torch.Tensor, eps: float) -> AddNorm:
        return NativeAddNorm(weight, eps, self._add_norm)

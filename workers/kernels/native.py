"""The kernels in C++, for float32 and bfloat16 on the CPU."""

from collections.abc import Callable

import torch

from workers.kernels.base import AddNorm, Product
from workers.kernels.library import FLOAT, POINTER, SIZE, SUFFIXES, library
from workers.kernels.linear import PackedGatedLinear, PackedLinear


class NativeAddNorm:
    """As `Kernels.add_norm`."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight [size] on the CPU. Raises ValueError for anything else, and for a dtype without kernels."""
        if weight.dim() != 1 or weight.dtype not in SUFFIXES or weight.device.type != "cpu":
            raise ValueError(f"no norm has a weight of {weight.dtype} {list(weight.shape)} on {weight.device}")
        self.weight = weight.contiguous()
        self._address = self.weight.data_ptr()
        self._dtype = weight.dtype
        self._size = weight.shape[0]
        self._eps = eps
        self._function = library().function(
            "add_rms_norm" + SUFFIXES[weight.dtype], POINTER, POINTER, POINTER, POINTER, SIZE, SIZE, FLOAT
        )

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Raises ValueError for a tensor that would be misread."""
        shape = residual.shape
        if len(shape) != 2 or shape[1] != self._size or self._misread(residual):
            raise ValueError(f"the residual is {_described(residual)} for a norm of {self._dtype} [{self._size}]")
        if delta is not None and (delta.shape != shape or self._misread(delta)):
            raise ValueError(f"to a residual of {_described(residual)} cannot be added {_described(delta)}")
        out = torch.empty_like(residual)
        self._function(
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            self._address,
            out.data_ptr(),
            shape[0],
            self._size,
            self._eps,
        )
        return out

    def _misread(self, rows: torch.Tensor) -> bool:
        return rows.dtype is not self._dtype or not rows.is_contiguous()


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
    has_products = True

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype without kernels, BuildError and OSError when there is no library."""
        if dtype not in SUFFIXES:
            raise ValueError(f"there are no native kernels for {dtype}")
        self._silu_and_mul = library().function("silu_and_mul" + SUFFIXES[dtype], POINTER, POINTER, SIZE, SIZE)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        return PackedLinear(weight, bias)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        if bias is None:
            return PackedGatedLinear(*weight.chunk(2))
        return NativeGatedLinear(self.linear(weight, bias), self._silu_and_mul)

    def add_norm(self, weight: torch.Tensor, eps: float) -> AddNorm:
        return NativeAddNorm(weight, eps)


def _described(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} with strides {list(x.stride())}"

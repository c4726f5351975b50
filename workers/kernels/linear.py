"""Linear layers on packed weights: as fast as memory for few rows, as arithmetic for many.

A row's result depends neither on how many rows there are nor on what the others hold, to the bit: every output is
summed in float32 over the inputs in their order, whatever the batch. Greedy tokens are the same alone and batched.

Weights of float32 that are all bfloat16 without loss, as most checkpoints' are, are packed as that: the products
are the same, and memory gives them in half the time.
"""

import torch

from workers.host_memory import HugePages
from workers.kernels.library import LONG_WORK, POINTER, SIZE, SUFFIXES, library

_LANES = 16
"""Outputs of one block of packed weights, the last one padded with zeros."""
_INPUTS = 32
"""Inputs that a matrix tile takes at once; what does not fill it is padded with zeros."""
_READING = 10
"""Rows that are multiplied in the time in which the weights are read."""


def products_of_bfloat16() -> str:
    """How this process makes them, for a log."""
    return "on matrix tiles" if library().function("has_tiles")() else "by vectors"


class _Packed:
    """Weights as the kernels read them, and the kernel that multiplies by them."""

    def __init__(self, kernel: str, arguments: tuple[type, ...], *factors: torch.Tensor) -> None:
        """factors: a weight, or gate and up, each [out, in]. Raises ValueError where they cannot be packed."""
        self.out_features, self.in_features = _check(factors[0])
        for other in factors[1:]:
            if _check(other) != (self.out_features, self.in_features) or other.dtype != factors[0].dtype:
                raise ValueError(f"gate is {_described(factors[0])}, and up {_described(other)}")
        self._dtype = factors[0].dtype
        self._packed = _pack(*factors)
        self._weights = self._packed.data_ptr()
        name = kernel + SUFFIXES[self._dtype] + SUFFIXES[self._packed.dtype]
        self._multiply = library().function(name, *arguments)
        self._multiply_long = library().function(name, *arguments, releases_lock=True)
        self._long_rows = _long_rows(sum(factor.numel() for factor in factors))

    @property
    def nbytes(self) -> int:
        """Of the packed weights, padding included."""
        return self._packed.nbytes


class PackedLinear(_Packed):
    """y = x W^T + b. Holds the packed weights and a copy of the bias only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out, in] and bias [out], float32 or bfloat16 on the CPU. Raises ValueError for anything else."""
        super().__init__("linear", (POINTER, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE), weight)
        if bias is not None and (
            bias.shape != (self.out_features,) or bias.dtype != weight.dtype or bias.device != weight.device
        ):
            raise ValueError(f"the bias of {self.out_features} outputs is {_described(bias)}")
        # Bias that an owner changes later is not seen, as weights that he changes are not.
        self._bias = None if bias is None else bias.clone(memory_format=torch.contiguous_format)
        self._bias_address = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] in the weights' dtype, whose rows may lie apart -> [rows, out]."""
        rows, size = x.shape
        if size != self.in_features or x.stride(1) != 1 or x.dtype != self._dtype:
            raise ValueError(_wrong_input(x, self.in_features))
        out = x.new_empty((rows, self.out_features))
        multiply = self._multiply if rows < self._long_rows else self._multiply_long
        multiply(
            x.data_ptr(), x.stride(0), self._weights, self._bias_address, out.data_ptr(), rows, size, self.out_features
        )
        return out


class PackedGatedLinear(_Packed):
    """silu(x G^T) * (x U^T), computed in float32 and rounded once. Holds the packed weights only."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        """gate and up [out, in], float32 or bfloat16 on the CPU. Raises ValueError for anything else."""
        super().__init__("gated_linear", (POINTER, SIZE, POINTER, POINTER, SIZE, SIZE, SIZE), gate, up)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] in the weights' dtype, whose rows may lie apart -> [rows, out]."""
        rows, size = x.shape
        if size != self.in_features or x.stride(1) != 1 or x.dtype != self._dtype:
            raise ValueError(_wrong_input(x, self.in_features))
        out = x.new_empty((rows, self.out_features))
        multiply = self._multiply if rows < self._long_rows else self._multiply_long
        multiply(x.data_ptr(), x.stride(0), self._weights, out.data_ptr(), rows, size, self.out_features)
        return out


def _check(weight: torch.Tensor) -> tuple[int, int]:
    """(out, in) of a weight that can be packed."""
    if weight.dim() != 2 or weight.dtype not in SUFFIXES or weight.device.type != "cpu" or not weight.numel():
        raise ValueError(f"cannot pack a weight of {_described(weight)}")
    return weight.shape[0], weight.shape[1]


def _described(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}"


def _long_rows(weights: int) -> int:
    """Rows from which a product with so many weights gives up the interpreter's lock."""
    rows = -(-LONG_WORK // weights)
    return rows if rows > _READING else 0


def _wrong_input(x: torch.Tensor, in_features: int) -> str:
    return f"{x.dtype} {list(x.shape)} with strides {x.stride()} for a layer of {in_features} inputs"


def _pack(*factors: torch.Tensor) -> torch.Tensor:
    """A weight, or gate and up, as the kernels read them, in a dtype that holds each of their values."""
    narrow = [factor.to(torch.bfloat16) for factor in factors]
    if all(torch.equal(small.to(factor.dtype), factor) for small, factor in zip(narrow, factors, strict=True)):
        factors = tuple(narrow)
    factors = tuple(factor.contiguous() for factor in factors)
    dtype, (out, size) = factors[0].dtype, factors[0].shape
    room = -(-out // _LANES) * _LANES * -(-size // _INPUTS) * _INPUTS * len(factors) * dtype.itemsize
    packed = _memory.take(room).view(dtype)
    pack = library().function("linear_pack" + SUFFIXES[dtype], POINTER, POINTER, POINTER, SIZE, SIZE)
    up = factors[1].data_ptr() if len(factors) > 1 else None
    pack(factors[0].data_ptr(), up, packed.data_ptr(), size, out)
    return packed


_memory = HugePages()

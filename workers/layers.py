"""The parts a decoder is made of, each holding one rank's share of its weights. They know no model family."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b with W [out, in]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A linear layer whose input is spread over the ranks; every rank gets the whole output.

    The bias is whole on every rank and added once, after the sum.
    """

    weight: torch.Tensor  # [out, this rank's share of in]
    bias: torch.Tensor | None
    tp: TensorParallel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        out = self.tp.all_reduce(F.linear(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32 as in Hugging Face transformers."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class VocabEmbedding:
    """Embedding whose rows are spread over the ranks: each looks up its own, the sum is the whole."""

    weight: torch.Tensor  # [this rank's rows, hidden]
    first_id: int
    tp: TensorParallel

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first_id
        foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill(foreign[:, None], 0))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [num_tokens, 2 * ffn], gate first -> [num_tokens, ffn]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)

"""The parts of a decoder that know of the other ranks. They know no model family."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.kernels.base import Product
from workers.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A linear layer whose input is spread over the ranks; every rank gets the whole output.

    The bias is whole on every rank and added once, after the sum.
    """

    product: Product
    """Of this rank's share of the input, without bias."""
    bias: torch.Tensor | None
    tp: TensorParallel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.tp.all_reduce(self.product(x))
        return out if self.bias is None else out.add_(self.bias)


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

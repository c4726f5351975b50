"""The vocabulary spread over the ranks: from this rank's logits to those of all."""

from collections.abc import Sequence

import torch

from workers.tensor_parallel import TensorParallel


class VocabShards:
    """Collectives over logits whose columns the ranks hold in order, `shard_sizes[r]` of them on rank r."""

    def __init__(self, tensor_parallel: TensorParallel, shard_sizes: Sequence[int]) -> None:
        self.vocab_size = sum(shard_sizes)
        self._tensor_parallel = tensor_parallel
        self._shard_sizes = tuple(shard_sizes)
        self._first_id = sum(shard_sizes[: tensor_parallel.rank])

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all columns."""
        return len(self._shard_sizes) == 1

    def argmax(self, local_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest logit [rows], its token id [rows]); ties go to the lowest id. Gathers two numbers a row."""
        return self._tensor_parallel.argmax(local_logits, self._first_id)

    def gather(self, local_logits: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's share] -> [rows, vocab_size] on every rank."""
        return self._tensor_parallel.gather_vocab(local_logits, self._shard_sizes)

"""Log-probabilities of the raw distribution: before biases, penalties and temperature."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scheduler.plan import TokenLogprobs
from workers.ranking import rank


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of some rows, on the device or on their way to the host."""

    token_ids: torch.Tensor
    """[rows] int64, the tokens that were sampled or that the prompt has."""
    logprobs: torch.Tensor
    """[rows] float32"""
    top_ids: torch.Tensor
    """[rows, most wanted] int64, best first, ties to the lowest id."""
    top_logprobs: torch.Tensor
    """[rows, most wanted] float32"""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "LogprobTensors":
        """The same with `function` applied to each tensor."""
        return LogprobTensors(
            function(self.token_ids), function(self.logprobs), function(self.top_ids), function(self.top_logprobs)
        )

    def token_logprobs(self, row: int, num_top: int) -> TokenLogprobs:
        """One row's values, with its `num_top` best; for tensors that are on the host."""
        top = zip(self.top_ids[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist(), strict=True)
        return TokenLogprobs(int(self.token_ids[row]), float(self.logprobs[row]), list(top))


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """logits: [rows, vocab] float32, raw; token_ids: [rows] int64. At most the vocabulary's size is ranked."""
    logprobs = logits.log_softmax(dim=1)
    top_logprobs, top_ids = rank(logprobs, min(num_top, logits.shape[1]))
    return LogprobTensors(token_ids, logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), top_ids, top_logprobs)


def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    """Rows of all parts, in order; the parts have equally many `top` columns."""
    return LogprobTensors(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )

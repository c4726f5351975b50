"""Log-probabilities of the raw distribution: before biases, penalties and temperature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scheduler.plan import TokenLogprobs
from workers.device import to_device
from workers.kernels.sampling import SamplingKernels
from workers.ranking import rank
from workers.sampling_table import IntArray


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of some rows, on the device or on their way to the host."""

    token_ids: torch.Tensor
    """[rows] int64, the tokens that were sampled or that the prompt has."""
    logprobs: torch.Tensor
    """[rows] float32, NaN where the row's logits hold a NaN or +inf, or nothing but -inf."""
    top_ids: torch.Tensor
    """[rows, most wanted] int64, largest logit first, ties to the lowest id."""
    top_logprobs: torch.Tensor
    """[rows, most wanted] float32"""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "LogprobTensors":
        """The same with `function` applied to each tensor."""
        return LogprobTensors(
            function(self.token_ids), function(self.logprobs), function(self.top_ids), function(self.top_logprobs)
        )

    def to_list(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Each row's values, with its `num_top[row]` best; for tensors that are on the host."""
        columns = (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs)
        return [
            TokenLogprobs(token_id, logprob, list(zip(top_ids[:count], top_logprobs[:count], strict=True)))
            for token_id, logprob, top_ids, top_logprobs, count in zip(
                *(column.tolist() for column in columns), num_top, strict=True
            )
        ]


def compute_logprobs(
    logits: torch.Tensor, rows: IntArray, token_ids: torch.Tensor, num_top: int, kernels: SamplingKernels | None
) -> LogprobTensors:
    """logits: [any, vocab], raw, of which `rows` are asked for; token_ids: [rows] int64. At most the vocabulary's
    size is ranked. Without kernels in plain torch.
    """
    num_top = min(num_top, logits.shape[1])
    if kernels is not None:
        return LogprobTensors(token_ids, *kernels.logprobs(logits, rows, token_ids, num_top))
    values = logits[to_device(rows, logits.device)].float()
    logprobs = values.log_softmax(dim=1)
    _, top_ids = rank(values, num_top)
    return LogprobTensors(
        token_ids, logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), top_ids, logprobs.gather(1, top_ids)
    )


def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    """Rows of all parts, in order; the parts have equally many `top` columns."""
    if len(parts) == 1:
        return parts[0]
    return LogprobTensors(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )

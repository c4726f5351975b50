"""Samples one token a row. Every rank of a group calls it with its shard and gets the same tokens.

A row's token depends on its logits, its request's parameters, its tokens and its position: on nothing
else in the batch, so rows can be grouped as memory and collectives like.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from workers.batch import RowSet
from workers.device import to_device
from workers.draws import choose
from workers.kernels.sampling import SamplingKernels
from workers.logprobs import LogprobTensors, compute_logprobs, concatenate
from workers.penalties import find_additions
from workers.request_state import RequestState
from workers.sampling_table import IntArray
from workers.vocab import VocabShards

GROUP_ELEMENTS = 1 << 22
"""Most logits of whole rows at once: what a row needs beside them is several times as large."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tensors on the device."""

    token_ids: torch.Tensor
    """[rows] int64, each a valid id, in faulty rows too."""
    finite: torch.Tensor
    """[rows] bool: False where the logits hold a NaN or +inf, or nothing but -inf."""
    logprobs: LogprobTensors | None
    """Of the rows in `logprob_rows`."""
    logprob_rows: IntArray
    """[rows with logprobs] indices into the rows."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "SampledTokens":
        """The same with `function` applied to each tensor."""
        logprobs = None if self.logprobs is None else self.logprobs.map(function)
        return SampledTokens(function(self.token_ids), function(self.finite), logprobs, self.logprob_rows)


def sample(
    local_logits: torch.Tensor, rows: RowSet, state: RequestState, shards: VocabShards, kernels: SamplingKernels | None
) -> SampledTokens:
    """local_logits: [rows, this rank's vocabulary], any float dtype, raw. Without kernels in plain torch.

    Rows that need no more than the largest logit gather two numbers from each rank, the others all logits.
    """
    table = state.sampling
    most_logprobs = int(table.num_logprobs[rows.slots].max(initial=-1))
    if kernels is not None and shards.is_whole:
        # One pass of a row through the cache, whatever it needs.
        return _sample_whole(local_logits, rows, state, most_logprobs, kernels)
    device = local_logits.device
    whole = table.needs_distribution(rows.slots, state.output_positions(rows.slots, rows.context_lens))
    greedy_rows, whole_rows = np.flatnonzero(~whole), np.flatnonzero(whole)
    token_ids = torch.zeros(len(rows), dtype=torch.int64, device=device)
    finite = torch.ones(len(rows), dtype=torch.bool, device=device)
    if len(greedy_rows):
        index = to_device(greedy_rows, device)
        largest, best_ids = shards.argmax(local_logits if not len(whole_rows) else local_logits[index])
        finite[index] = largest.isfinite()
        token_ids[index] = best_ids
    logprob_rows, logprobs = [np.zeros(0, np.int64)], []
    for group in row_groups(whole_rows, shards.vocab_size):
        index = to_device(group, device)
        logits = shards.gather(local_logits[index])
        sampled = _sample_whole(logits, rows.select(group), state, most_logprobs, kernels)
        token_ids[index], finite[index] = sampled.token_ids, sampled.finite
        if sampled.logprobs is not None:
            logprobs.append(sampled.logprobs)
            logprob_rows.append(group[sampled.logprob_rows])
    return SampledTokens(token_ids, finite, concatenate(logprobs) if logprobs else None, np.concatenate(logprob_rows))


def row_groups(rows: IntArray, vocab_size: int) -> list[IntArray]:
    """`rows` in order, cut so that a group's logits are at most GROUP_ELEMENTS (or one row)."""
    size = max(1, GROUP_ELEMENTS // vocab_size)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _sample_whole(
    logits: torch.Tensor, rows: RowSet, state: RequestState, most_logprobs: int, kernels: SamplingKernels | None
) -> SampledTokens:
    """From logits [rows, vocab] of any float dtype, raw; with `most_logprobs` columns of best tokens."""
    table = state.sampling
    output_positions = state.output_positions(rows.slots, rows.context_lens)
    if kernels is not None:
        additions = find_additions(rows, state)
        token_ids, finite = kernels.sample(
            logits,
            table.parameters_address,
            rows.slots,
            state.token_ids,
            rows.context_lens,
            output_positions,
            None if additions is None else additions.by_row(len(rows)),
        )
    else:
        values = logits.to(torch.float32, copy=True)
        finite = values.amax(dim=1).isfinite()
        token_ids = choose(values, rows, output_positions, state)
    if most_logprobs < 0:
        return SampledTokens(token_ids, finite, None, np.zeros(0, np.int64))
    wanted = np.flatnonzero(table.num_logprobs[rows.slots] >= 0)
    if not len(wanted):
        return SampledTokens(token_ids, finite, None, wanted)
    chosen = token_ids[to_device(wanted, logits.device)]
    return SampledTokens(token_ids, finite, compute_logprobs(logits, wanted, chosen, most_logprobs, kernels), wanted)

"""Changes to logits before temperature: biases, forbidden stop tokens, penalties for repeating."""

from dataclasses import dataclass

import numpy as np
import torch

from workers.batch import RowSet
from workers.device import to_device
from workers.request_state import RequestState
from workers.sampling_table import FloatArray, IntArray


def adjust_logits(logits: torch.Tensor, rows: RowSet, state: RequestState) -> None:
    """Everything that changes logits before temperature, on float32 logits [rows, vocab], in place."""
    additions = find_additions(rows, state)
    if additions is not None:
        index = to_device(additions.rows, logits.device), to_device(additions.token_ids, logits.device)
        logits.index_put_(index, to_device(additions.values, logits.device), accumulate=True)
    penalized = np.flatnonzero(state.sampling.has_penalties[rows.slots])
    if len(penalized):
        index_rows = to_device(penalized, logits.device)
        changed = logits[index_rows]
        apply_penalties(changed, rows.select(penalized), state)
        logits[index_rows] = changed


@dataclass(frozen=True, slots=True)
class Additions:
    """Numbers added to single logits; every array is [number of them]."""

    rows: IntArray
    """Ascending."""
    token_ids: IntArray
    values: FloatArray

    def by_row(self, num_rows: int) -> tuple[IntArray, IntArray, FloatArray]:
        """(where those of each row begin and the last one's end [num_rows + 1], token_ids, values)."""
        starts = np.searchsorted(self.rows, np.arange(num_rows + 1))
        return starts, self.token_ids, self.values


def find_additions(rows: RowSet, state: RequestState) -> Additions | None:
    """Each row's logit_bias, and -inf for its stop_token_ids where fewer than min_tokens were generated; None
    where no row has any.
    """
    table = state.sampling
    if not table.may_add[rows.slots].any():
        return None
    unfinished = state.output_positions(rows.slots, rows.context_lens) < table.min_tokens[rows.slots]
    parts = [
        (row, table.bias_ids[rows.slots[row]], table.biases[rows.slots[row]])
        for row in np.flatnonzero(table.has_bias[rows.slots])
    ]
    for row in np.flatnonzero(unfinished):
        stop_ids = table.stop_token_ids[rows.slots[row]]
        parts.append((row, stop_ids, np.full(len(stop_ids), -np.inf, np.float32)))
    if not parts:
        return None
    parts.sort(key=lambda part: part[0])
    row_numbers, token_ids, values = zip(*parts, strict=True)
    counts = [len(ids) for ids in token_ids]
    return Additions(
        np.repeat(np.array(row_numbers, np.int64), counts), np.concatenate(token_ids), np.concatenate(values)
    )


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What a row's context holds of each token, both [rows, vocab]."""

    in_context: torch.Tensor
    """bool: in the prompt or the output so far, drafts before the row included."""
    in_output: torch.Tensor
    """float32: times in the output so far."""


def count_tokens(rows: RowSet, state: RequestState, vocab_size: int) -> TokenCounts:
    """Counts of each row's context, from the mirror's tokens."""
    device = state.token_ids.device
    slots = to_device(rows.slots, device)
    context_lens = to_device(rows.context_lens, device).unsqueeze(1)
    prompt_lens = to_device(state.num_prompt[rows.slots], device).unsqueeze(1)
    token_ids = state.token_ids[slots, : int(rows.context_lens.max())].to(torch.int64)  # [rows, longest context]
    positions = torch.arange(token_ids.shape[1], device=device).unsqueeze(0)
    known = positions < context_lens
    output = known & (positions >= prompt_lens)
    counts = torch.zeros(2, len(rows), vocab_size, device=device)
    counts[0].scatter_add_(1, token_ids, known.float())
    counts[1].scatter_add_(1, token_ids, output.float())
    return TokenCounts(counts[0] > 0, counts[1])


def apply_penalties(logits: torch.Tensor, rows: RowSet, state: RequestState) -> None:
    """Penalise repetition in logits [rows, vocab], in place.

    Repetition as in Hugging Face transformers: a token of prompt or output has a positive logit divided
    and a negative one multiplied. Then presence and frequency as in the OpenAI API: the logit loses
    frequency_penalty for each time, and presence_penalty once, that the token is in the output.
    """
    table, device = state.sampling, logits.device
    counts = count_tokens(rows, state, logits.shape[1])
    repetition = to_device(table.repetition_penalty[rows.slots], device).unsqueeze(1)
    presence = to_device(table.presence_penalty[rows.slots], device).unsqueeze(1)
    frequency = to_device(table.frequency_penalty[rows.slots], device).unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(counts.in_context, repeated, logits))
    logits.sub_(frequency * counts.in_output).sub_(presence * (counts.in_output > 0))

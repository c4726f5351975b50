"""Changes to logits before temperature: biases, masked stop tokens, penalties for repeating."""

from dataclasses import dataclass

import numpy as np
import torch

from workers.batch import RowSet
from workers.device import to_device
from workers.request_state import RequestState


def adjust_logits(logits: torch.Tensor, rows: RowSet, state: RequestState) -> None:
    """Everything that changes logits before temperature, on float32 logits [rows, vocab], in place."""
    apply_bias(logits, rows, state)
    mask_stop_tokens(logits, rows, state)
    penalized = np.flatnonzero(state.sampling.has_penalties[rows.slots])
    if len(penalized):
        index = to_device(penalized, logits.device)
        changed = logits[index]
        apply_penalties(changed, rows.select(penalized), state)
        logits[index] = changed


def apply_bias(logits: torch.Tensor, rows: RowSet, state: RequestState) -> None:
    """Add each row's logit_bias to logits [rows, vocab], in place."""
    entries = [
        (row, token_id, bias)
        for row, slot in enumerate(rows.slots.tolist())
        for token_id, bias in state.sampling.logit_bias[slot]
    ]
    if entries:
        index_rows, token_ids, biases = zip(*entries, strict=True)
        index = to_device(np.array((index_rows, token_ids), np.int64), logits.device)
        values = to_device(np.array(biases, np.float32), logits.device)
        logits.index_put_((index[0], index[1]), values, accumulate=True)


def mask_stop_tokens(logits: torch.Tensor, rows: RowSet, state: RequestState) -> None:
    """Forbid stop_token_ids in logits [rows, vocab], in place, where fewer than min_tokens were generated."""
    output_positions = state.output_positions(rows.slots, rows.context_lens)
    entries = [
        (row, token_id)
        for row, (slot, position) in enumerate(zip(rows.slots.tolist(), output_positions.tolist(), strict=True))
        if position < state.sampling.min_tokens[slot]
        for token_id in state.sampling.stop_token_ids[slot]
    ]
    if entries:
        index = to_device(np.array(entries, np.int64), logits.device)
        # A plain -inf would be copied from the host, and the host would wait for it.
        logits.index_put_((index[:, 0], index[:, 1]), logits.new_full((), -torch.inf))


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

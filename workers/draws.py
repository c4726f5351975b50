"""Tokens from whole rows of logits in plain torch: the definition, and what runs where there are no kernels."""

import numpy as np
import torch

from workers.batch import RowSet
from workers.device import to_device
from workers.noise import gumbel_noise
from workers.penalties import adjust_logits
from workers.ranking import rank
from workers.request_state import RequestState
from workers.sampling_table import IntArray, SamplingTable

CPU_CANDIDATES = 1024
"""Best tokens that a CPU ranks before it ranks a whole row: sorting a vocabulary takes milliseconds."""


def choose(logits: torch.Tensor, rows: RowSet, output_positions: IntArray, state: RequestState) -> torch.Tensor:
    """Tokens [rows] from float32 logits [rows, vocab], which it overwrites."""
    table = state.sampling
    adjust_logits(logits, rows, state)
    token_ids = logits.argmax(dim=1)
    random = np.flatnonzero(table.temperature[rows.slots] > 0)
    if len(random):
        index = to_device(random, logits.device)
        token_ids[index] = _draw(logits[index], rows.slots[random], output_positions[random], table)
    return token_ids


def _draw(logits: torch.Tensor, slots: IntArray, output_positions: IntArray, table: SamplingTable) -> torch.Tensor:
    """Random tokens [rows]: temperature, then top_k, top_p and min_p, each on what the one before it left."""
    device = logits.device
    temperature = to_device(table.temperature[slots], device).unsqueeze(1)
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperature  # at most 0: no overflow, however cold
    truncated = (table.top_k[slots] > 0) | (table.top_p[slots] < 1)
    token_ids = torch.zeros(len(slots), dtype=torch.int64, device=device)
    for part, draw in ((np.flatnonzero(~truncated), _draw_from_all), (np.flatnonzero(truncated), _draw_truncated)):
        if len(part):
            index = to_device(part, device)
            token_ids[index] = draw(scaled[index], slots[part], output_positions[part], table)
    return token_ids


def _draw_from_all(
    scaled: torch.Tensor, slots: IntArray, output_positions: IntArray, table: SamplingTable
) -> torch.Tensor:
    every_id = torch.arange(scaled.shape[1], device=scaled.device).unsqueeze(0)
    kept = scaled >= _min_p_floor(slots, table, scaled.device)
    return _gumbel_max(scaled, kept, every_id, slots, output_positions, table)


def _draw_truncated(
    scaled: torch.Tensor, slots: IntArray, output_positions: IntArray, table: SamplingTable
) -> torch.Tensor:
    """Rank few candidates first; where they may not be enough, rank the whole row."""
    device, vocab_size = scaled.device, scaled.shape[1]
    token_ids = torch.zeros(len(slots), dtype=torch.int64, device=device)
    pending = np.arange(len(slots))
    # A GPU sorts quickly, and asking whether the candidates were enough would make it wait for the host.
    count = vocab_size if device.type == "cuda" else min(CPU_CANDIDATES, vocab_size)
    while len(pending):
        # top_p takes its share of all that top_k leaves, so all of that must be among the candidates.
        ready = pending[(table.top_k[slots[pending]] <= count) | (count == vocab_size)]
        pending = np.setdiff1d(pending, ready)
        index = to_device(ready, device)
        values = scaled[index]
        ranked, candidate_ids = rank(values, count)
        kept = _truncate(ranked, values, slots[ready], table)
        token_ids[index] = _gumbel_max(ranked, kept, candidate_ids, slots[ready], output_positions[ready], table)
        if count < vocab_size:
            # What is kept is a prefix of the ranking. Where it reaches the last candidate it may go on behind it.
            pending = np.concatenate((pending, ready[kept[:, -1].numpy()]))
        count = vocab_size
    return token_ids


def _truncate(ranked: torch.Tensor, scaled: torch.Tensor, slots: IntArray, table: SamplingTable) -> torch.Tensor:
    """Which of the ranked candidates top_k, top_p and min_p keep: bool [rows, candidates].

    top_p keeps the fewest best tokens that together have at least its share of what top_k left, as in
    Hugging Face transformers. Sums are in float64, over the same values however many candidates there are.
    """
    device = ranked.device
    order = torch.arange(ranked.shape[1], device=device)
    limits = np.where(table.top_k[slots] > 0, table.top_k[slots], scaled.shape[1])
    in_top_k = order < to_device(limits, device).unsqueeze(1)
    weights = torch.where(in_top_k, ranked.exp(), 0.0).double()
    all_weights = scaled.exp().sum(dim=1, dtype=torch.float64)
    total = torch.where(to_device(table.top_k[slots] > 0, device), weights.sum(dim=1), all_weights).unsqueeze(1)
    before = weights.cumsum(dim=1) - weights
    top_p = to_device(table.top_p[slots], device).unsqueeze(1)
    # The sum may round to the total before the last token; with top_p 1 every token counts all the same.
    in_top_p = (before < top_p * total) | (top_p >= 1)
    return in_top_k & in_top_p & (ranked >= _min_p_floor(slots, table, device))


def _min_p_floor(slots: IntArray, table: SamplingTable, device: torch.device) -> torch.Tensor:
    """Smallest scaled logit that min_p keeps, [rows, 1]: the best token's is 0, so this is log(min_p)."""
    return to_device(table.min_p[slots], device).unsqueeze(1).log()


def _gumbel_max(
    values: torch.Tensor,
    kept: torch.Tensor,
    candidate_ids: torch.Tensor,
    slots: IntArray,
    output_positions: IntArray,
    table: SamplingTable,
) -> torch.Tensor:
    """A draw [rows] from the softmax of the kept values; all tensors [rows, candidates], ids maybe [1, candidates]."""
    device = values.device
    noise = gumbel_noise(to_device(table.seed[slots], device), to_device(output_positions, device), candidate_ids)
    noisy = noise.add_(values).masked_fill_(~kept, -torch.inf)
    best = noisy.argmax(dim=1, keepdim=True)
    return candidate_ids.expand(len(slots), -1).gather(1, best).squeeze(1)

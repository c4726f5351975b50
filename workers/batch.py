"""One step as tensors: the ragged batch of a plan's rows, without padding and without phases.

A request's rows are its next scheduled tokens, wherever its progress stands. It samples iff its progress
after the step reaches its known tokens; with k drafts behind them it then needs the logits of its last
k + 1 rows, one to judge each draft and one for the token after them.
"""

from dataclasses import dataclass

import numpy as np
import torch

from scheduler.plan import StepPlan
from workers.attention.metadata import AttentionMetadata
from workers.device import to_device
from workers.request_state import PlanError, RequestState
from workers.sampling_table import IntArray


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows of the hidden states whose logits are wanted; every array is [num_rows]."""

    requests: IntArray
    """Index of each row's request in the batch."""
    slots: IntArray
    rows: IntArray
    """Row of the hidden states."""
    context_lens: IntArray
    """Tokens the row has seen, its own included: what it predicts has this position."""

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: IntArray | slice) -> "RowSet":
        """The rows at `index`."""
        return RowSet(self.requests[index], self.slots[index], self.rows[index], self.context_lens[index])


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass, and which of its rows are read afterwards."""

    request_ids: list[str]
    slots: IntArray
    """[num_reqs]"""
    stays: IntArray
    """[num_reqs], the slots' occupations at launch."""
    seq_lens: IntArray
    """[num_reqs], progress after the step."""
    num_logprobs: IntArray
    """[num_reqs], -1 where none are wanted; kept here because slots may change hands before the report."""
    num_prompt_logprobs: IntArray
    """[num_reqs], likewise."""
    input_ids: torch.Tensor
    """[num_tokens] int64"""
    positions: torch.Tensor
    """[num_tokens] int64"""
    metadata: AttentionMetadata
    sampling_rows: RowSet
    """Grouped by request in batch order: one row and one for each draft of every request that samples."""
    prompt_rows: RowSet
    """Rows whose next token is a prompt token that wants its log-probability."""


_NO_ROWS = RowSet(*(np.zeros(0, np.int64) for _ in range(4)))


def build(plan: StepPlan, state: RequestState) -> Batch:
    """The batch of a plan that `state` has applied. Raises PlanError where plan and mirror disagree."""
    request_ids = list(plan.num_scheduled_tokens)
    slots = state.slots_of(request_ids)
    num_scheduled = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(slots))
    num_computed, num_tokens, num_drafts = state.num_computed[slots], state.num_tokens[slots], state.num_drafts[slots]
    seq_lens = num_computed + num_scheduled
    _check(plan, state, request_ids, slots, num_scheduled, seq_lens, num_tokens, num_drafts)

    query_start_loc = np.zeros(len(slots) + 1, np.int64)
    num_scheduled.cumsum(out=query_start_loc[1:])
    request_of_row = np.arange(len(slots)).repeat(num_scheduled)
    slot_of_row = slots[request_of_row]
    positions = np.arange(len(request_of_row)) + (num_computed - query_start_loc[:-1])[request_of_row]

    block_of_row, offset = np.divmod(positions, state.block_size)
    slot_mapping = state.block_table[slot_of_row, block_of_row].astype(np.int64) * state.block_size + offset

    device = state.token_ids.device
    host_query_lens, host_seq_lens = num_scheduled.tolist(), seq_lens.tolist()
    max_seq_len = max(host_seq_lens)
    num_blocks = -(-max_seq_len // state.block_size)
    num_prompt_logprobs = state.sampling.num_prompt_logprobs[slots]
    wants_prompt = num_prompt_logprobs.max() >= 0
    return Batch(
        request_ids=request_ids,
        slots=slots,
        stays=state.stay[slots],
        seq_lens=seq_lens,
        num_logprobs=state.sampling.num_logprobs[slots],
        num_prompt_logprobs=num_prompt_logprobs,
        input_ids=state.tokens_at(slot_of_row, positions),
        positions=to_device(positions, device),
        metadata=AttentionMetadata(
            query_start_loc=to_device(query_start_loc.astype(np.int32), device),
            seq_lens=to_device(seq_lens.astype(np.int32), device),
            block_table=to_device(state.block_table[slots, :num_blocks], device),
            slot_mapping=to_device(slot_mapping, device),
            max_query_len=max(host_query_lens),
            max_seq_len=max_seq_len,
            host_query_lens=host_query_lens,
            host_seq_lens=host_seq_lens,
        ),
        sampling_rows=_sampling_rows(slots, seq_lens, num_tokens, num_drafts, query_start_loc),
        prompt_rows=_prompt_rows(state, request_of_row, slot_of_row, positions) if wants_prompt else _NO_ROWS,
    )


def _sampling_rows(
    slots: IntArray, seq_lens: IntArray, num_tokens: IntArray, num_drafts: IntArray, query_start_loc: IntArray
) -> RowSet:
    (requests,) = (seq_lens >= num_tokens).nonzero()
    num_rows = num_drafts[requests] + 1
    last = num_rows.cumsum() - 1
    requests = requests.repeat(num_rows)
    behind = last.repeat(num_rows) - np.arange(len(requests))  # 0 for a request's last row
    return RowSet(requests, slots[requests], query_start_loc[1:][requests] - 1 - behind, seq_lens[requests] - behind)


def _prompt_rows(state: RequestState, requests: IntArray, slots: IntArray, positions: IntArray) -> RowSet:
    wanted = (state.sampling.num_prompt_logprobs[slots] >= 0) & (positions + 1 < state.num_prompt[slots])
    rows = np.flatnonzero(wanted)
    return RowSet(requests[rows], slots[rows], rows, positions[rows] + 1)


def _check(
    plan: StepPlan,
    state: RequestState,
    request_ids: list[str],
    slots: IntArray,
    num_scheduled: IntArray,
    seq_lens: IntArray,
    num_tokens: IntArray,
    num_drafts: IntArray,
) -> None:
    """A contradiction found here would otherwise write into another request's blocks or tokens."""
    if not request_ids:
        raise PlanError(f"plan {plan.step_id} schedules nothing")
    ends = num_tokens + num_drafts
    num_blocks = state.num_blocks[slots]
    placed_now: IntArray | int = 0
    if plan.spec_token_ids:
        placed_now = np.array([len(plan.spec_token_ids.get(request_id, ())) for request_id in request_ids], np.int64)
    faults = (
        (num_scheduled < 1, "schedules no token"),
        (num_drafts != placed_now, "comes before the drafts of an earlier step were verified"),
        (seq_lens > ends, "schedules more tokens than are known"),
        ((num_drafts > 0) & (seq_lens < ends), "does not reach its drafts' end"),
        (seq_lens > num_blocks * state.block_size, "schedules tokens beyond its block table"),
        (seq_lens >= state.max_model_len, f"leaves no room below max_model_len ({state.max_model_len})"),
    )
    if not np.logical_or.reduce([rows for rows, _ in faults]).any():
        return  # one look for all six, as this runs in every step
    rows, what = next((rows, what) for rows, what in faults if rows.any())
    row = int(np.flatnonzero(rows)[0])
    raise PlanError(
        f"plan {plan.step_id} {what}: request {request_ids[row]!r}, {num_scheduled[row]} scheduled after"
        f" {state.num_computed[slots[row]]} computed, {num_tokens[row]} known,"
        f" {num_drafts[row]} drafts, {num_blocks[row]} blocks"
    )

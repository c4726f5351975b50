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


def build(plan: StepPlan, state: RequestState) -> Batch:
    """The batch of a plan that `state` has applied. Raises PlanError where plan and mirror disagree."""
    request_ids = list(plan.num_scheduled_tokens)
    slots = state.slots_of(request_ids)
    num_scheduled = np.array(list(plan.num_scheduled_tokens.values()), np.int64)
    seq_lens = state.num_computed[slots] + num_scheduled
    _check(plan, state, request_ids, slots, num_scheduled, seq_lens)

    query_start_loc = np.concatenate(([0], num_scheduled.cumsum()))
    request_of_row = np.repeat(np.arange(len(slots)), num_scheduled)
    slot_of_row = slots[request_of_row]
    positions = np.arange(query_start_loc[-1]) + (state.num_computed[slots] - query_start_loc[:-1])[request_of_row]

    blocks = state.block_table[slot_of_row, positions // state.block_size].astype(np.int64)
    slot_mapping = blocks * state.block_size + positions % state.block_size

    device = state.token_ids.device
    max_seq_len = int(seq_lens.max())
    num_blocks = -(-max_seq_len // state.block_size)
    return Batch(
        request_ids=request_ids,
        slots=slots,
        stays=state.stay[slots],
        seq_lens=seq_lens,
        num_logprobs=state.sampling.num_logprobs[slots],
        num_prompt_logprobs=state.sampling.num_prompt_logprobs[slots],
        input_ids=state.tokens_at(slot_of_row, positions),
        positions=to_device(positions, device),
        metadata=AttentionMetadata(
            query_start_loc=to_device(query_start_loc.astype(np.int32), device),
            seq_lens=to_device(seq_lens.astype(np.int32), device),
            block_table=to_device(np.ascontiguousarray(state.block_table[slots, :num_blocks]), device),
            slot_mapping=to_device(slot_mapping, device),
            max_query_len=int(num_scheduled.max()),
            max_seq_len=max_seq_len,
            host_query_lens=num_scheduled.tolist(),
            host_seq_lens=seq_lens.tolist(),
        ),
        sampling_rows=_sampling_rows(state, slots, seq_lens, query_start_loc),
        prompt_rows=_prompt_rows(state, request_of_row, slot_of_row, positions),
    )


def _sampling_rows(state: RequestState, slots: IntArray, seq_lens: IntArray, query_start_loc: IntArray) -> RowSet:
    samples = seq_lens >= state.num_tokens[slots]
    num_rows = np.where(samples, state.num_drafts[slots] + 1, 0)
    requests = np.repeat(np.arange(len(slots)), num_rows)
    before_end = (num_rows.cumsum())[requests] - np.arange(len(requests))  # 1 for a request's last row
    return RowSet(
        requests, slots[requests], query_start_loc[1:][requests] - before_end, seq_lens[requests] - before_end + 1
    )


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
) -> None:
    """A contradiction found here would otherwise write into another request's blocks or tokens."""
    if not request_ids:
        raise PlanError(f"plan {plan.step_id} schedules nothing")
    num_drafts = state.num_drafts[slots]
    placed_now = np.array([len(plan.spec_token_ids.get(request_id, ())) for request_id in request_ids], np.int64)
    for wrong, what in (
        (num_scheduled < 1, "schedules no token"),
        (num_drafts != placed_now, "comes before the drafts of an earlier step were verified"),
        (seq_lens > state.num_tokens[slots] + num_drafts, "schedules more tokens than are known"),
        ((num_drafts > 0) & (seq_lens < state.num_tokens[slots] + num_drafts), "does not reach its drafts' end"),
        (seq_lens > state.num_blocks[slots] * state.block_size, "schedules tokens beyond its block table"),
        (seq_lens >= state.max_model_len, f"leaves no room below max_model_len ({state.max_model_len})"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise PlanError(
                f"plan {plan.step_id} {what}: request {request_ids[row]!r}, {num_scheduled[row]} scheduled after"
                f" {state.num_computed[slots[row]]} computed, {state.num_tokens[slots[row]]} known,"
                f" {num_drafts[row]} drafts, {state.num_blocks[slots[row]]} blocks"
            )

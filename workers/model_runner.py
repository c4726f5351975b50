"""One step on one rank: plan -> batch -> forward -> logits of the rows that are read -> tokens -> result.

The step is two calls. `launch` queues all device work and never waits for it; `collect` takes the values
that the engine needs to the host. A GPU is given step N + 1 before the tokens of step N have reached the
host, because the mirror already holds them on the device.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from scheduler.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from workers.attention.metadata import AttentionMetadata
from workers.batch import Batch, RowSet, build
from workers.device import HostCopies, to_device
from workers.kernels.sampling import sampling_kernels
from workers.logprobs import LogprobTensors, compute_logprobs, concatenate
from workers.request_state import RequestState
from workers.sampler import SampledTokens, row_groups, sample
from workers.vocab import VocabShards


class Model(Protocol):
    """A decoder's slices on one rank."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """input_ids, positions: [num_tokens] int64 -> hidden states [num_tokens, hidden]."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> this rank's columns of the logits, [rows, share of the vocabulary]."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step whose values are on their way to the host: read them once `copies` has been waited for."""

    plan: StepPlan
    batch: Batch
    sampled: SampledTokens | None
    """None: no request samples."""
    prompt: LogprobTensors | None
    """What the rows in `batch.prompt_rows` say of the prompt tokens after them."""
    copies: HostCopies
    started: float
    """time.perf_counter() at launch."""
    collective_seconds: float = 0.0
    """Of the launch, in which the host runs all collectives that it waits for."""

    def is_ready(self) -> bool:
        """Whether to collect it before another plan is launched: its values are on the host, or it verifies
        drafts, of which the mirror must know how many stand.
        """
        return bool(self.plan.spec_token_ids) or self.copies.done()


class ModelRunner:
    """Runs plans through a model and its KV cache. Steps are collected in the order of their launch."""

    def __init__(self, model: Model, kv_caches: list[torch.Tensor], state: RequestState, shards: VocabShards) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._state = state
        self._shards = shards
        self._device = state.token_ids.device
        self._sampling_kernels = sampling_kernels(self._device)
        self._last_collected = 0.0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Apply the plan and queue its work. Raises PlanError."""
        started = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a property of the thread, and any thread may call
        self._state.apply_plan(plan)
        batch = build(plan, self._state)
        hidden = self._model.forward(batch.input_ids, batch.positions, self._kv_caches, batch.metadata)
        prompt = self._prompt_logprobs(hidden, batch.prompt_rows) if len(batch.prompt_rows) else None
        sampled = self._sample(hidden, batch.sampling_rows) if len(batch.sampling_rows) else None
        self._state.apply_result(batch.slots, batch.seq_lens)
        copies = HostCopies(self._device)
        if sampled is not None:
            sampled = sampled.map(copies.add)
        if prompt is not None:
            prompt = prompt.map(copies.add)
        copies.seal()
        return PendingStep(plan, batch, sampled, prompt, copies, started)

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for the step's values, roll rejected drafts back and report."""
        pending.copies.wait()
        errors: dict[str, str] = {}
        prompt_logprobs = self._report_prompt(pending, errors)
        sampled_token_ids, logprobs = self._report_samples(pending, errors)
        now = time.perf_counter()
        # A step launched early has waited for the one before it: its own time starts when that one ended.
        seconds = now - max(pending.started, self._last_collected)
        self._last_collected = now
        return StepResult(
            epoch=pending.plan.epoch,
            step_id=pending.plan.step_id,
            sampled_token_ids=sampled_token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            execute_seconds=seconds,
            collective_seconds=pending.collective_seconds,
        )

    def _logits(self, hidden: torch.Tensor, rows: RowSet) -> torch.Tensor:
        return self._model.compute_logits(hidden[to_device(rows.rows, self._device)])

    def _sample(self, hidden: torch.Tensor, rows: RowSet) -> SampledTokens:
        sampled = sample(self._logits(hidden, rows), rows, self._state, self._shards, self._sampling_kernels)
        self._state.place_sampled(rows.slots, rows.context_lens, sampled.token_ids)
        return sampled

    def _prompt_logprobs(self, hidden: torch.Tensor, rows: RowSet) -> LogprobTensors:
        """The row of a prompt token scores the next one, which is known: no hidden state outlives its step."""
        most = int(self._state.sampling.num_prompt_logprobs[rows.slots].max())
        parts = []
        for index in row_groups(np.arange(len(rows)), self._shards.vocab_size):
            group = rows.select(index)
            logits = self._shards.gather(self._logits(hidden, group))
            token_ids = self._state.tokens_at(group.slots, group.context_lens)
            every_row = np.arange(len(group))
            parts.append(compute_logprobs(logits, every_row, token_ids, most, self._sampling_kernels))
        return concatenate(parts)

    def _report_samples(
        self, pending: PendingStep, errors: dict[str, str]
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]:
        tokens_of: dict[str, list[int]] = {}
        logprobs_of: dict[str, list[TokenLogprobs]] = {}
        if pending.sampled is None:
            return tokens_of, logprobs_of
        batch, sampled = pending.batch, pending.sampled
        requests = batch.sampling_rows.requests.tolist()
        token_ids, finite = sampled.token_ids.tolist(), sampled.finite.tolist()
        all_finite = all(finite)
        logprob_of_row: dict[int, TokenLogprobs] = {}
        if sampled.logprobs is not None:
            num_top = batch.num_logprobs[batch.sampling_rows.requests[sampled.logprob_rows]].tolist()
            entries = sampled.logprobs.to_list(num_top)
            logprob_of_row = dict(zip(sampled.logprob_rows.tolist(), entries, strict=True))
        verified: list[int] = []
        num_accepted: list[int] = []
        start = 0
        while start < len(requests):
            request_id = batch.request_ids[requests[start]]
            drafts = pending.plan.spec_token_ids.get(request_id, ())
            end = start + 1
            if drafts:
                accepted = count_accepted(drafts, token_ids[start : start + len(drafts)])
                verified.append(requests[start])
                num_accepted.append(accepted)
                end += accepted
            if all_finite or all(finite[start:end]):
                tokens_of[request_id] = token_ids[start:end]
                if start in logprob_of_row:
                    logprobs_of[request_id] = [logprob_of_row[row] for row in range(start, end)]
            else:
                errors[request_id] = "the model's logits are not finite"
            start += len(drafts) + 1
        if verified:
            self._state.apply_accepted(batch.slots[verified], batch.stays[verified], np.array(num_accepted, np.int64))
        return tokens_of, logprobs_of

    def _report_prompt(self, pending: PendingStep, errors: dict[str, str]) -> dict[str, PromptLogprobs]:
        logprobs_of: dict[str, PromptLogprobs] = {}
        if pending.prompt is None:
            return logprobs_of
        batch, rows = pending.batch, pending.batch.prompt_rows
        finite = ~pending.prompt.logprobs.isnan().numpy()
        entries = pending.prompt.to_list(batch.num_prompt_logprobs[rows.requests].tolist())
        # Rows are grouped by request.
        starts = np.flatnonzero(np.diff(rows.requests, prepend=-1)).tolist()
        for start, end in pairwise((*starts, len(rows))):
            request_id = batch.request_ids[rows.requests[start]]
            if finite[start:end].all():
                logprobs_of[request_id] = PromptLogprobs(int(rows.context_lens[start]), entries[start:end])
            else:
                errors[request_id] = "the model's logits are not finite"
        return logprobs_of


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many leading drafts are what was sampled in their places.

    Each place is sampled with its own noise, as if the drafts before it were known tokens. So the tokens
    kept are the very tokens that one step after the other would have given, greedy or not.
    """
    for index, (draft, token) in enumerate(zip(drafts, sampled, strict=True)):
        if draft != token:
            return index
    return len(drafts)

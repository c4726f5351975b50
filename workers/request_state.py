"""The workers' mirror of the running requests: tokens, block tables and progress, one slot a request.

It is changed by two events only, a plan and the tokens sampled under it, so it stays right when the
next plan comes before the engine has seen the last result. Token values live on the device and are
never read back here; the host keeps counts. A chunk, a decode, a resumed request and a verified draft
are all "tokens not computed yet" of one row of `token_ids`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from scheduler.plan import NewRequest, StepPlan
from workers.device import to_device
from workers.sampling_table import IntArray, SamplingTable


class PlanError(RuntimeError):
    """A plan contradicts the mirror: plans were lost, repeated or reordered, or the planner is wrong."""


class RequestState:
    """Mirror of at most `max_num_seqs` requests of at most `max_model_len` tokens."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_kv_blocks: int = np.iinfo(np.int32).max,
    ) -> None:
        """`num_kv_blocks`: how many the KV cache has; a plan that names others is refused."""
        self.max_model_len = max_model_len
        self.block_size = block_size
        self._num_kv_blocks = num_kv_blocks
        self.token_ids = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        """[max_num_seqs, max_model_len]: known tokens, then the drafts of the step that runs."""
        max_blocks = -(-max_model_len // block_size)
        self.block_table: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks: IntArray = np.zeros(max_num_seqs, np.int64)
        self.num_prompt: IntArray = np.zeros(max_num_seqs, np.int64)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, np.int64)
        """Known tokens, sampled ones included even while only the device knows their values."""
        self.num_computed: IntArray = np.zeros(max_num_seqs, np.int64)
        self.num_drafts: IntArray = np.zeros(max_num_seqs, np.int64)
        """Drafts placed after the known tokens and not yet verified."""
        self.stay: IntArray = np.zeros(max_num_seqs, np.int64)
        """Serial number of the slot's occupation: tells a reused slot from the same one."""
        self.sampling = SamplingTable(max_num_seqs)
        self.clear()

    def clear(self) -> None:
        """Forget every request, and which epoch and step came last."""
        self.stay += 1
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(len(self.num_tokens)))[::-1]
        self._epoch: int | None = None
        self._step_id: int | None = None

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests held, oldest stay first."""
        return tuple(self._slots)

    def slots_of(self, request_ids: Sequence[str]) -> IntArray:
        """Slots, [len(request_ids)]. Raises PlanError for an id that is not held."""
        return np.array([self._slot(request_id) for request_id in request_ids], np.int64)

    def output_positions(self, slots: IntArray, positions: IntArray) -> IntArray:
        """Index in the output, [n], of the tokens at n (slot, position) pairs."""
        return positions - self.num_prompt[slots]

    def apply_plan(self, plan: StepPlan) -> None:
        """Follow a plan's deltas: first those that leave, then those that come, then blocks and drafts.

        A plan of a later epoch starts from an empty mirror. Raises PlanError; the mirror is then
        good for nothing but a new epoch.
        """
        self._enter(plan)
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self._remove(request_id)
        for new_request in plan.new_requests:
            self._add(new_request)
        for request_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self._slot(request_id), block_ids)
        for request_id, draft_token_ids in plan.spec_token_ids.items():
            if request_id not in plan.num_scheduled_tokens:
                raise PlanError(f"request {request_id!r} gets drafts in plan {plan.step_id} but is not scheduled")
            self._place_drafts(request_id, draft_token_ids)

    def tokens_at(self, slots: IntArray, positions: IntArray) -> torch.Tensor:
        """Token ids [n] int64 on the device, of n (slot, position) pairs."""
        return self.token_ids.take(self._flat(slots, positions)).to(torch.int64)

    def place_sampled(self, slots: IntArray, positions: IntArray, token_ids: torch.Tensor) -> None:
        """Put sampled tokens [n], which stay on the device, at n (slot, position) pairs.

        What was sampled behind a wrong draft is put in place as well: it lies beyond the known tokens
        once `apply_accepted` came, and is overwritten before it is read.
        """
        self.token_ids.put_(self._flat(slots, positions), token_ids.to(torch.int32))

    def apply_result(self, slots: IntArray, seq_lens: IntArray) -> None:
        """A step was launched: `slots` [num_reqs] progressed to `seq_lens`, and those that sampled know one token
        more. Requests with drafts wait for `apply_accepted`.
        """
        self.num_computed[slots] = seq_lens
        samples = (seq_lens >= self.num_tokens[slots]) & (self.num_drafts[slots] == 0)
        self.num_tokens[slots[samples]] = seq_lens[samples] + 1

    def apply_accepted(self, slots: IntArray, stays: IntArray, num_accepted: IntArray) -> None:
        """Roll back rejected drafts: [num_verified] each. Slots that changed hands meanwhile are left alone."""
        current = self.stay[slots] == stays
        slots, num_accepted = slots[current], num_accepted[current]
        self.num_computed[slots] = self.num_tokens[slots] + num_accepted
        self.num_tokens[slots] += num_accepted + 1
        self.num_drafts[slots] = 0

    def _flat(self, slots: IntArray, positions: IntArray) -> torch.Tensor:
        return to_device(slots * self.max_model_len + positions, self.token_ids.device)

    def _enter(self, plan: StepPlan) -> None:
        if self._epoch is not None and plan.epoch < self._epoch:
            raise PlanError(f"plan {plan.step_id} is of epoch {plan.epoch}; epoch {self._epoch} has begun")
        if plan.epoch != self._epoch:
            self.clear()
        elif self._step_id is not None and plan.step_id <= self._step_id:
            raise PlanError(f"plan {plan.step_id} came after plan {self._step_id} of epoch {plan.epoch}")
        self._epoch, self._step_id = plan.epoch, plan.step_id

    def _slot(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            raise PlanError(f"request {request_id!r} is not held: it was never sent, finished or was preempted")
        return slot

    def _remove(self, request_id: str) -> None:
        slot = self._slot(request_id)
        del self._slots[request_id]
        self._free_slots.append(slot)
        self.stay[slot] += 1

    def _add(self, new: NewRequest) -> None:
        if new.request_id in self._slots:
            raise PlanError(f"request {new.request_id!r} is new but is held already")
        if new.lora_id is not None:
            raise PlanError(f"request {new.request_id!r} asks for adapter {new.lora_id!r}; no adapter is loaded")
        num_tokens = len(new.token_ids)
        if not 0 <= new.num_computed_tokens < num_tokens:
            raise PlanError(
                f"request {new.request_id!r} comes with {new.num_computed_tokens} computed of {num_tokens} tokens"
            )
        if not 0 <= new.num_prompt_tokens <= num_tokens:
            raise PlanError(
                f"request {new.request_id!r} comes with {num_tokens} tokens, {new.num_prompt_tokens} of them its prompt"
            )
        if num_tokens >= self.max_model_len:
            raise PlanError(
                f"request {new.request_id!r} has {num_tokens} tokens; max_model_len is {self.max_model_len}"
            )
        if not self._free_slots:
            raise PlanError(f"request {new.request_id!r} is one more than max_num_seqs ({len(self.num_tokens)})")
        slot = self._free_slots.pop()
        self._slots[new.request_id] = slot
        self._write_tokens(slot, 0, new.token_ids)
        self.num_prompt[slot] = new.num_prompt_tokens
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = new.num_computed_tokens
        self.num_drafts[slot] = 0
        self.num_blocks[slot] = 0
        self.sampling.set(slot, new.sampling_params)
        self._append_blocks(slot, new.block_ids)

    def _append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        start = int(self.num_blocks[slot])
        end = start + len(block_ids)
        if end > self.block_table.shape[1]:
            raise PlanError(f"a block table of {end} blocks; max_model_len needs {self.block_table.shape[1]} at most")
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_kv_blocks:
            raise PlanError(f"block ids {list(block_ids)[:8]} are not all below {self._num_kv_blocks}")
        self.block_table[slot, start:end] = block_ids
        self.num_blocks[slot] = end

    def _place_drafts(self, request_id: str, draft_token_ids: Sequence[int]) -> None:
        slot = self._slot(request_id)
        if self.num_drafts[slot]:
            raise PlanError(f"request {request_id!r} gets drafts while those of an earlier step are unverified")
        start, num_drafts = int(self.num_tokens[slot]), len(draft_token_ids)
        if start + num_drafts >= self.max_model_len:
            raise PlanError(
                f"request {request_id!r} has {start} tokens and {num_drafts} drafts;"
                f" max_model_len is {self.max_model_len}"
            )
        self._write_tokens(slot, start, draft_token_ids)
        self.num_drafts[slot] = num_drafts

    def _write_tokens(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        values = to_device(np.array(token_ids, np.int32), self.token_ids.device)
        self.token_ids[slot, start : start + len(token_ids)] = values

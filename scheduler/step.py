"""A plan in the making."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.eviction import Eviction
from scheduler.plan import NewRequest
from scheduler.request import Request


@dataclass(slots=True)
class Step:
    """What one pass of the scheduler has decided so far."""

    budget: int
    """Tokens left."""
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_requests: dict[str, NewRequest] = field(default_factory=dict)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    chunks: list[Request] = field(default_factory=list)
    """Running requests that were chunks when the step began, in admission order."""
    partials: dict[str, Request] = field(default_factory=dict)
    """Running requests that are partial as things stand; a chunk not reached yet is."""
    drafting: list[Request] = field(default_factory=list)
    """Decodes that have drafts."""
    preempted: set[str] = field(default_factory=set)
    skipped: list[Request] = field(default_factory=list)
    """Waiting requests that were not ready, taken out of the queue until the step is planned."""
    admits: bool = True
    """False once admission has ended for this step."""
    largest_priority: int | None = None
    """No running request has a larger value; None: none gives way to a waiting one."""
    vain_eviction: Eviction | None = None
    """Every request that an earlier waiting one could evict, where that was not enough."""

    @property
    def num_long_partials(self) -> int:
        return sum(request.is_long_prefill for request in self.partials.values())

    def add(self, request: Request, num_tokens: int, block_ids: Sequence[int]) -> None:
        """Let a running request compute tokens; `block_ids` are those appended to its table for them."""
        request_id = request.request_id
        self.budget -= num_tokens
        self.num_scheduled_tokens[request_id] = self.num_scheduled_tokens.get(request_id, 0) + num_tokens
        request.num_computed_tokens += num_tokens
        if block_ids:
            self.new_block_ids.setdefault(request_id, []).extend(block_ids)
        if request_id in self.partials and not request.is_partial:
            del self.partials[request_id]

    def add_new(self, request: Request, num_tokens: int, block_ids: Sequence[int]) -> None:
        """Let a request that was just admitted compute tokens; `block_ids` is its whole table."""
        self.new_requests[request.request_id] = NewRequest(
            request_id=request.request_id,
            token_ids=request.all_token_ids[:],
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            block_ids=list(block_ids),
            num_computed_tokens=request.num_computed_tokens,
            lora_id=request.lora_id,
        )
        self.add(request, num_tokens, ())
        if request.is_partial:
            self.partials[request.request_id] = request

    def take_back(self, request: Request) -> bool:
        """Remove all trace of a request that is being preempted, and refund its tokens.

        Its progress is again that before the step. Returns whether the workers hold it.
        """
        request_id = request.request_id
        num_tokens = self.num_scheduled_tokens.pop(request_id, 0)
        self.budget += num_tokens
        request.num_computed_tokens -= num_tokens
        self.new_block_ids.pop(request_id, None)
        self.spec_token_ids.pop(request_id, None)
        self.partials.pop(request_id, None)
        self.preempted.add(request_id)
        return self.new_requests.pop(request_id, None) is None

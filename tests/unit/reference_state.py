"""What the reference scheduler stores, and how events and results change it.

It stores progress, status, block tables, the order of the free list and the map of cached blocks. Reference
counts, free room and everything else is worked out again at every question.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.config import SchedulerConfig
from scheduler.plan import RequestOutput, StepPlan, StepResult
from scheduler.sampling_params import SamplingParams

CacheKey = tuple[str | None, str | None, tuple[int, ...]]
"""Adapter, salt and all tokens up to the end of the block: what a chain of hashes stands for."""


@dataclass(eq=False)
class ReferenceRequest:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    arrival: int
    priority: int
    lora_id: str | None
    cache_salt: str | None
    has_grammar: bool
    status: str
    output: list[int] = field(default_factory=list)
    computed: int = 0
    placeholders: int = 0
    drafts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    stay: int = 0
    is_long: bool = False
    num_cached: int | None = None
    resubmitted: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def known(self) -> int:
        """Tokens known or in flight."""
        return len(self.tokens) + self.placeholders

    @property
    def is_decoding(self) -> bool:
        return self.computed >= self.known - 1


@dataclass
class Flight:
    """What a plan in flight remembers of one request."""

    stay: int
    progress: int
    drafts: list[int]
    samples: bool


class ReferenceState:
    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.requests: dict[str, ReferenceRequest] = {}
        self.running: list[ReferenceRequest] = []
        self.waiting: list[ReferenceRequest] = []
        self.free: list[int] = list(range(num_blocks))
        self.key_of: dict[int, CacheKey] = {}
        self.epoch = 0
        self.step_id = 0
        self.flights: dict[int, dict[str, Flight]] = {}
        self.pending_finished: list[str] = []
        self.pending_preempted: list[str] = []
        self.held: set[str] = set()
        self.num_preemptions = {"blocks": 0, "priority": 0, "epoch": 0, "hold": 0}

    # ---- events between steps

    def add_request(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        arrival: int,
        priority: int = 0,
        lora_id: str | None = None,
        cache_salt: str | None = None,
        has_grammar: bool = False,
        output: Sequence[int] = (),
    ) -> bool:
        """False: refused."""
        if len(prompt) >= self.config.max_model_len:
            return False
        max_tokens = min(params.max_tokens, self.config.max_model_len - len(prompt))
        if self.blocks_for(len(prompt) + max_tokens - 1) > self.num_blocks:
            return False
        if len(output) >= max_tokens:
            return False
        status = "WAITING_FOR_FSM" if has_grammar else "WAITING"
        request = ReferenceRequest(
            request_id,
            list(prompt),
            params,
            max_tokens,
            arrival,
            priority,
            lora_id,
            cache_salt,
            has_grammar,
            status,
            output=list(output),
            resubmitted=bool(output),
        )
        self.requests[request_id] = request
        self.enqueue(request, at_head=False)
        if self.config.policy == "fcfs" and output:
            preempted = [r for r in self.waiting if r.status == "PREEMPTED"]
            resubmitted = [r for r in self.waiting if r.resubmitted and r not in preempted]
            new = [r for r in self.waiting if r not in preempted and r not in resubmitted]
            self.waiting = preempted + sorted(resubmitted, key=lambda r: r.arrival) + new
        return True

    def mark_grammar_ready(self, request_id: str) -> None:
        if request_id in self.requests and self.requests[request_id].status == "WAITING_FOR_FSM":
            self.requests[request_id].status = "WAITING"

    def finish_request(self, request_id: str) -> None:
        if request_id in self.requests:
            self.remove(self.requests[request_id])

    def hold(self, request_ids: set[str]) -> None:
        self.held = request_ids
        for request in [r for r in reversed(self.running) if r.request_id in request_ids]:
            self.running.remove(request)
            self.release(request)
            self.reset(request, "hold")
            self.enqueue(request, at_head=True)
            self.pending_preempted.append(request.request_id)

    def end_epoch(self) -> None:
        for request in reversed(self.running):  # each goes to the head: the queue ends in admission order
            self.reset(request, "epoch")
            self.enqueue(request, at_head=True)
        self.running = []
        self.key_of = {}
        self.free = list(range(self.num_blocks))
        self.flights = {}
        self.pending_finished = []
        self.pending_preempted = []
        self.epoch += 1

    def reset(self, request: ReferenceRequest, reason: str) -> None:
        request.status = "PREEMPTED"
        request.computed = request.placeholders = request.published = 0
        request.drafts = []
        request.blocks = []
        request.stay += 1
        self.num_preemptions[reason] += 1

    def enqueue(self, request: ReferenceRequest, at_head: bool) -> None:
        self.waiting.insert(0 if at_head else len(self.waiting), request)
        if self.config.policy == "priority":
            self.waiting.sort(key=self.rank)

    def rank(self, request: ReferenceRequest) -> tuple[int, bool, int]:
        """Under the priority policy."""
        return (request.priority, not request.resubmitted, request.arrival)

    def remove(self, request: ReferenceRequest) -> None:
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.release(request)
        self.pending_finished.append(request.request_id)
        del self.requests[request.request_id]

    # ---- results

    def update_from_result(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        if plan.epoch != self.epoch:
            return []
        outputs = []
        for request_id, flight in self.flights.pop(plan.step_id).items():
            request = self.requests.get(request_id)
            if request is None or request.status != "RUNNING" or request.stay != flight.stay:
                continue
            if request_id in result.errors:
                for block in request.blocks:
                    self.key_of.pop(block, None)
                self.remove(request)
                outputs.append(self.output(request, [], "error"))
                continue
            sampled = result.sampled_token_ids[request_id] if flight.samples else []
            outputs += self.take(request, flight, sampled, result.draft_token_ids.get(request_id, []))
        return outputs

    def take(
        self, request: ReferenceRequest, flight: Flight, sampled: list[int], proposed: list[int]
    ) -> list[RequestOutput]:
        rejected = 0
        new_tokens: list[int] = []
        reason = None
        if flight.samples:
            request.placeholders -= 1
            rejected = len(flight.drafts) - (len(sampled) - 1)
            request.computed -= rejected
        for token in sampled:
            request.output.append(token)
            new_tokens.append(token)
            if token in request.params.stop_token_ids:
                reason = "stop"
            elif len(request.output) >= request.max_tokens or len(request.tokens) >= self.config.max_model_len:
                reason = "length"
            if reason:
                break
        self.publish(request, min(flight.progress - rejected, len(request.tokens)))
        if reason:
            self.remove(request)
        elif request.placeholders == 0:
            request.drafts = list(proposed)
        return [self.output(request, new_tokens, reason)] if new_tokens else []

    def output(self, request: ReferenceRequest, new_tokens: list[int], reason: str | None) -> RequestOutput:
        return RequestOutput(request.request_id, new_tokens, reason, request.num_cached or 0)

    # ---- blocks

    def blocks_for(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.config.block_size)

    def key(self, request: ReferenceRequest, index: int) -> CacheKey:
        end = (index + 1) * self.config.block_size
        return (request.lora_id, request.cache_salt, tuple(request.tokens[:end]))

    def lookup(self, request: ReferenceRequest) -> list[int]:
        if not self.config.enable_prefix_caching or request.params.num_prompt_logprobs is not None:
            return []
        block_of = {key: block for block, key in self.key_of.items()}
        hit: list[int] = []
        while len(hit) < (len(request.tokens) - 1) // self.config.block_size:
            block = block_of.get(self.key(request, len(hit)))
            if block is None:
                break
            hit.append(block)
        return hit

    def allocate(self, request: ReferenceRequest, num_tokens: int) -> None:
        while len(request.blocks) < self.blocks_for(num_tokens):
            block = self.free.pop(0)
            self.key_of.pop(block, None)
            request.blocks.append(block)

    def release(self, request: ReferenceRequest) -> None:
        blocks, request.blocks = request.blocks, []
        for block in reversed(blocks):
            if any(block in r.blocks for r in self.running):
                continue
            if block in self.key_of:
                self.free.append(block)
            else:
                self.free.insert(0, block)

    def publish(self, request: ReferenceRequest, num_tokens: int) -> None:
        if not self.config.enable_prefix_caching:
            return
        while (request.published + 1) * self.config.block_size <= num_tokens:
            key = self.key(request, request.published)
            if key not in self.key_of.values():
                self.key_of[request.blocks[request.published]] = key
            request.published += 1

"""Everything that crosses a process boundary between engine, workers and front ends. No behaviour.

Both ends of the step link evolve the same state from the same two events (a plan was made, a result
arrived), so the wire carries only ids, counts and sampled tokens. The types that exist once a step
are frozen; `RequestOutput` exists once a request and step, and freezing it costs eight times as much.
"""

from dataclasses import dataclass, field

from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the workers do not hold (yet, or any more: a resumed request is a NewRequest)."""

    request_id: str
    token_ids: list[int]
    """All tokens known: the prompt, and for a resumed request its output so far."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: list[int]
    """Its block table, prefix-cache hits first."""
    num_computed_tokens: int
    """Tokens whose KV the block table already holds (the prefix-cache hit)."""
    lora_id: str | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: who computes how many tokens. Only deltas; workers mirror the rest.

    Workers apply finished and preempted ids before new requests, and plans strictly in order.
    """

    epoch: int
    step_id: int
    num_scheduled_tokens: dict[str, int]
    """request id -> tokens to compute, drafts included. Its order is the order of the batch's rows."""
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    """Blocks appended to the tables of requests that the workers hold already."""
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Draft tokens, computed after the request's known tokens and verified by the worker."""
    finished_request_ids: list[str] = field(default_factory=list)
    preempted_request_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What makes a step's time. Never leaves the engine."""

    num_decode_tokens: int
    """Tokens of requests that owe one token, drafts included."""
    num_chunk_tokens: int
    decode_context: int
    """Sum over those requests of the tokens that the last one attends to."""
    chunk_pairs: int
    """Pairs of a chunk's token and a token that it attends to."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw distribution (before penalties and temperature)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(token id, logprob), best first; the request's num_logprobs entries, without regard to token_id."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the consecutive prompt tokens from position `start` (at least 1) on."""

    start: int
    tokens: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. A request whose prefill is still partial has no entry."""

    epoch: int
    step_id: int
    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """The accepted drafts and the one token sampled after them (without drafts: one token)."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Proposals for the next step, by a drafter in the worker."""
    errors: dict[str, str] = field(default_factory=dict)
    """Faults of single requests (NaN logits); the rest of the step stands."""
    execute_seconds: float = 0.0
    collective_seconds: float = 0.0
    """Of these, in rank 0's collectives, waiting for slower ranks included; 0 where the host does not wait for them."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Where rank 0's time has gone since its last result; empty unless steps are profiled."""


@dataclass(slots=True)
class RequestOutput:
    """What one step means for one request; at most one a request and step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    """None, "stop", "length", "abort", "error" or "lost"; set exactly once, on the request's last output.

    "lost": this engine cannot go on with it, another can. "error" is final."""
    num_cached_tokens: int = 0
    """Prefix-cache hit of the first admission, in tokens."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """May repeat positions already sent (recomputation after a preemption): readers go by `start`."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges as of now, and counters since the scheduler was built (tokens, unless said otherwise)."""

    num_requests_running: int
    num_requests_waiting: int
    """All that wait, PREEMPTED and WAITING_FOR_FSM included."""
    num_requests_waiting_for_grammar: int
    num_blocks: int
    num_used_blocks: int
    """Referenced blocks; cached but free blocks are free."""
    token_budget: int
    """The budget of the last plan."""
    token_budget_reason: str
    prompt_tokens: int
    """Prompt tokens of admitted requests, counted at the first admission."""
    prompt_tokens_cached: int
    generation_tokens: int
    num_preemptions: dict[str, int]
    """Preempted stays by reason: "blocks", "priority", "epoch", "hold"."""
    recomputed_tokens: int
    """Tokens computed before a preemption that the cache did not give back."""
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_drafts: int
    """Verified draft lists (requests, not tokens)."""
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a scheduler tells those who choose between replicas: how busy it is, and how its prefix cache changed."""

    sequence: int
    """One more than that of the report before it, or the reader has missed one."""
    is_snapshot: bool
    """`added` is the whole cache, whatever the reader held."""
    block_size: int
    queued_tokens: int
    """To be computed before the first token of a request that came now (`scheduler.backlog`)."""
    prefill_rate: float
    """Tokens a second, beside the decodes that run; 0 while it computes nothing."""
    added: list[bytes]
    """Block hashes (`scheduler.block_hashes`)."""
    removed: list[bytes]

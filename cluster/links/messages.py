"""What front ends and engines say to each other. No behaviour.

`GenerateRequest`, `GenerateSummary`, `EngineStatus` and `StepRecord` travel through a Serve handle, the rest as msgspec
messages on the token link that the engine opens to each front end.
"""

from dataclasses import dataclass, field

from scheduler.plan import ReplicaReport, RequestOutput
from scheduler.sampling_params import SamplingParams

READY = "ready"
"""The key under which an engine tells Serve's routers whether it takes requests and computes them now."""


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where a link listens, and the random token its caller must show first."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One choice of one API request. `request_id` is internal, unique and never reused."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    """Seconds since the epoch, by the front end's clock."""
    reply_to: LinkAddress
    priority: int = 0
    cache_salt: str | None = None
    lora_id: str | None = None
    resubmitted: bool = False
    """An engine had taken it and was lost: it goes before new requests, and a full queue does not turn it away."""
    output_token_ids: list[int] = field(default_factory=list)
    """Delivered already, by an engine that has lost the request: this one goes on after them, and reports only new
    tokens. Empty for a new request.
    """
    delivered_at: tuple[float, float] | None = None
    """When the first and the last of these tokens came, as `arrival_time`; None when there are none."""


@dataclass(frozen=True, slots=True)
class GenerateSummary:
    """How a request ended: the front end reads its token link up to `num_tokens`, which counts what this engine gave.

    Reason "lost": this engine cannot go on with it (failed, shut down); whoever holds its prompt and tokens may
    submit it again elsewhere. "error" is final.
    """

    finish_reason: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Front end to engine, first thing on every link: how much it holds of what it waits for.

    The engine sends nothing before it, and sends on from there; requests it does not name are sent whole.
    """

    num_tokens: dict[str, int]
    """request id -> tokens held; -1 when not even the admission has come."""


@dataclass(frozen=True, slots=True)
class Admission:
    """First message for a request: accepted (`error` None) or refused, and why."""

    request_id: str
    error: str | None = None
    param: str | None = None
    retry_after: float | None = None
    """Seconds; set when it was refused because the queue is too long."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All that one step means for one front end."""

    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class Finish:
    """Front end to engine: end this request, "stop" at a stop string, "abort" when its client left."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Front end to engine: send a snapshot of the prefix cache and then its changes, as long as this link lasts.

    Sent again when a report was missed.
    """


EngineToFrontend = Admission | TokenBatch | ReplicaReport
FrontendToEngine = Resume | Finish | Watch


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine tells of itself."""

    ready: bool
    """It takes requests and computes them now."""
    live: bool
    """Nothing says that it must be replaced: it steps, is idle, starts or recovers."""
    phase: str
    """"ready", a start-up phase, "recovering: " and why, or the cause of its end."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as the engine saw it. Times are `time.perf_counter()`, in seconds."""

    epoch: int
    step_id: int
    num_requests: int
    """Requests in the plan."""
    num_decodes: int
    """Of them, those that had sampled a token before it."""
    num_decode_tokens: int
    """Their tokens, drafts included."""
    num_chunk_tokens: int
    """All other tokens of the plan."""
    num_missed_decodes: int
    """Requests that had sampled, are still open, and are not in the plan: 0 means that no stream waited."""
    num_preempted: int
    sent_ahead: bool
    """The plan was sent before the result of the plan before it had arrived."""
    execute_seconds: float
    """The worker's own measure of its step."""
    wall_seconds: float
    """From the later of (plan sent, previous result) to the result: the step's share of a stream's gap."""
    sent_at: float
    received_at: float
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Where rank 0's and the engine's time has gone since the step before it; empty unless steps are profiled."""

"""What an engine tells whoever watches it. Called on the engine's thread: implementations must not wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.plan import RequestOutput, SchedulerStats
from workers.config import ModelLimits


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as the engine saw it. Times are seconds of the monotonic clock."""

    epoch: int
    step_id: int
    num_scheduled_tokens: dict[str, int]
    """The plan's own map: request id -> tokens."""
    num_decodes: int
    """Requests in the plan that had sampled a token before it."""
    num_decode_tokens: int
    """Their tokens, drafts included."""
    num_chunk_tokens: int
    """All other tokens of the plan."""
    num_missed_decodes: int
    """Requests that had sampled, were still open, and are not in the plan: 0 keeps streams steady."""
    num_preempted: int
    sent_ahead: bool
    """The plan was sent before the result of the plan before it had arrived."""
    execute_seconds: float
    """The worker's own measure of its step."""
    wall_seconds: float
    """From the later of (sent, previous result) to the result: the step's share of the stream's gap."""
    idle_seconds: float
    """How long the workers had no plan before this one, while requests were open."""
    finished_at: float


class EngineObserver(Protocol):
    """Receives an engine's life and steps, in order."""

    def phase(self, name: str, seconds: float) -> None:
        """A start-up phase ended: "place", "load", "measure", "allocate", "link"."""

    def started(self, engine_id: str, limits: ModelLimits) -> None: ...

    def step(self, record: StepRecord, stats: SchedulerStats, outputs: Sequence[RequestOutput]) -> None:
        """After each result."""

    def request_added(self, request_id: str, num_prompt_tokens: int) -> None: ...

    def request_refused(self, request_id: str, param: str | None) -> None: ...

    def request_finished(self, output: RequestOutput) -> None:
        """Exactly once a request that was added, with its finish_reason."""

    def idle(self, stats: SchedulerStats) -> None:
        """No request is open any more, or a request ended without a step: gauges may be stale otherwise."""

    def failed(self, cause: str) -> None:
        """The engine lost its executor and serves no more."""

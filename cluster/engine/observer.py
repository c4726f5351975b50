"""What an engine tells whoever measures it. Called on the engine's thread: implementations must not wait."""

from collections.abc import Iterable
from typing import Protocol

from scheduler.plan import RequestOutput, SchedulerStats, StepPlan, StepResult


class EngineObserver(Protocol):
    """Receives the events of one engine, in order. Times are `time.perf_counter()`, in seconds."""

    def add(self, request_id: str, num_prompt_tokens: int, arrival_time: float) -> None:
        """A request was accepted; it arrived at `arrival_time` seconds since 1970."""

    def refuse(self, reason: str) -> None:
        """A request was refused when it was added; `reason` is the field at fault."""

    def finish(self, request_id: str, reason: str) -> None:
        """A request was ended between steps: "stop", "abort" or "error"."""

    def observe(
        self,
        plan: StepPlan,
        result: StepResult,
        outputs: Iterable[RequestOutput],
        stats: SchedulerStats,
        sent_at: float,
        received_at: float,
    ) -> None:
        """A step has ended."""

    def update_stats(self, stats: SchedulerStats) -> None:
        """Adds or aborts changed the gauges, and no step follows."""

    def set_up(self, up: bool) -> None:
        """Whether the engine can serve now."""


class SilentObserver:
    """Measures nothing."""

    def add(self, request_id: str, num_prompt_tokens: int, arrival_time: float) -> None:
        pass

    def refuse(self, reason: str) -> None:
        pass

    def finish(self, request_id: str, reason: str) -> None:
        pass

    def observe(
        self,
        plan: StepPlan,
        result: StepResult,
        outputs: Iterable[RequestOutput],
        stats: SchedulerStats,
        sent_at: float,
        received_at: float,
    ) -> None:
        pass

    def update_stats(self, stats: SchedulerStats) -> None:
        pass

    def set_up(self, up: bool) -> None:
        pass

"""The seam between the engine loop and whatever executes its plans."""

from collections.abc import Awaitable
from typing import Protocol

from scheduler.plan import StepPlan, StepResult
from workers.config import ModelLimits


class Executor(Protocol):
    """A group of ranks seen as one device. Plans are executed strictly in the order they are given."""

    async def start(self) -> ModelLimits:
        """Start ranks, load weights, measure and allocate KV. Raises ExecutorError with the cause."""

    def execute_step(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Send at once, without waiting; the awaitable gives the result or raises ExecutorError."""

    def check_health(self) -> None:
        """Raises ExecutorError if a rank is known to be dead."""

    async def shutdown(self) -> None:
        """Stop every rank; returns within seconds, whatever state they are in."""

"""What a step's token budget is, and why."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request


class StepBudget(NamedTuple):
    """Most tokens that the next step computes, and the reason shown to operators."""

    num_tokens: int
    reason: str


class Budget(Protocol):
    """Answers for every step what its budget is. The one seat of whoever controls step times."""

    def next_step(self, running: Sequence[Request]) -> StepBudget:
        """The budget of the step about to be planned.

        `running` is in admission order, with progress up to the plans in flight. At least the number
        of decoding requests, or some of them would miss the step; the scheduler applies
        `max_num_batched_tokens` on top.
        """

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step of this epoch has run, in `result.execute_seconds`. Called in the order of the plans."""


class StaticBudget:
    """The same budget for every step."""

    def __init__(self, num_tokens: int) -> None:
        self._budget = StepBudget(num_tokens, "static")

    def next_step(self, running: Sequence[Request]) -> StepBudget:
        return self._budget

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Nothing to learn."""

"""Plans whose results are still to come, and what each remembers until then."""

from collections import deque
from dataclasses import dataclass

from scheduler.plan import StepLoad, StepPlan, StepResult
from scheduler.request import Request

Flight = tuple[Request, int, int, int, bool]
"""Of a request in a plan in flight: its stay (num_preemptions), its progress after the plan, how many
drafts the plan verifies, and whether it samples. A plain tuple: there is one per request and step."""


@dataclass(frozen=True, slots=True)
class _Plan:
    step_id: int
    flights: list[Flight]
    load: StepLoad


class InFlight:
    """The plans in flight, oldest first."""

    def __init__(self) -> None:
        self._plans: deque[_Plan] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, step_id: int, flights: list[Flight], load: StepLoad) -> None:
        """A plan goes out."""
        self._plans.append(_Plan(step_id, flights, load))

    def take(self, plan: StepPlan, result: StepResult) -> list[Flight]:
        """The oldest plan is back. Raises ValueError if it is not the one meant."""
        oldest = self._plans[0].step_id if self._plans else None
        if not oldest == plan.step_id == result.step_id:
            raise ValueError(
                f"plan {plan.step_id} came with the result of step {result.step_id}; the oldest in flight is {oldest}"
            )
        return self._plans.popleft().flights

    def clear(self) -> None:
        """No result will come any more."""
        self._plans.clear()

    def load_of(self, plan: StepPlan) -> StepLoad:
        """What a plan computes. Raises LookupError if it is not in flight."""
        for other in self._plans:
            if other.step_id == plan.step_id:
                return other.load
        raise LookupError(f"plan {plan.step_id} is not in flight")

    def positions(self) -> dict[str, int]:
        """Of each open request, the last token that these plans compute for it, counted with its prompt.

        It is past that position once it has more tokens: all that was in flight has then come back.
        """
        requests = {flight[0].request_id: flight[0] for plan in self._plans for flight in plan.flights}
        return {
            request_id: request.num_tokens + max(1, request.num_output_placeholders) - 1
            for request_id, request in requests.items()
            if not request.status.is_finished
        }

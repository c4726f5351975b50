"""How long a step may take before it counts as hung."""

from scheduler.plan import StepPlan

_MULTIPLE = 10.0


class StepDeadline:
    """Learns from steps that ended, by the shape of a step: its requests and its tokens, to the power of two.

    The first step of a shape may compile and gets all the time there is.
    """

    def __init__(self, first_seconds: float, floor_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._floor_seconds = floor_seconds
        self._longest: dict[tuple[int, int], float] = {}

    def seconds_for(self, plan: StepPlan) -> float:
        """The floor and a multiple of the longest step of its shape, at most what a first one gets."""
        longest = self._longest.get(_shape(plan))
        if longest is None:
            return self._first_seconds
        return min(self._first_seconds, self._floor_seconds + _MULTIPLE * longest)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step has ended, after `seconds` in the ranks."""
        shape = _shape(plan)
        self._longest[shape] = max(seconds, self._longest.get(shape, 0.0))

    def forget(self) -> None:
        """The ranks are new: every shape is."""
        self._longest.clear()


def _shape(plan: StepPlan) -> tuple[int, int]:
    scheduled = plan.num_scheduled_tokens
    return len(scheduled).bit_length(), sum(scheduled.values()).bit_length()

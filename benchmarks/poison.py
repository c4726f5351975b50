"""A request that is poison: it has a seed by which those who execute it know at which of its tokens to die."""

from dataclasses import dataclass

from scheduler.plan import StepPlan

_FIRST_SEED = 2**63
_NUM_SEEDS = 2**20


def seed_of(position: int) -> int:
    """The seed that makes a request poisonous at its token `position`, counted from 0 without the prompt."""
    return _FIRST_SEED + position


@dataclass(slots=True)
class _Poison:
    position: int
    """Counted with the prompt."""
    num_computed: int


class PoisonWatch:
    """Follows the plans of one rank. Knows nothing of drafts."""

    def __init__(self) -> None:
        self._requests: dict[str, _Poison] = {}

    def is_deadly(self, plan: StepPlan) -> bool:
        """Whether the plan, the next one in order, computes a poisonous token."""
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self._requests.pop(request_id, None)
        for new in plan.new_requests:
            offset = new.sampling_params.seed - _FIRST_SEED
            if 0 <= offset < _NUM_SEEDS:
                self._requests[new.request_id] = _Poison(new.num_prompt_tokens + offset, new.num_computed_tokens)
        deadly = False
        for request_id, poison in self._requests.items():
            first = poison.num_computed
            poison.num_computed += plan.num_scheduled_tokens.get(request_id, 0)
            deadly |= first <= poison.position < poison.num_computed
        return deadly

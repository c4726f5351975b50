"""Poison: which plans a rank that can be poisoned dies of."""

from benchmarks.poison import PoisonWatch, seed_of
from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams


def new(request_id: str, num_tokens: int, num_prompt_tokens: int, seed: int, num_computed: int = 0) -> NewRequest:
    sampling = SamplingParams(max_tokens=50, seed=seed)
    return NewRequest(request_id, [7] * num_tokens, num_prompt_tokens, sampling, [0], num_computed)


def test_the_position_is_deadly_however_it_is_computed() -> None:
    watch = PoisonWatch()
    other = new("other", 10, 10, seed=5)
    first = StepPlan(0, 0, {"poison": 10, "other": 10}, [new("poison", 10, 10, seed_of(2)), other])
    decodes = [StepPlan(0, step, {"other": 1, "poison": 1}) for step in (1, 2, 3)]
    assert [watch.is_deadly(plan) for plan in (first, *decodes)] == [False, False, False, True]
    # After a recovery all its tokens are computed again, here in two chunks after a hit in the prefix cache.
    again = StepPlan(1, 0, {"poison": 6}, [new("poison", 13, 10, seed_of(2), num_computed=4)])
    fresh = PoisonWatch()
    assert [fresh.is_deadly(plan) for plan in (again, StepPlan(1, 1, {"poison": 3}))] == [False, True]


def test_others_and_ended_requests_are_harmless() -> None:
    watch = PoisonWatch()
    assert not watch.is_deadly(StepPlan(0, 0, {"other": 9}, [new("other", 9, 9, seed=2**64 - 1)]))
    assert not watch.is_deadly(StepPlan(0, 1, {"poison": 9}, [new("poison", 9, 9, seed_of(0))]))
    assert not watch.is_deadly(StepPlan(0, 2, {"other": 1}, finished_request_ids=["poison"]))
    assert not watch.is_deadly(StepPlan(0, 3, {"other": 1}))

"""Serve's router interface around our choice: who is asked first, and when it is Serve's own choice."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import RequestRoutingContext

from cluster.links import engine_views
from cluster.links.engine_views import EngineViews, engine_name
from cluster.links.messages import GenerateRequest, LinkAddress
from cluster.links.predicted_router import PredictedRouter
from scheduler.plan import ReplicaReport
from scheduler.sampling_params import SamplingParams

ACTORS = ["aa" * 16, "bb" * 16, "cc" * 16]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Three engines, of which the second one is idle; what was routed is kept as `clock.routed`."""
    clock = Clock()
    views = EngineViews(clock)
    monkeypatch.setattr(engine_views, "_views", views)
    for actor, queued in zip(ACTORS, (500, 0, 900), strict=True):
        assert views.update(engine_name(actor), ReplicaReport(0, True, 16, queued, 100.0, [], []))
    return clock


def replicas() -> list[Any]:
    return [SimpleNamespace(actor_id=SimpleNamespace(hex=lambda actor=actor: actor)) for actor in ACTORS]


def pending(*args: object) -> Any:
    return SimpleNamespace(args=list(args), routing_context=RequestRoutingContext())


def request() -> GenerateRequest:
    return GenerateRequest("r", [1] * 20, SamplingParams(max_tokens=4), 0.0, LinkAddress("", 0, ""))


def router() -> Any:
    return PredictedRouter.__new__(PredictedRouter)


async def test_the_best_is_asked_first_and_then_all_others(clock: Clock) -> None:
    routed: list[tuple[str, float]] = []
    engine_views.process_views().on_route = lambda reason, age: routed.append((reason, age))
    clock.now = 1.0
    candidates, asked = replicas(), pending(request())
    ranks = await router().choose_replicas(candidates, asked)
    assert ranks == [[candidates[1]], [candidates[0], candidates[2]]]
    assert asked.routing_context.should_backoff  # or Serve would try again without a pause
    assert routed == [("least_work", 1.0)]


async def test_what_views_do_not_tell_is_power_of_two(clock: Clock) -> None:
    candidates, chosen = replicas(), [["two"]]
    with mock.patch.object(PowerOfTwoChoicesRequestRouter, "choose_replicas", return_value=chosen) as own:
        for asked in (pending(), pending(100), None):
            assert await router().choose_replicas(candidates, asked) is chosen
        clock.now = 60.0
        assert await router().choose_replicas(candidates, pending(request())) is chosen
        clock.now = 0.0
        assert await router().choose_replicas(candidates[:1], pending(request())) is chosen
    assert own.call_count == 5

"""Serve's router interface around our choice: who is asked first, and when it is Serve's own choice."""

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest, RequestRoutingContext

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


async def test_calls_of_one_client_request_all_get_an_engine() -> None:
    """Serve knows them by the same id, under which it keeps the last one."""
    asked = router()
    asked._pending_requests_by_id, asked._pending_requests_to_fulfill = {}, deque()
    asked._pending_requests_by_model_id = defaultdict(deque)
    asked._routing_task_by_pending_request_future = {}
    asked.queue_wait_time_ms_histogram = mock.Mock()
    metadata: Any = SimpleNamespace(internal_request_id="of the client", multiplexed_model_id="")
    calls = [PendingRequest([], {}, metadata) for _ in range(3)]
    for call in calls:
        asked._pending_requests_by_id[metadata.internal_request_id] = call
        asked._pending_requests_to_fulfill.append(call)
    for name in ("first", "second", "third"):
        asked._fulfill_next_pending_request(name, metadata)
    assert [call.future.result() for call in calls] == ["second", "third", "first"]


async def test_an_engine_is_for_the_call_that_it_was_chosen_for() -> None:
    asked = router()
    asked._routing_task_by_pending_request_future = {}
    asked.queue_wait_time_ms_histogram = mock.Mock()
    metadata: list[Any] = [SimpleNamespace(internal_request_id=name, multiplexed_model_id="") for name in "ab"]
    calls = [PendingRequest([], {}, each) for each in metadata]
    asked._pending_requests_by_id = dict(zip("ab", calls, strict=True))
    asked._pending_requests_to_fulfill = deque(calls)
    asked._fulfill_next_pending_request("of b", metadata[1])
    assert calls[1].future.result() == "of b"
    assert not calls[0].future.done()

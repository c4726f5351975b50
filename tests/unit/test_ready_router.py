"""Which engines Serve's router may choose."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from cluster.links.messages import READY
from cluster.links.ready_router import ReadyRouter


def replica(name: str, **stats: bool) -> Any:
    return SimpleNamespace(name=name, routing_stats=stats)


@pytest.mark.parametrize(
    ("replicas", "chosen"),
    [
        ([replica("new"), replica("a", **{READY: True}), replica("b", **{READY: False})], ["new", "a"]),
        ([replica("a", **{READY: False}), replica("b", **{READY: False})], ["a", "b"]),
        ([], []),
    ],
)
def test_engines_that_are_not_ready_are_left_out_unless_all_are(
    monkeypatch: pytest.MonkeyPatch, replicas: list[Any], chosen: list[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(PowerOfTwoChoicesRequestRouter, "update_replicas", lambda router, found: given.extend(found))
    ReadyRouter.update_replicas(object.__new__(ReadyRouter), replicas)
    assert [each.name for each in given] == chosen

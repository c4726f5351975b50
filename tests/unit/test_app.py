"""What deploying the application again replaces."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.errors import ConfigError
from cluster.launch.app import build_app
from cluster.launch.builder import build
from cluster.links.predicted_router import PredictedRouter
from cluster.links.ready_router import ReadyRouter
from cluster.models.store import StoredModel
from cluster.settings.source import resolve
from cluster.settings.tree import Device, engine_settings, frontend_settings


def versions(*words: str) -> dict[str, str]:
    """By deployment, of the application that these settings make."""
    device = Device()
    settings = resolve(device, None, list(words)).settings
    app: Any = build_app(settings, engine_settings(settings, "/model", device), frontend_settings(settings, "/model"))
    engine = app._bound_deployment.init_args[1]._bound_deployment
    return {each.name: each.version for each in (app._bound_deployment, engine)}


@pytest.mark.parametrize(
    ("word", "replaced"),
    [
        ("scheduler.max_num_batched_tokens=300", {"engine"}),
        ("server.max_body_mb=3", {"frontend"}),
        ("model.name=other", {"engine", "frontend"}),
        ("server.drain_seconds=3", set()),
        ("server.num_frontends=2", set()),
        ("parallel.num_replicas=2", set()),
        ("parallel.placement=spread", {"engine"}),
        ("autoscaling.max_replicas=3", set()),
        ("autoscaling.target_kv_usage=0.5", set()),
        ("parallel.router=power_of_two", {"frontend"}),
    ],
)
def test_only_what_is_built_from_other_settings_is_replaced(word: str, replaced: set[str]) -> None:
    before, after = versions(), versions(word)
    assert {name for name in before if before[name] != after[name]} == replaced
    assert versions() == before


def test_serve_builds_it_from_a_tree_and_not_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StoredModel(Path("/model"), "a fake", 0.0)
    monkeypatch.setattr("cluster.launch.builder.open_store", lambda say: Mock(resolve=lambda path: model))
    args = {"model": {"device": "cuda"}, "parallel": {"tensor_parallel_size": 2}}
    app: Any = build(args)
    engine = app._bound_deployment.init_args[1]._bound_deployment
    assert engine._replica_config.placement_group_bundles == [{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert engine.init_args[0].worker.device == "cuda"
    assert engine.init_args[0].worker.model_path == "/model"
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        build({"parallel": {"tensor_paralel_size": 2}})


@pytest.mark.parametrize(
    ("word", "router"), [("parallel.router=predicted", PredictedRouter), ("parallel.router=power_of_two", ReadyRouter)]
)
def test_who_chooses_engines(word: str, router: type) -> None:
    device = Device()
    settings = resolve(device, None, [word]).settings
    frontend = frontend_settings(settings, "/model")
    app: Any = build_app(settings, engine_settings(settings, "/model", device), frontend)
    engine = app._bound_deployment.init_args[1]._bound_deployment
    assert engine._deployment_config.request_router_config.get_request_router_class() is router
    assert frontend.uses_views == (router is PredictedRouter)

"""What the chart hands to KubeRay is an application that Serve builds, deploys and answers with."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from rendered_chart import changed, of_kind, render, values_of
from served_model import write_served_model

from cluster.launch.local_ray import free_ports

START_SECONDS = 120.0
POLL_SECONDS = 0.25


@pytest.fixture
def serve_config(tmp_path: Path) -> str:
    """Of the laptop's values with a tiny model; the file of keys lies where a test may write."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "api-keys").write_text("first\n")
    values = values_of("laptop")
    for path, value in {
        ("secrets", "apiKeys", "name"): "keys",
        ("settings", "model", "path"): str(write_served_model(tmp_path / "model")),
        ("settings", "model", "name"): "tiny",
        ("settings", "server", "host"): "127.0.0.1",
        ("settings", "server", "port"): free_ports(1)[0],
        ("settings", "cache", "memory_gb"): 0.1,
    }.items():
        values = changed(values, path, value)
    text: str = of_kind(render(values), "RayService")["spec"]["serveConfigV2"]
    assert "/etc/chunkserve/keys/" in text
    return text.replace("/etc/chunkserve/keys", str(keys))


@pytest.fixture
def deployed(ray_session: None, serve_config: str) -> Iterator[dict[str, object]]:
    """As KubeRay does it through the dashboard: the whole configuration goes to Serve's controller."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from cluster.metrics.actor import remove_metrics_actor
    from cluster.settings.tree import APP_NAME

    config = yaml.safe_load(serve_config)
    serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
    deadline = time.monotonic() + START_SECONDS
    while (found := serve.status().applications.get(APP_NAME)) is None or found.status != "RUNNING":
        message = found.message if found is not None else ""
        assert found is None or "FAILED" not in found.status, message
        assert time.monotonic() < deadline, f"not running after {START_SECONDS:g} s: {message}"
        time.sleep(POLL_SECONDS)
    yield config
    serve.shutdown()
    remove_metrics_actor(APP_NAME)


def test_it_is_deployed_and_answers_who_has_a_key(deployed: dict[str, dict[str, object]], tmp_path: Path) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{deployed['http_options']['port']}", timeout=60) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/health/live").status_code == 200
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
        assert http.post("/v1/completions", json=body).status_code == 401
        http.headers["authorization"] = "Bearer first"
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        (tmp_path / "keys" / "api-keys").write_text("another\n")
        assert http.post("/v1/completions", json=body).status_code == 401
        assert "chunkserve:engine_up" in http.get("/metrics").text

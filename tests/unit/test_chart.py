"""The chart: it renders to what Kubernetes, KubeRay and chunkserve take, and refuses what nobody would read."""

import json
import runpy
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from kuberay_schemas import CUSTOM_RESOURCES
from rendered_chart import CHART, ROOT, changed, merged, of_kind, render, values_of

from cluster import commands
from cluster.settings.source import resolve
from cluster.settings.tree import Device

KUBERNETES = "1.34"
CONFIGS = ("laptop", "one-gpu", "node-8gpu", "autoscaled-4xtp2", "two-node-tp16")
EVERYTHING: dict[str, Any] = {
    "service": {"enabled": True},
    "secrets": {"hubToken": {"name": "hub"}, "apiKeys": {"name": "keys"}},
    "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 3},
    "gcsFaultTolerance": {
        "enabled": True,
        "redisAddress": "redis:6379",
        "redisUsername": {"name": "redis"},
        "redisPassword": {"name": "redis"},
    },
    "networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]},
    "podDisruptionBudget": {"enabled": True},
    "monitoring": {
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    },
    "batch": {"enabled": True, "input": "/data/in", "output": "/data/out", "data": {"claim": "data"}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_lint(name: str) -> None:
    report = helm_python.lint(CHART, values_of(name))
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_and_its_values_say_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What pods get passes check-config, and differs from the file only in what a pod must have."""
    file = ROOT / "configs" / f"{name}.yaml"
    assert values_of(name)["settings"] == yaml.safe_load(file.read_text())
    documents = render(values_of(name))
    text = of_kind(documents, "ConfigMap", "settings")["data"]["settings.yaml"]
    rendered = tmp_path / "settings.yaml"
    rendered.write_text(text)
    assert commands.run(["check-config", "--config", str(rendered)]) == 0
    assert f"{rendered}:" in capsys.readouterr().out
    has_keys = "apiKeys" in values_of(name).get("secrets", {})
    words = ["server.host=0.0.0.0"] + ["server.api_key_file=/etc/chunkserve/keys/api-keys"] * has_keys
    assert resolve(Device(), rendered).settings == resolve(Device(), file, words).settings
    deployed = yaml.safe_load(of_kind(documents, "RayService")["spec"]["serveConfigV2"])
    assert deployed["applications"][0]["args"] == yaml.safe_load(text)


@pytest.mark.parametrize("name", [*CONFIGS, "everything"])
def test_manifests_are_what_kubernetes_and_the_operators_take(name: str) -> None:
    for document in render(EVERYTHING if name == "everything" else values_of(name)):
        schema = CUSTOM_RESOURCES.get(document["kind"])
        if schema is None:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
            continue
        jsonschema.validate(document, schema)
        spec = document["spec"]
        cluster = spec.get("rayClusterConfig") or spec.get("rayClusterSpec")
        if cluster is not None:
            for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
                template = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
                kubernetes_validate.validate(template, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"workrs": {}}, "workrs"),
        ({"workers": {"replica": 2}}, "replica"),
        ({"settings": {"modle": {}}}, "modle"),
        ({"settings": {"scheduler": {"max_num_seq": 3}}}, "max_num_seq"),
        ({"settings": {"server": {"api_key": "secret"}}}, "api_key"),
        ({"settings": {"model": {"device": "auto"}}}, "device"),
        ({"settings": {"server": {"port": "x"}}}, "port"),
        ({"monitoring": {"podMonitor": {"intervall": "3s"}}}, "intervall"),
        ({"security": {"runAsUser": 0}}, "runAsUser"),
        ({"ray": {"authMode": "none"}}, "authMode"),
        ({"batch": {"enabled": True}}, "input"),
        ({"batch": {"input": "in; rm -r /"}}, "input"),
        ({"gcsFaultTolerance": {"enabled": True}}, "redisAddress"),
        ({"workers": {"gpus": 1}}, "settings.model.device"),
        ({"settings": {"model": {"device": "cuda"}}}, "workers.gpus"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=named):
        render(values)


def test_the_schema_knows_the_settings_of_today() -> None:
    """If this fails, run: python helm/settings_schema.py"""
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert runpy.run_path(str(ROOT / "helm" / "settings_schema.py"))["with_settings"](schema) == schema


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict) and value and path[-1:] not in [("labels",), ("requests",), ("limits",)]:
            found += leaves(value, (*path, key))
        else:
            found.append(((*path, key), value))
    return found


def other(path: tuple[str, ...], value: object) -> object:
    """A value that the schema takes, and that is not the one there."""
    named: dict[str, object] = {
        "pullPolicy": "Always", "upgradeStrategy": "None", "authMode": "disabled", "version": "2.61.0",
        "device": "cuda", "mountPath": "/elsewhere", "interval": "1m", "kvCacheUsage": 0.5, "size": "7Gi",
        "clients": [], "nodeSelector": {"a": "b"}, "affinity": {"nodeAffinity": {}}, "arguments": ["x=1"],
        "pullSecrets": ["one"], "operator": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    }  # fmt: skip
    if path[-1] in named:
        return named[path[-1]]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case dict():
            return {"cpu": "3"} if path[-2] == "resources" else {"a": "b"}
        case _:
            return [{"key": "a", "operator": "Exists"}]


def all_values() -> list[tuple[tuple[str, ...], Any]]:
    return [(path, value) for path, value in leaves(merged(EVERYTHING)) if path[0] != "settings"]


@pytest.mark.parametrize("path", [path for path, _ in all_values()], ids=".".join)
def test_every_value_moves_something(path: tuple[str, ...]) -> None:
    value = dict(all_values())[path]
    # What gives way to another value is seen without that one.
    base = {
        ("cache", "size"): changed(EVERYTHING, ("cache", "claim"), ""),
        ("workers", "replicas"): changed(EVERYTHING, ("autoscaling", "enabled"), False),
        ("workers", "gpus"): changed(EVERYTHING, ("settings", "model", "device"), "cpu"),
    }.get(path, EVERYTHING)
    values = changed(base, path, other(path, value))
    if path == ("workers", "gpus"):
        values = changed(values, ("settings", "model", "device"), "cuda")
    assert render(values) != render(base)


def test_the_targets_bell_rings_at_the_target() -> None:
    def bell(values: dict[str, Any]) -> str:
        rules = of_kind(render(values), "PrometheusRule")["spec"]["groups"][0]["rules"]
        return next(rule["expr"] for rule in rules if rule["alert"] == "ChunkserveSlowStreams")

    assert bell(EVERYTHING).endswith("> 0.2")
    assert bell(changed(EVERYTHING, ("settings", "scheduler"), {"itl_slo_ms": 50})).endswith("> 0.05")
    assert bell(changed(EVERYTHING, ("settings", "scheduler"), {"itl_slo_ms": "none"})).endswith("> 0.2")


def test_large_numbers_stay_numbers() -> None:
    values = changed(EVERYTHING, ("settings", "model", "max_len"), 1048576)
    text = of_kind(render(values), "ConfigMap", "settings")["data"]["settings.yaml"]
    assert yaml.safe_load(text)["model"]["max_len"] == 1048576


def test_the_ray_is_the_one_that_is_installed() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert merged({})["ray"]["version"] == pinned["ray"]

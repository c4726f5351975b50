"""The dashboard and the bells ask for series and labels that the service exports."""

import json
import re
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rendered_chart import of_kind, render

from cluster.metrics.render import render as render_metrics
from cluster.metrics.series import PREFIX, SERIES
from cluster.metrics.snapshot import HistogramTotals
from cluster.metrics.totals import Sample

ENABLED = {"monitoring": {"dashboard": {"enabled": True}, "prometheusRule": {"enabled": True}}}
SCRAPER_LABELS = {"job", "le"}


def exported() -> dict[str, set[str]]:
    """Names of all samples that /metrics can show, and their labels."""
    samples = []
    for name, series in SERIES.items():
        value: Any = 1.0
        if series.kind == "histogram":
            value = HistogramTotals([1] * (len(series.buckets) + 1), 1.0)
        samples.append(Sample("engine", "model", (name, *("x" for _ in series.labels)), value))
    families = text_string_to_metric_families(render_metrics(samples).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def expressions() -> list[str]:
    documents = render(ENABLED)
    board = json.loads(of_kind(documents, "ConfigMap", "dashboard")["data"]["chunkserve.json"])
    rules = of_kind(documents, "PrometheusRule")["spec"]["groups"][0]["rules"]
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) > 15
    return asked + [rule["expr"] for rule in rules]


@pytest.mark.parametrize("expression", expressions())
def test_it_asks_for_what_there_is(expression: str) -> None:
    text = expression.replace("$__rate_interval", "5m")
    promql_parser.parse(text)
    known = exported()
    names = re.findall(rf"{PREFIX}\w+", text)
    assert names
    assert [name for name in names if name not in known] == []
    labels = set().union(*(known[name] for name in names)) | SCRAPER_LABELS
    used = re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", text)
    used += [label for words in re.findall(r"by \(([^)]*)\)", text) for label in re.split(r",\s*", words)]
    assert set(used) <= labels


def test_the_variables_question_is_answered() -> None:
    board = json.loads(of_kind(render(ENABLED), "ConfigMap", "dashboard")["data"]["chunkserve.json"])
    [query] = [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", query).groups()
    assert label in exported()[name]

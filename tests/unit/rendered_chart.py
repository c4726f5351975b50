"""The chart as Helm renders it, without a cluster."""

import copy
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "chunkserve"
Values = dict[str, Any]


def values_of(name: str) -> Values:
    """What an operator gives for the configuration of this name."""
    return yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())


def merged(values: Values) -> Values:
    with helm_python.Chart.load(CHART) as chart:
        return chart.merge_values(values)


def render(values: Values) -> list[dict[str, Any]]:
    """The manifests. Raises HelmError if the schema or a template refuses the values."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        files = chart.render(values, name="release", namespace="space")
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def of_kind(documents: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The only one of this kind whose name ends so."""
    [found] = [each for each in documents if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    return found


def changed(values: Values, path: tuple[str, ...], value: object) -> Values:
    """A copy in which one value is another one."""
    result = copy.deepcopy(values)
    place = result
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value
    return result

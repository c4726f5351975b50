"""What the READMEs' tables say of settings and benchmarks is what the code takes."""

import re
from pathlib import Path

import pytest
import yaml

from benchmarks.__main__ import NAMES
from cluster.settings.tree import PARSERS, Settings, value_of

ROOT = Path(__file__).resolve().parents[2]
RESERVED = {"scheduler.itl_slo_ms"}
SETTINGS = {
    name: (default, meaning)
    for name, default, meaning in re.findall(
        r"^\| `([a-z]+\.[a-z_]+)` \| (.*?) \| (.*?) ?\|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
}


def test_every_setting_has_a_row() -> None:
    assert set(SETTINGS) == set(PARSERS) - RESERVED


@pytest.mark.parametrize("name", SETTINGS)
def test_a_default_is_the_trees(name: str) -> None:
    default, _ = SETTINGS[name]
    if default.startswith("`"):
        assert PARSERS[name](yaml.safe_load(default.strip("`"))) == value_of(Settings(), name)
    else:  # by device
        assert value_of(Settings(), name) is None


@pytest.mark.parametrize("name", ["model.dtype", "parallel.placement", "scheduler.policy", "attention.backend"])
def test_a_value_that_is_named_is_taken(name: str) -> None:
    values = re.findall("`([a-z0-9]+)`", SETTINGS[name][1])
    assert values
    assert [PARSERS[name](value) for value in values] == values


def test_every_benchmark_has_a_row() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text().split("## ")[0]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)) == set(NAMES)

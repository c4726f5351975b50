"""The book of trials: continued with the same load only, and what makes a trial a miss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scenes import SCENES
from benchmarks.service_processes import FaultError
from benchmarks.trials import Book, Trial, report

GOOD = Trial(
    failed=0, changed=0, longest_gap=0.5, unhealthy_after=None, recoveries=1, lost_engines=0, note="killed rank 1",
    errors=[],
)  # fmt: skip


def test_a_book_goes_on_with_the_same_load_only(tmp_path: Path) -> None:
    path = tmp_path / "book.json"
    Book(path, {"tokens": 5}).add("kill-worker", 0, GOOD)
    again = Book(path, {"tokens": 5})
    assert again.trials["kill-worker"]["0"]["note"] == "killed rank 1"
    with pytest.raises(FaultError, match="'tokens': 5"):
        Book(path, {"tokens": 6})


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"failed": 1}, False),
        ({"changed": 1}, False),
        ({"lost_engines": 1}, False),
        ({"longest_gap": SCENES["kill-worker"].limit + 0.1}, False),
    ],
)
def test_verdict(capsys: pytest.CaptureFixture[str], changes: dict[str, Any], good: bool) -> None:
    book = Book(None, {})
    book.add("kill-worker", 0, GOOD)
    book.add("kill-worker", 1, replace(GOOD, **changes))
    assert report(book) is good
    assert ("MISS" in capsys.readouterr().out) is not good

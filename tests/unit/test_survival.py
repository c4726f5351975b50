"""The book of trials: continued with the same load only, and what makes a trial a miss."""

from pathlib import Path

import pytest

from benchmarks.faults import FaultError
from benchmarks.survival import SCENES, Book, Trial, report

GOOD = Trial(failed=0, changed=0, longest_gap=0.5, unhealthy_after=None, note="killed rank 1", errors=[])


def test_a_book_goes_on_with_the_same_load_only(tmp_path: Path) -> None:
    path = tmp_path / "book.json"
    Book(path, {"tokens": 5}).add("kill-worker", 0, GOOD)
    again = Book(path, {"tokens": 5})
    assert again.trials["kill-worker"]["0"]["note"] == "killed rank 1"
    with pytest.raises(FaultError, match="'tokens': 5"):
        Book(path, {"tokens": 6})


@pytest.mark.parametrize(
    ("failed", "changed", "gap", "good"),
    [(0, 0, 0.5, True), (1, 0, 0.5, False), (0, 1, 0.5, False), (0, 0, SCENES["kill-worker"].limit + 0.1, False)],
)
def test_verdict(capsys: pytest.CaptureFixture[str], failed: int, changed: int, gap: float, good: bool) -> None:
    book = Book(None, {})
    book.add("kill-worker", 0, GOOD)
    book.add("kill-worker", 1, Trial(failed, changed, gap, 0.1, "", []))
    assert report(book) is good
    assert ("MISS" in capsys.readouterr().out) is not good

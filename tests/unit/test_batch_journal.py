"""The journal: whatever is cut off, what is left is right, and the rest is done again."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.batch.files import Identity
from cluster.batch.journal import Counts, Journal
from cluster.errors import ConfigError

IDENTITY = Identity(100, "ab" * 32, 20)

rows = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3)
records = st.lists(st.tuples(st.integers(1, 20), st.sampled_from("AE"), rows), unique_by=lambda record: record[0])


def filled(path: Path, content: list) -> list[int]:
    """Write a journal; where each record ends, the header first."""
    journal = Journal(path, IDENTITY)
    ends = [path.stat().st_size]
    for line, outcome, row in content:
        journal.append(line, outcome, row)
        ends.append(path.stat().st_size)
    journal.close()
    return ends


@settings(deadline=None)
@given(content=records, data=st.data())
def test_cut_anywhere_it_has_every_whole_record_and_takes_the_rest_again(content: list, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        ends = filled(path, content)
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends[1:])
        journal = Journal(path, IDENTITY)
        assert [line for line in range(1, 21) if line in journal] == sorted(line for line, _, _ in content[:kept])
        for line, outcome, row in content[kept:]:
            journal.append(line, outcome, row)
        journal.close()
        assert path.read_bytes() == whole
        assert journal.counts == Counts(*(sum(outcome == kind for _, outcome, _ in content) for kind in "AE"))


@settings(deadline=None)
@given(content=records.filter(bool), data=st.data())
def test_a_damaged_byte_costs_the_records_from_there_on_and_invents_none(content: list, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        ends = filled(path, content)
        whole = bytearray(path.read_bytes())
        at = data.draw(st.integers(ends[0], len(whole) - 1))
        whole[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        kept = sum(end <= at for end in ends[1:])
        journal = Journal(path, IDENTITY)
        assert [line for line in range(1, 21) if line in journal] == sorted(line for line, _, _ in content[:kept])
        journal.close()


def test_rows_are_read_back_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", IDENTITY)
    journal.append(2, "A", {"text": "a b\n\u2028\ud800é"})
    journal.append(1, "E", {})
    assert journal.read(1) == ("E", b"{}")
    assert journal.read(2) == ("A", '{"text":"a b\\n\u2028\\ud800é"}'.encode())
    assert journal.read(3) is None
    journal.append(3, "A", {"after": "reading"})
    assert journal.read(3) == ("A", b'{"after":"reading"}')
    journal.close()


def test_a_line_has_one_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", IDENTITY)
    journal.append(2, "A", {})
    with pytest.raises(ValueError, match="line 2"):
        journal.append(2, "A", {})
    journal.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j", IDENTITY)
    with pytest.raises(ConfigError, match="another process works on this batch"):
        Journal(tmp_path / "j", IDENTITY)
    first.close()
    Journal(tmp_path / "j", IDENTITY).close()


def test_another_input_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path / "j", [(1, "A", {})])
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(ConfigError, match="belongs to another input"):
        Journal(tmp_path / "j", Identity(100, "cd" * 32, 20))
    assert (tmp_path / "j").read_bytes() == before


@pytest.mark.parametrize("content", [b"a letter to a friend\n", b"\0" * 5000, b"x"])
def test_what_is_no_journal_is_not_written_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(ConfigError, match="no journal of a batch"):
        Journal(tmp_path / "j", IDENTITY)
    assert (tmp_path / "j").read_bytes() == content


def test_a_finished_batch_is_known_and_may_start_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", IDENTITY)
    for line in range(1, 15):
        journal.append(line, "A" if line % 2 else "E", {"a": "b" * 100})
    journal.finish()
    journal.close()
    assert (tmp_path / "j").stat().st_size < 300
    again = Journal(tmp_path / "j", IDENTITY)
    assert again.finished == Counts(7, 7)
    again.restart()
    again.append(1, "A", {})
    again.close()
    started = Journal(tmp_path / "j", IDENTITY)
    assert started.finished is None
    assert 1 in started
    assert 2 not in started
    started.close()


def test_a_journal_that_cannot_be_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/j"):
        Journal(tmp_path / "no" / "j", IDENTITY)

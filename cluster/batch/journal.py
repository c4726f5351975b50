"""The journal of a batch: what became of each line, written down as it happens, so that a killed batch can go on.

A text file of records, one a line: a checksum, a letter, and what the letter says.

    crc32 H {"size": ..., "sha256": ...}      the input that it belongs to; the first record
    crc32 A 17 {...}                          line 17 has this answer
    crc32 E 18 {...}                          line 18 has this error
    crc32 D {"answers": ..., "errors": ...}   all is done, and the output is in place

Records are in the order in which lines were finished, each written with one call, so that a killed process leaves at
most its last one torn; a machine that loses its power, also what was not yet put on the disk. Reading stops at the
first record that is not whole, and the file is cut there: its lines are computed again.
"""

import fcntl
import json
import os
import zlib
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from cluster.batch.files import Identity, replace
from cluster.errors import ConfigError

Outcome = Literal["A", "E"]
"""An answer, or an error."""
_MAX_HEADER = 1024


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines by what became of them."""

    answers: int
    errors: int


class Journal:
    """Belongs to one process at a time. Offsets of records are kept in memory: 8 bytes a line of the input."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """Open or create it, and read what is there.

        Raises ConfigError if another process has it, or if it belongs to another input or is no journal.
        """
        self._path = path
        self._identity = identity
        self._header = _record(b"H " + json.dumps(asdict(identity)).encode())
        self._offsets = array("Q", bytes(8 * (identity.num_lines + 1)))
        """By line, 0 for one without a record: there the header is."""
        self.finished: Counts | None = None
        """When the batch was done before."""
        self._counts = {"A": 0, "E": 0}
        try:
            self._file = _lock(path)
        except OSError as error:
            raise ConfigError(f"the journal {path}: {error.strerror}") from error
        try:
            self._end = self._recover()
            self._file.truncate(self._end)
            if not self._end:
                self._write(self._header)
                self.sync()
        except BaseException:
            self._file.close()
            raise

    def __contains__(self, line: int) -> bool:
        """Whether something became of the line."""
        return self._offsets[line] != 0

    @property
    def counts(self) -> Counts:
        return Counts(self._counts["A"], self._counts["E"])

    def append(self, line: int, outcome: Outcome, row: dict[str, Any]) -> None:
        """Write down what became of a line, once. Raises OSError, ValueError if the line has a record already."""
        if line in self:
            raise ValueError(f"line {line} has a record already")
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
        offset = self._end
        self._write(_record(b"%s %d %s" % (outcome.encode(), line, text)))
        self._note(line, outcome, offset)

    def read(self, line: int) -> tuple[Outcome, bytes] | None:
        """What became of a line, and its row as JSON; None for a blank line."""
        if line not in self:
            return None
        self._file.seek(self._offsets[line])
        _, outcome, _, row = self._file.readline().rstrip(b"\n").split(b" ", 3)
        return ("A" if outcome == b"A" else "E"), row

    def sync(self) -> None:
        """Put what was written on the disk."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """The output is in place: only that is left to be known. The file shrinks to two records."""
        beside = self._path.with_name(f"{self._path.name}.part")
        with beside.open("wb") as file:
            file.write(self._header)
            file.write(_record(b"D " + json.dumps(asdict(self.counts)).encode()))
            file.flush()
            os.fsync(file.fileno())
        replace(beside, self._path)

    def restart(self) -> None:
        """Forget everything: what was finished is no more there."""
        self.finished = None
        self._counts = {"A": 0, "E": 0}
        self._offsets = array("Q", bytes(len(self._offsets) * 8))
        self._end = len(self._header)
        self._file.truncate(self._end)

    def close(self) -> None:
        self._file.close()

    def _write(self, record: bytes) -> None:
        self._file.seek(self._end)
        self._file.write(record)
        self._file.flush()
        self._end += len(record)

    def _note(self, line: int, outcome: Outcome, offset: int) -> None:
        self._offsets[line] = offset
        self._counts[outcome] += 1

    def _recover(self) -> int:
        """Where the last whole record ends."""
        first = self._file.readline(_MAX_HEADER)
        if first != self._header:
            self._check_header(first)
            return 0
        end = len(first)
        while (content := _content(record := self._file.readline())) is not None:
            kind, _, rest = content.partition(b" ")
            if kind == b"D":
                self.finished = Counts(**json.loads(rest))
            else:
                self._note(int(rest.partition(b" ")[0]), "A" if kind == b"A" else "E", end)
            end += len(record)
        return end

    def _check_header(self, first: bytes) -> None:
        """Only a header that was torn when it was written may be written over."""
        if self._header.startswith(first):
            return
        if (content := _content(first)) is None or not content.startswith(b"H "):
            raise ConfigError(f"{self._path} is no journal of a batch; name another file")
        raise ConfigError(
            f"the journal {self._path} belongs to another input or to an earlier state of this one;"
            " name another output, or remove the journal to start anew"
        )


def _lock(path: Path) -> BinaryIO:
    """Open the file and make it this process's own, as long as it is open. Raises ConfigError if it is another's."""
    while True:
        file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")  # noqa: SIM115 - it outlives this call
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(f"another process works on this batch: it holds the journal {path}") from None
        # Between opening and locking, the one that had it may have put its last words in the file's place.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def _record(content: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(content), content)


def _content(record: bytes) -> bytes | None:
    """None for a record that is not whole."""
    content = record[9:-1]
    return content if record == _record(content) else None

"""From a journal that has every line to the output and the error file, both in the input's order."""

from cluster.batch.files import Identity, remove, written_whole
from cluster.batch.journal import Journal, Outcome


def assemble(journal: Journal, identity: Identity, output: str, errors: str) -> None:
    """Write both files; without errors there is no error file. Raises ConfigError if they cannot be written.

    It may be killed anywhere and run again: a file is there when it is whole, and the journal is finished last.
    """
    if journal.counts.errors:
        _write(journal, identity, "E", errors)
    else:
        remove(errors)
    _write(journal, identity, "A", output)
    journal.finish()


def _write(journal: Journal, identity: Identity, wanted: Outcome, path: str) -> None:
    with written_whole(path) as write:
        for line in range(1, identity.num_lines + 1):
            record = journal.read(line)
            if record is not None and record[0] == wanted:
                write(record[1] + b"\n")

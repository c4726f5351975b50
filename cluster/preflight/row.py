"""What a check found: a line of the table that `chunkserve preflight` prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Row:
    """One check of one thing."""

    check: str
    where: str
    """A node's name, or what else was looked at."""
    state: State
    detail: str
    """What was found; of a failed check also what to do, where that is known."""


def lines(rows: Sequence[Row]) -> list[str]:
    """The table: columns as wide as their widest cell."""
    cells = [("check", "where", "state", "what was found"), *((r.check, r.where, r.state, r.detail) for r in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in cells
    ]

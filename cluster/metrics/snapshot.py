"""What a source of metrics says each second: running totals since its epoch began, and gauges as of now.

Totals instead of differences, so that a push that is lost, repeated or late changes nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

SourceRole = Literal["engine", "frontend"]

SeriesKey = tuple[str, ...]
"""A series' name, then the values of its own labels in the catalogue's order."""


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """Who pushes. A restart under the same id must raise `epoch` (nanoseconds since 1970 do)."""

    source_id: str
    epoch: int
    role: SourceRole
    model_name: str


@dataclass(slots=True)
class HistogramTotals:
    """Observations per bucket (the last one is +Inf) and their sum."""

    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True)
class MetricsSnapshot:
    """Everything one source has to say: totals since its epoch began, and gauges."""

    counters: dict[SeriesKey, float] = field(default_factory=dict)
    gauges: dict[SeriesKey, float] = field(default_factory=dict)
    histograms: dict[SeriesKey, HistogramTotals] = field(default_factory=dict)
    phase: str | None = None
    """The start-up phase the source is in, None when it has started."""
    finished_phases: dict[str, float] = field(default_factory=dict)
    """Seconds each finished phase of start-up took, in order."""


class HistogramAccumulator:
    """A histogram on the hot path: one bisection and two additions a value."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bucket holds what is at most its bound."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def totals(self) -> HistogramTotals:
        return HistogramTotals(list(self.counts), self.sum)

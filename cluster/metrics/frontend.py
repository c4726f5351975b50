"""What a front end measures."""

import threading
from collections import Counter

from cluster.metrics.series import SERIES
from cluster.metrics.snapshot import HistogramAccumulator, MetricsSnapshot


class FrontendMetrics:
    """Counts for one front end; the requests themselves are measured by the engines.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._overhead = HistogramAccumulator(SERIES["http_overhead_seconds"].buckets)
        self._rejections: Counter[str] = Counter()

    def observe_overhead(self, seconds: float) -> None:
        """Seconds from a request's arrival here to its hand-over to an engine: parsing, checks, tokenising."""
        with self._lock:
            self._overhead.observe(seconds)

    def refuse(self, reason: str) -> None:
        """A request was answered with a refusal of admission. `reason` is one of a few fixed words."""
        with self._lock:
            self._rejections[reason] += 1

    def snapshot(self) -> MetricsSnapshot:
        """Totals since this observer was built."""
        with self._lock:
            return MetricsSnapshot(
                counters={("admission_rejections", reason): count for reason, count in self._rejections.items()},
                histograms={("http_overhead_seconds",): self._overhead.totals()},
            )

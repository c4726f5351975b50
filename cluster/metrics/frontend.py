"""What a front end measures."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import EngineError, RequestError
from cluster.metrics.series import SERIES
from cluster.metrics.snapshot import HistogramAccumulator, MetricsSnapshot, SeriesKey


class FrontendMetrics:
    """Counts for one front end; the requests themselves are measured by the engines.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._overhead = HistogramAccumulator(SERIES["http_overhead_seconds"].buckets)
        self._view_age = HistogramAccumulator(SERIES["routing_view_age_seconds"].buckets)
        self._rejections: Counter[str] = Counter()
        self._routes: Counter[str] = Counter()

    def observe_overhead(self, seconds: float) -> None:
        """Seconds from a request's arrival here to its hand-over to an engine: parsing, checks, tokenising."""
        with self._lock:
            self._overhead.observe(seconds)

    def refuse(self, reason: str) -> None:
        """A request was refused here, not by an engine. `reason` is one of a few fixed words."""
        with self._lock:
            self._rejections[reason] += 1

    def observe_route(self, reason: str, view_age: float) -> None:
        """An engine was chosen for a request. `view_age`: seconds since it had reported, 0 where views had no say."""
        with self._lock:
            self._routes[reason] += 1
            if reason != "stale":
                self._view_age.observe(view_age)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """An error from inside is a refusal: the reason is the field at fault, "request" for the whole body,
        "unavailable" where no engine can take it.
        """
        try:
            yield
        except RequestError as error:
            self.refuse(error.param or "request")
            raise
        except EngineError:
            self.refuse("unavailable")
            raise

    def snapshot(self) -> MetricsSnapshot:
        """Totals since this object was built."""
        with self._lock:
            counters: dict[SeriesKey, float] = {
                ("admission_rejections", reason): count for reason, count in self._rejections.items()
            }
            counters |= {("routed_requests", reason): count for reason, count in self._routes.items()}
            return MetricsSnapshot(
                counters=counters,
                histograms={
                    ("http_overhead_seconds",): self._overhead.totals(),
                    ("routing_view_age_seconds",): self._view_age.totals(),
                },
            )

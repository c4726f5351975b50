"""The only file that knows Prometheus: it renders the service's totals as its text format."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from cluster.metrics.series import PREFIX, SERIES, Series
from cluster.metrics.snapshot import HistogramTotals
from cluster.metrics.totals import Sample

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of what `render` returns."""


class _Samples:
    """One scrape's samples, grouped by series in the catalogue's order."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.key[0], []).append(sample)

    def collect(self) -> Iterator[Metric]:
        for name, series in SERIES.items():
            samples = self._by_name.get(name)
            if samples:
                yield _family(name, series, sorted(samples, key=lambda sample: (sample.engine, sample.key)))


def _family(name: str, series: Series, samples: list[Sample]) -> Metric:
    labels = ["model_name", "engine", *series.labels]
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    family = kinds[series.kind](PREFIX + name, series.help, labels=labels)
    for sample in samples:
        values = [sample.model_name, sample.engine, *sample.key[1:]]
        if isinstance(sample.value, HistogramTotals):
            family.add_metric(values, buckets=_cumulative(series, sample.value), sum_value=sample.value.sum)
        else:
            family.add_metric(values, sample.value)
    return family


def _cumulative(series: Series, totals: HistogramTotals) -> list[tuple[str, int]]:
    """Prometheus counts in each bucket everything at or below its bound."""
    bounds = [str(float(bound)) for bound in series.buckets] + ["+Inf"]
    counted = 0
    buckets = []
    for bound, count in zip(bounds, totals.counts, strict=True):
        counted += count
        buckets.append((bound, counted))
    return buckets


def render(samples: Iterable[Sample]) -> bytes:
    """The Prometheus text format, series in the catalogue's order."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Samples(samples))
    return bytes(generate_latest(registry))

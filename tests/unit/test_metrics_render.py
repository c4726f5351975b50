"""What Prometheus reads: the rendered text, through its own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics.render import CONTENT_TYPE, render
from cluster.metrics.series import PREFIX, SERIES
from cluster.metrics.snapshot import HistogramAccumulator, HistogramTotals, SeriesKey
from cluster.metrics.totals import Sample


def parse(text: bytes) -> dict[tuple[str, ...], float]:
    """(sample name, label=value, ...) -> value"""
    return {
        (sample.name, *sorted(f"{name}={value}" for name, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def one(key: SeriesKey, value: float | HistogramTotals) -> Sample:
    return Sample("0", "tiny", key, value)


def test_every_series_of_the_catalogue_renders_under_its_name_and_kind() -> None:
    samples = []
    for name, series in SERIES.items():
        value = HistogramTotals([1] * (len(series.buckets) + 1), 2.0) if series.kind == "histogram" else 1.0
        samples.append(one((name, *("x" for _ in series.labels)), value))
    families = list(text_string_to_metric_families(render(samples).decode()))
    # The parser takes the counters' suffix off.
    assert {family.name: family.type for family in families} == {
        PREFIX + name: series.kind for name, series in SERIES.items()
    }
    for family in families:
        assert family.samples
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine", *SERIES[family.name[len(PREFIX) :]].labels}


def test_counters_gauges_and_labels() -> None:
    text = render([
        one(("request_success", "stop"), 3.0),
        one(("kv_cache_usage_perc",), 0.25),
        Sample("1", 'a "quoted"\\ name', ("kv_cache_usage_perc",), 0.5),
    ])  # fmt: skip
    assert parse(text) == {
        ("chunkserve:request_success_total", "engine=0", "finished_reason=stop", "model_name=tiny"): 3.0,
        ("chunkserve:kv_cache_usage_perc", "engine=0", "model_name=tiny"): 0.25,
        ("chunkserve:kv_cache_usage_perc", "engine=1", 'model_name=a "quoted"\\ name'): 0.5,
    }
    assert CONTENT_TYPE.startswith("text/plain")


def test_a_histogram_counts_everything_at_or_below_each_bound() -> None:
    bounds = SERIES["step_decode_tokens"].buckets
    accumulator = HistogramAccumulator(bounds)
    values = [0, 1, 2, 3, 256, 10**6]
    for value in values:
        accumulator.observe(value)
    found = parse(render([one(("step_decode_tokens",), accumulator.totals())]))
    name, labels = "chunkserve:step_decode_tokens", ("engine=0", "model_name=tiny")
    for bound in bounds:
        key = (f"{name}_bucket", labels[0], f"le={float(bound)}", labels[1])
        assert found[key] == sum(value <= bound for value in values)
    assert found[(f"{name}_bucket", labels[0], "le=+Inf", labels[1])] == len(values)
    assert found[(f"{name}_count", *labels)] == len(values)
    assert found[(f"{name}_sum", *labels)] == sum(values)


@pytest.mark.parametrize("name", [name for name, series in SERIES.items() if series.kind == "histogram"])
def test_bucket_bounds_ascend(name: str) -> None:
    bounds = SERIES[name].buckets
    assert list(bounds) == sorted(set(bounds))


def test_gaps_between_tokens_have_buckets_from_one_millisecond() -> None:
    assert SERIES["inter_token_latency_seconds"].buckets[0] == 0.001

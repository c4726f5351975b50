"""What records of a run amount to: percentiles, medians over runs, and the table people read."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.client import RequestRecord

Summary = dict[str, Any]


def percentile(values: Sequence[float], p: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. Raises ValueError when empty."""
    if not values:
        raise ValueError("no percentile of no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * p / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(seconds: Iterable[float | None]) -> dict[str, float | int]:
    """Count, and unless it is 0 the median, p95, p99, mean and largest, in milliseconds."""
    values = [value * 1000 for value in seconds if value is not None]
    if not values:
        return {"n": 0}
    return {
        "n": len(values),
        **{f"p{p}": round(percentile(values, p), 2) for p in (50, 95, 99)},
        "mean": round(statistics.fmean(values), 2),
        "max": round(max(values), 2),
    }


def summarise(workload: str, records: Sequence[RequestRecord], wall: float) -> Summary:
    """One run, which took `wall` seconds."""
    good = [record for record in records if record.error is None]
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    summary: Summary = {
        "workload": workload,
        "requests": len(records),
        "errors": len(records) - len(good),
        "error_sample": next((record.error for record in records if record.error is not None), None),
        "wall_s": round(wall, 3),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(record.cached_tokens for record in good),
        "events": sum(len(record.token_times) for record in good),
        "output_tok_s": round(output_tokens / wall, 2),
        "total_tok_s": round((output_tokens + prompt_tokens) / wall, 2),
    }
    for kind in sorted({record.kind for record in records}):
        of_kind = [record for record in good if record.kind == kind]
        summary[kind] = {
            "n": len(of_kind),
            "ttft_ms": distribution(record.ttft for record in of_kind),
            "itl_ms": distribution(gap for record in of_kind for gap in record.itl),
            "tpot_ms": distribution(record.tpot for record in of_kind),
            "e2e_ms": distribution(record.e2e for record in of_kind),
        }
    if any(record.kind == "long" for record in records):
        during, otherwise = steady_gaps(good)
        summary["steady_itl_during_long_prefill_ms"] = distribution(during)
        summary["steady_itl_otherwise_ms"] = distribution(otherwise)
    return summary


def steady_gaps(records: Iterable[RequestRecord]) -> tuple[list[float], list[float]]:
    """Gaps of the steady streams that overlap a long prompt's wait for its first token, and the others."""
    records = list(records)
    prefills = [(r.sent_at, r.token_times[0]) for r in records if r.kind == "long" and r.token_times]
    during: list[float] = []
    otherwise: list[float] = []
    for record in records:
        if record.kind != "steady":
            continue
        for before, after in pairwise(record.token_times):
            overlaps = any(after > start and before < end for start, end in prefills)
            (during if overlaps else otherwise).append(after - before)
    return during, otherwise


def median_of(runs: Sequence[Any]) -> Any:
    """Runs' summaries merged: medians of numbers, the first run's other values; keys that all runs have."""
    first = runs[0]
    if isinstance(first, dict):
        return {key: median_of([run[key] for run in runs]) for key in first if all(key in run for run in runs)}
    if all(isinstance(run, int | float) and not isinstance(run, bool) for run in runs):
        return statistics.median(runs)
    return first


def spread_of(values: Sequence[float]) -> str:
    """`median (smallest to largest)`, or the one value."""
    if len(values) == 1:
        return f"{values[0]:g}"
    return f"{statistics.median(values):g} ({min(values):g} to {max(values):g})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell: the first to the left, the rest to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def run_table(runs: Sequence[Summary]) -> str:
    """All runs of one workload: per quantity the median over runs and its spread."""
    totals = ("wall_s", "output_tokens", "prompt_tokens", "cached_tokens", "output_tok_s", "errors")
    rows: list[list[object]] = [[name, spread_of([run[name] for run in runs])] for name in totals]
    for group, values in runs[0].items():
        if isinstance(values, dict):
            paths: list[tuple[str, ...]] = [(group, name) for name in values if name.endswith("_ms")] or [(group,)]
            for path in paths:
                rows += _distribution_rows(path, runs)
    return table(["quantity", f"median of {len(runs)} (spread)"], rows)


def _distribution_rows(path: Sequence[str], runs: Sequence[Summary]) -> list[list[object]]:
    found = []
    for run in runs:
        values: Any = run
        for name in path:
            values = values.get(name, {})
        found.append(values)
    return [
        [f"{' '.join(path)} {statistic}", spread_of([values[statistic] for values in found])]
        for statistic in ("p50", "p99", "max")
        if all(statistic in values for values in found)
    ]

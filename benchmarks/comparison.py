"""What paired runs of our server and a peer amount to: medians, ratios, the trade-off curve, and the targets."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.summary import Summary, spread_of, table

MAX_OTHER_CORES = 0.1
"""A run during which others kept more of the machine busy is not counted."""
MIN_PAIRS = 5

Place = tuple[str, int]
"""A workload, and the token budget of both servers."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One workload with the same prompts on both servers, one right after the other."""

    ours: Summary
    peers: Summary


@dataclass(frozen=True, slots=True)
class Quantity:
    """One figure of a workload, where a run's summary holds it, and what its ratio ours / peer's has to be."""

    workload: str
    label: str
    path: tuple[str, ...]
    at_most: float | None = None
    at_least: float | None = None
    limit: float | None = None
    """What ours may be at most by itself, in its own unit."""
    only_budget: int | None = None
    """The only budget at which the targets hold."""

    def of(self, summary: Summary) -> float:
        value: Any = summary
        for name in self.path:
            value = value[name]
        return float(value)


GAP = Quantity("W1", "ITL p99 in long prefill, ms", ("steady_itl_during_long_prefill_ms", "p99"), 0.7, only_budget=256)
TTFT = Quantity("W1", "long prompts' TTFT p50, ms", ("long", "ttft_ms", "p50"), 0.8, only_budget=256)
QUANTITIES = (
    GAP,
    TTFT,
    Quantity("W1", "ITL p50 otherwise, ms", ("steady_itl_otherwise_ms", "p50")),
    Quantity("W1b", "ITL p50, ms", ("steady", "itl_ms", "p50")),
    Quantity("W2", "output tokens/s", ("output_tok_s",), at_least=1.25),
    Quantity("W2", "ITL p50, ms", ("req", "itl_ms", "p50")),
    Quantity("W3", "wall, s", ("wall_s",), 0.8),
    Quantity("W4", "ms a token", ("req", "tpot_ms", "p50"), 0.65, limit=22.0),
    Quantity("W4", "TTFT, ms", ("req", "ttft_ms", "p50")),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One target, whether it was met, and what was found."""

    text: str
    met: bool


def is_disturbed(summary: Summary) -> bool:
    """Whether others used the machine during this run."""
    return bool(summary["other_cores"] > MAX_OTHER_CORES)


def undisturbed(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs of which both runs had the machine to themselves."""
    return [pair for pair in pairs if not is_disturbed(pair.ours) and not is_disturbed(pair.peers)]


def ratios(quantity: Quantity, pairs: Sequence[Pair]) -> list[float]:
    """Ours / the peer's, pair by pair: what drifts from pair to pair cancels out."""
    return [quantity.of(pair.ours) / quantity.of(pair.peers) for pair in pairs]


def report(found: Mapping[Place, Sequence[Pair]], title: str, with_targets: bool) -> tuple[str, bool]:
    """The table, the targets, and whether all that were measured are met."""
    counted = {place: undisturbed(pairs) for place, pairs in found.items()}
    rows = [
        row
        for place, pairs in counted.items()
        if pairs
        for quantity in QUANTITIES
        if quantity.workload == place[0]
        for row in [_row(quantity, place, pairs)]
    ]
    lines = [table(["workload, budget, quantity", "pairs", "ours", title, "ours / peer's"], rows)]
    for (workload, budget), pairs in found.items():
        if left_out := len(pairs) - len(counted[workload, budget]):
            lines.append(f"{workload} at {budget}: {left_out} of {len(pairs)} pairs left out, others used the machine")
    checks = _checks(counted) if with_targets else []
    lines += ["", *(f"{'ok  ' if check.met else 'MISS'}  {check.text}" for check in checks)]
    return "\n".join(lines).rstrip(), all(check.met for check in checks)


def _row(quantity: Quantity, place: Place, pairs: Sequence[Pair]) -> list[object]:
    return [
        f"{place[0]}, {place[1]}, {quantity.label}",
        len(pairs),
        _spread([quantity.of(pair.ours) for pair in pairs]),
        _spread([quantity.of(pair.peers) for pair in pairs]),
        _spread(ratios(quantity, pairs), digits=2),
    ]


def _spread(values: Sequence[float], digits: int = 1) -> str:
    return spread_of([round(value, digits) for value in values])


def _checks(counted: Mapping[Place, Sequence[Pair]]) -> list[Check]:
    checks: list[Check] = []
    for (workload, budget), pairs in counted.items():
        for quantity in QUANTITIES:
            if quantity.workload == workload and quantity.only_budget in (None, budget):
                checks += _checks_of(quantity, budget, pairs)
    curve_places = [place for place in counted if place[0] == "W1"]
    if len(curve_places) > 1:
        checks += _curve_checks({budget: counted["W1", budget] for _, budget in curve_places})
    return checks


def _checks_of(quantity: Quantity, budget: int, pairs: Sequence[Pair]) -> list[Check]:
    what = f"{quantity.workload} at {budget}, {quantity.label}"
    ratio = ours = float("nan")  # which meets no target
    if pairs:
        ratio = statistics.median(ratios(quantity, pairs))
        ours = statistics.median(quantity.of(pair.ours) for pair in pairs)
    few = "" if len(pairs) >= MIN_PAIRS else f"; {len(pairs)} pairs, {MIN_PAIRS} wanted"
    checks = []
    if quantity.limit is not None:
        text = f"{what}: {ours:.1f} (target: at most {quantity.limit:g}{few})"
        checks.append(Check(text, ours <= quantity.limit))
    if quantity.at_most is not None:
        text = f"{what}: ratio {ratio:.2f} (target: at most {quantity.at_most:g}{few})"
        checks.append(Check(text, ratio <= quantity.at_most))
    if quantity.at_least is not None:
        text = f"{what}: ratio {ratio:.2f} (target: at least {quantity.at_least:g}{few})"
        checks.append(Check(text, ratio >= quantity.at_least))
    return checks


def _curve_checks(counted: Mapping[int, Sequence[Pair]]) -> list[Check]:
    """Whether each of our points lies below the peer's whole curve of gaps against time to first token."""
    counted = {budget: pairs for budget, pairs in counted.items() if pairs}
    peers = [_point([pair.peers for pair in pairs]) for pairs in counted.values()]
    checks = []
    for budget, pairs in counted.items():
        ttft, gap = _point([pair.ours for pair in pairs])
        bound = curve_at(peers, ttft)
        text = (
            f"W1 at {budget}: TTFT {ttft:.0f} ms, ITL p99 {gap:.0f} ms (target: below the peer's curve, {bound:.0f} ms)"
        )
        checks.append(Check(text, gap < bound))
    return checks


def _point(summaries: Sequence[Summary]) -> tuple[float, float]:
    return statistics.median(map(TTFT.of, summaries)), statistics.median(map(GAP.of, summaries))


def curve_at(points: Sequence[tuple[float, float]], ttft: float) -> float:
    """The gap that a server with these (TTFT, gap) points has at a TTFT: straight lines between its best points.

    Infinite left of its shortest TTFT, and constant right of its longest: it has no use for a longer one.
    """
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    if not front or ttft < front[0][0]:
        return float("inf")
    for (left, left_gap), (right, right_gap) in pairwise(front):
        if ttft <= right:
            return left_gap + (right_gap - left_gap) * (ttft - left) / (right - left)
    return front[-1][1]

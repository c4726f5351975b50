"""Six streams while long prompts arrive: the gaps with chunked prefill against those without it.

Starts the service with chunked prefill and without it, turn by turn, and runs W1 on each. The live
step log of the chunked one tells whether every stream was in every step, and whether the next plan
was sent before the last result.

    python -m benchmarks chunked_prefill --rounds 3
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.counts import positive
from benchmarks.loadgen import first_model, new_session, run_once, run_well
from benchmarks.service import running_service
from benchmarks.steps import StepCheck, check_steps, read_steps, since
from benchmarks.summary import Summary, spread_of, table
from benchmarks.workloads import PromptSource, TokenIds, build, warm_up

TARGET_RATIO = 0.4
TARGET_AHEAD = 0.95
GAPS = "steady_itl_during_long_prefill_ms"


@dataclass(frozen=True, slots=True)
class Run:
    """W1 once, on one service."""

    summary: Summary
    steps: StepCheck

    @property
    def largest_gap_ms(self) -> float:
        return float(self.summary[GAPS]["max"])

    @property
    def p99_gap_ms(self) -> float:
        return float(self.summary[GAPS]["p99"])


def service_settings(args: argparse.Namespace, chunked: bool) -> list[str]:
    """Equal but for chunking; without it a step must hold the longest prompt."""
    budget = args.budget if chunked else args.max_len
    return [
        f"model.max_len={args.max_len}",
        f"scheduler.max_num_batched_tokens={budget}",
        f"scheduler.enable_chunked_prefill={str(chunked).lower()}",
        "scheduler.overlap_depth=2",
        *args.settings,
    ]


def measure(args: argparse.Namespace, chunked: bool, seed: int) -> Run:
    """Start a service, warm it up, run W1, stop it. Raises BenchmarkError, also when a request failed."""
    with running_service(service_settings(args, chunked)) as base_url:
        return asyncio.run(_run_w1(base_url, TokenIds(*args.ids), seed))


async def _run_w1(base_url: str, prompts: PromptSource, seed: int) -> Run:
    async with new_session() as session:
        model = await first_model(session, base_url)
        await run_once(base_url, model, warm_up(prompts, seed - 1))
        before = await read_steps(session, base_url)
        summary, _ = await run_well(base_url, model, build("W1", prompts, seed))
        steps = since(await read_steps(session, base_url), before[-1] if before else None)
    return Run(summary, check_steps(steps))


def report(chunked: Sequence[Run], whole: Sequence[Run], budget: int) -> tuple[str, bool]:
    """The table, and whether every target was met."""
    rows = [
        ["largest gap, ms", *(spread_of([run.largest_gap_ms for run in runs]) for runs in (chunked, whole))],
        ["p99 gap, ms", *(spread_of([run.p99_gap_ms for run in runs]) for runs in (chunked, whole))],
        ["gap p50 otherwise, ms", *(_spread(runs, "steady_itl_otherwise_ms", "p50") for runs in (chunked, whole))],
        ["long prompts' TTFT p50, ms", *(_ttft(runs) for runs in (chunked, whole))],
        ["steps", *(spread_of([run.steps.num_steps for run in runs]) for runs in (chunked, whole))],
        ["of them mixed", *(spread_of([run.steps.num_mixed for run in runs]) for runs in (chunked, whole))],
        ["of them without a decoding request", *(_missed(runs) for runs in (chunked, whole))],
        ["next plan before the result", *(_ahead(runs) for runs in (chunked, whole))],
    ]
    ratio = _median_largest(chunked) / _median_largest(whole)
    p99_ratio = statistics.median(r.p99_gap_ms for r in chunked) / statistics.median(r.p99_gap_ms for r in whole)
    ahead = min(run.steps.ahead_share for run in chunked)
    missed = sum(run.steps.num_with_missed_decodes for run in chunked)
    checks = [
        (f"largest gap, chunked / whole: {ratio:.2f} (p99: {p99_ratio:.2f})", ratio <= TARGET_RATIO, TARGET_RATIO),
        (f"steps without a decoding request: {missed}", missed == 0, 0),
        (f"next plan sent before the result, smallest share: {ahead:.3f}", ahead >= TARGET_AHEAD, TARGET_AHEAD),
    ]
    lines = [table([f"W1, {len(chunked)} rounds", f"chunked, budget {budget}", "chunking off"], rows), ""]
    lines += [f"{'ok  ' if good else 'MISS'}  {text}  (target {target})" for text, good, target in checks]
    return "\n".join(lines), all(good for _, good, _ in checks)


def _median_largest(runs: Sequence[Run]) -> float:
    return statistics.median(run.largest_gap_ms for run in runs)


def _spread(runs: Sequence[Run], group: str, statistic: str) -> str:
    values = [run.summary[group][statistic] for run in runs if statistic in run.summary[group]]
    return spread_of(values) if values else "none"


def _ttft(runs: Sequence[Run]) -> str:
    return spread_of([run.summary["long"]["ttft_ms"]["p50"] for run in runs])


def _missed(runs: Sequence[Run]) -> str:
    return spread_of([run.steps.num_with_missed_decodes for run in runs])


def _ahead(runs: Sequence[Run]) -> str:
    return spread_of([round(run.steps.ahead_share, 3) for run in runs])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chunked_prefill", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=3, help="each starts both services once")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--max-len", type=positive, default=2048)
    parser.add_argument("--ids", type=int, nargs=2, metavar=("LOW", "HIGH"), default=(1000, 40000))
    parser.add_argument("--out", type=Path, help="JSON of all runs")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="more settings for both services")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a target is missed."""
    args = _parse(argv)
    seed = time.time_ns() // 1000
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for index in range(args.rounds):
        for chunked in (True, False) if index % 2 == 0 else (False, True):
            run = measure(args, chunked, seed + 1000 * len(runs[True]) + 500 * len(runs[False]))
            runs[chunked].append(run)
            name = f"budget {args.budget}" if chunked else "chunking off"
            print(f"round {index + 1}, {name}: largest gap {run.largest_gap_ms:.0f} ms", flush=True)
    text, good = report(runs[True], runs[False], args.budget)
    print(f"\n{text}")
    if args.out is not None:
        args.out.write_text(json.dumps({_name(key): [_as_json(run) for run in found] for key, found in runs.items()}))
    return int(not good)


def _name(chunked: bool) -> str:
    return "chunked" if chunked else "whole"


def _as_json(run: Run) -> dict[str, Any]:
    return {"summary": run.summary, "steps": asdict(run.steps)}


if __name__ == "__main__":
    sys.exit(main())

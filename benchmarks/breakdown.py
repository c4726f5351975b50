"""Where every millisecond of a step goes, in the running service: starts it with profiled steps and runs workloads.

    python -m benchmarks breakdown -w W4 -w W1b -w W2

For each workload: per kind of step the median of every stage and its share of the step's wall time; what the
rank idles between steps; and per token what the client waits beyond the steps, and the CPU of each part.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu_time import CLIENT, PARTS, RAY, cpu_seconds
from benchmarks.loadgen import first_model, new_session, run_once, run_well
from benchmarks.service import running_service
from benchmarks.steps import Step, read_steps, since
from benchmarks.summary import table
from benchmarks.workloads import NAMES, TokenIds, build, warm_up

RANK_STAGES = (
    "wait",
    "decode plan",
    "batch",
    "linears",
    "attention",
    "norms",
    "other",
    "head",
    "sample",
    "collectives",
    "report",
    "encode result",
    "send",
)
"""What follows one another on rank 0: their sum is the step's wall time, less what no timer saw."""
ENGINE_STAGES = ("schedule", "encode plan", "send plan", "decode result", "update", "publish", "metrics")
"""Beside the rank's work, where plans run ahead."""

Result = dict[str, Any]


def kinds_of(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """Steps by what is in them; pauses of the service are not steps."""
    busy = [step for step in steps if step["sent_ahead"]]
    return {
        "decode": [step for step in busy if step["num_decodes"] and not step["num_chunk_tokens"]],
        "mixed": [step for step in busy if step["num_decodes"] and step["num_chunk_tokens"]],
        "prefill": [step for step in busy if not step["num_decodes"]],
    }


def breakdown(steps: Sequence[Step]) -> Result:
    """Medians in milliseconds over steps of one kind."""
    stages = {
        stage: 1e3 * statistics.median(step["stage_seconds"].get(stage, 0.0) for step in steps)
        for stage in (*RANK_STAGES, *ENGINE_STAGES)
    }
    wall = 1e3 * statistics.median(step["wall_seconds"] for step in steps)
    return {
        "steps": len(steps),
        "wall_ms": wall,
        "execute_ms": 1e3 * statistics.median(step["execute_seconds"] for step in steps),
        "stages_ms": stages,
        "unseen_ms": 1e3 * statistics.median(map(_unseen, steps)),
        "idle_share": 1 - _total(steps, "execute_seconds") / _total(steps, "wall_seconds"),
        "mean_requests": statistics.fmean(step["num_requests"] for step in steps),
    }


def _unseen(step: Step) -> float:
    return float(step["wall_seconds"] - sum(step["stage_seconds"].get(stage, 0.0) for stage in RANK_STAGES))


def _total(steps: Sequence[Step], name: str) -> float:
    return sum(float(step[name]) for step in steps)


def stage_table(found: dict[str, Result]) -> str:
    """One column a kind of step: milliseconds and share of the wall time."""
    rows: list[list[str]] = []

    def row(title: str, values: Sequence[float]) -> None:
        cells = [
            f"{value:.3f} {100 * value / kind['wall_ms']:6.1f}%" for value, kind in zip(values, kinds, strict=True)
        ]
        rows.append([title, *cells])

    kinds = list(found.values())
    for stage in RANK_STAGES:
        row(f"rank: {stage}", [kind["stages_ms"][stage] for kind in kinds])
    row("rank: no timer", [kind["unseen_ms"] for kind in kinds])
    row("wall", [kind["wall_ms"] for kind in kinds])
    for stage in ENGINE_STAGES:
        row(f"engine, beside it: {stage}", [kind["stages_ms"][stage] for kind in kinds])
    rows.append(["idle between steps", *(f"{100 * kind['idle_share']:.2f}%" for kind in kinds)])
    header = [f"{name} ({kind['steps']}, {kind['mean_requests']:.1f} requests)" for name, kind in found.items()]
    return table(["ms and share of wall", *header], rows)


def token_table(result: Result) -> str:
    """What a token costs outside the steps."""
    parts = (*PARTS.values(), RAY, CLIENT)
    rows = [
        ["gap at the client, mean ms", f"{result['gap_ms']:.3f}", ""],
        ["of it beyond the step's wall time", f"{result['gap_ms'] - result['step_ms']:.3f}", ""],
        *(
            [f"CPU of {part}", f"{result['cpu_us_a_token'][part]:.0f} us", f"{100 * result['cpu_share'][part]:.1f}%"]
            for part in parts
        ),
    ]
    return table([f"a token, {result['tokens_per_second']:.0f} a second", "cost", "of a core"], rows)


async def measure(base_url: str, model: str, name: str, seed: int, prompts: TokenIds) -> Result:
    """One workload. Raises BenchmarkError when a request failed."""
    async with new_session() as session:
        before = await read_steps(session, base_url)
        cpu_before, began = cpu_seconds(), time.perf_counter()
        summary, records = await run_well(base_url, model, build(name, prompts, seed))
        seconds = time.perf_counter() - began
        cpu = cpu_seconds()
        cpu.subtract(cpu_before)
        steps = since(await read_steps(session, base_url), before[-1] if before else None)
    tokens = summary["output_tokens"]
    decodes = sum(step["num_decodes"] for step in steps)
    parts = (*PARTS.values(), RAY, CLIENT)
    return {
        "workload": name,
        "tokens_per_second": tokens / seconds,
        "kinds": {kind: breakdown(found) for kind, found in kinds_of(steps).items() if found},
        "gap_ms": 1e3 * statistics.fmean(gap for record in records for gap in record.itl),
        "step_ms": 1e3 * sum(step["wall_seconds"] * step["num_decodes"] for step in steps) / decodes,
        "cpu_us_a_token": {part: 1e6 * cpu[part] / tokens for part in parts},
        "cpu_share": {part: cpu[part] / seconds for part in parts},
    }


async def _measure_all(args: argparse.Namespace, base_url: str, seed: int) -> list[Result]:
    prompts = TokenIds(*args.ids)
    async with new_session() as session:
        model = await first_model(session, base_url)
    await run_once(base_url, model, warm_up(prompts, seed - 1))
    results = []
    for index, name in enumerate(args.workload):
        result = await measure(base_url, model, name, seed + 1000 * index, prompts)
        print(f"\n{name}\n{stage_table(result['kinds'])}\n\n{token_table(result)}", flush=True)
        results.append(result)
    return results


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="breakdown", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-w", "--workload", action="append", choices=NAMES, required=True)
    parser.add_argument("--ids", type=int, nargs=2, metavar=("LOW", "HIGH"), default=(1000, 40000))
    parser.add_argument("--plain", action="store_true", help="do not profile: CPU and idle share as they are")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="more settings for the service")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Always 0: it has no target of its own."""
    args = _parse(argv)
    settings = [f"server.profile_steps={str(not args.plain).lower()}", *args.settings]
    with running_service(settings) as base_url:
        results = asyncio.run(_measure_all(args, base_url, time.time_ns() // 1000))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

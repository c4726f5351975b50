"""Routers compared on replicas that hold not all prefixes: hit rate, time to first token, and how even the load is.

python -m benchmarks routing --book routing.json                       # all routers, Zipf-distributed prefixes
python -m benchmarks routing --book routing.json -r predicted --mooncake mooncake_conversation.jsonl

Three replicas of a model with random weights, each with one thread and a KV cache for five of twelve prefixes of 1,024
tokens. Each
start of the service gets a run that warms it up and is not counted. With --book a command that was cut short goes on
where it was. Exit code 1 when a router of the book is better than ours by more than the limits.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.client import StreamClient
from benchmarks.loadgen import drive, first_model, new_session
from benchmarks.random_model import LlamaShape, write_served_model
from benchmarks.routing_loads import OUTPUT_TOKENS, PREFIX_TOKENS, TAIL_TOKENS, mooncake, zipf
from benchmarks.run_book import RunBook
from benchmarks.service import running_service
from benchmarks.summary import Summary, percentile, table
from benchmarks.workloads import PlannedRequest, Workload
from cluster.metrics.series import PREFIX

ROUTERS = ("predicted", "power_of_two", "prefix_affinity")
SHAPE = LlamaShape(512, 1536, 8, 8, 2, 259)
BLOCK_TOKENS = 16
HELD_PREFIXES = 5
METRICS_SECONDS = 2.5
"""Until engines have pushed what they counted."""
LEAST_PREFILL_MS = 100.0
MOST_HITS_LOST = 0.02
MOST_TTFT = 0.9
MOST_LOAD = 1.3


def settings(router: str, model: str, replicas: int) -> list[str]:
    """Of a service with that router."""
    blocks_each = -(-(PREFIX_TOKENS + TAIL_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS)
    return [
        f"model.path={model}",
        f"parallel.num_replicas={replicas}",
        f"parallel.router={'power_of_two' if router == 'power_of_two' else 'predicted'}",
        f"cache.block_size={BLOCK_TOKENS}",
        # Requests that run hold their own tail and answer besides what is shared.
        f"cache.num_blocks={HELD_PREFIXES * blocks_each + blocks_each // 2}",
        "model.max_len=2048",
    ]


def served_requests(base_url: str) -> dict[str, float]:
    """Requests that each engine has ended, by its name."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(f"{PREFIX}request_success_total{{"):
            labels, _, value = line.rpartition(" ")
            engine = labels.partition('engine="')[2].partition('"')[0]
            found[engine] = found.get(engine, 0.0) + float(value)
    return found


async def run(base_url: str, workload: Workload) -> Summary:
    """One run of a workload: its figures."""
    before = served_requests(base_url)
    async with new_session() as session:
        client = StreamClient(session, base_url, await first_model(session, base_url))
        records = await drive(client, workload)
    await asyncio.sleep(METRICS_SECONDS)
    after = served_requests(base_url)
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed, the first with: {errors[0]}")
    served = [count - before.get(engine, 0.0) for engine, count in after.items()]
    ttft = [record.ttft * 1e3 for record in records if record.ttft is not None]
    return {
        "requests": len(records),
        "hit_rate": round(sum(each.cached_tokens for each in records) / sum(each.prompt_tokens for each in records), 4),
        "ttft_p50_ms": round(percentile(ttft, 50), 1),
        "ttft_p95_ms": round(percentile(ttft, 95), 1),
        "ttft_mean_ms": round(statistics.fmean(ttft), 1),
        "most_load": round(max(served) / (sum(served) / len(served)), 3),
    }


async def prefill_ms(base_url: str) -> float:
    """Median time to the first token of three lone prompts of 1,024 tokens that no cache holds."""
    async with new_session() as session:
        client = StreamClient(session, base_url, await first_model(session, base_url))
        found = []
        for _ in range(3):
            prompt = [3 + (time.time_ns() // (index + 1)) % 256 for index in range(PREFIX_TOKENS)]
            record = await client.stream(PlannedRequest("req", prompt, len(prompt), 1))
            found.append((record.ttft or 0.0) * 1e3)
    return statistics.median(found)


def measure(router: str, model: str, book: RunBook, args: argparse.Namespace) -> None:
    """The runs of one router that the book lacks."""
    name = "zipf" if args.mooncake is None else "mooncake"

    def load(index: int, count: int) -> Workload:
        seed = f"{book.seed} {index}"
        if args.mooncake is None:
            return zipf(seed, count, args.rate, args.exponent)
        return mooncake(args.mooncake, seed, count, args.rate, 2048 - OUTPUT_TOKENS - 1)

    missing = [index for index in range(args.runs) if not book.has_run(name, 0, index, router)]
    if not missing:
        return
    module = f"benchmarks.{'affinity' if router == 'prefix_affinity' else 'routed'}_service"
    began = time.monotonic()
    with running_service([*settings(router, model, args.replicas), *args.settings], module=module) as base_url:
        print(f"{router}: started in {time.monotonic() - began:.1f} s", flush=True)
        alone = asyncio.run(prefill_ms(base_url))
        print(f"{router}: a prompt of {PREFIX_TOKENS} tokens takes {alone:.0f} ms alone", flush=True)
        if alone < LEAST_PREFILL_MS:
            raise RuntimeError(f"the model is too small: {PREFIX_TOKENS} tokens take {alone:.0f} ms")
        asyncio.run(run(base_url, load(-1, args.requests // 2)))
        for index in missing:
            summary = asyncio.run(run(base_url, load(index, args.requests)))
            book.add_run(name, 0, index, router, summary)
            print(f"{router} {name} {index}: {json.dumps(summary)}", flush=True)


def medians(book: RunBook, name: str, router: str, runs: int) -> dict[str, float]:
    """Of the runs in the book; empty when one is missing."""
    if not all(book.has_run(name, 0, index, router) for index in range(runs)):
        return {}
    found: list[dict[str, Any]] = [book.run(name, 0, index, router) for index in range(runs)]
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


def report(book: RunBook, name: str, runs: int) -> bool:
    """The table; False when a limit is broken."""
    found = {router: figures for router in ROUTERS if (figures := medians(book, name, router, runs))}
    if not found:
        return True
    keys = list(next(iter(found.values())))
    print(f"\n{name}, medians of {runs} runs")
    print(table(["router", *keys], [[router, *(f"{found[router][key]:g}" for key in keys)] for router in found]))
    ours, broken = found.pop("predicted", None), []
    if ours is None:
        return True
    if ours["most_load"] > MOST_LOAD:
        broken.append(f"a replica got {ours['most_load']:.2f} times the mean, above {MOST_LOAD}")
    for router, figures in found.items():
        if ours["hit_rate"] < figures["hit_rate"] - MOST_HITS_LOST:
            broken.append(f"the hit rate is more than {MOST_HITS_LOST:g} below {router}'s")
        if ours["ttft_p95_ms"] > MOST_TTFT * figures["ttft_p95_ms"]:
            broken.append(f"TTFT p95 is above {MOST_TTFT:g} of {router}'s")
    print("\n".join(broken) or "all limits hold")
    return not broken


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="routing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-r", "--router", action="append", choices=ROUTERS, help="default: all, one after another")
    parser.add_argument("--mooncake", type=Path, help="a Mooncake trace, in the place of Zipf-distributed prefixes")
    parser.add_argument("--book", type=Path, help="runs are kept in this file, and not made again")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="of a run")
    parser.add_argument("--rate", type=float, default=15.0, help="requests a second")
    parser.add_argument("--exponent", type=float, default=1.4, help="of the Zipf distribution")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of every service")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a limit is broken."""
    args = _parse(argv)
    same = {name: getattr(args, name) for name in ("replicas", "requests", "rate", "exponent", "settings")}
    book = RunBook(args.book, same)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="chunkserve-routing-") as directory:
        write_served_model(Path(directory), SHAPE)
        for router in args.router or ROUTERS:
            measure(router, directory, book, args)
    return int(not report(book, "zipf" if args.mooncake is None else "mooncake", args.runs))


if __name__ == "__main__":
    sys.exit(main())

"""Load generator for any OpenAI-compatible server: workloads W1 to W4, medians over runs, table and JSON.

python -m benchmarks loadgen --base-url http://127.0.0.1:8000 -w W1 -w W4 --runs 3 --out runs.json
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.client import Api, Dialect, RequestRecord, StreamClient
from benchmarks.counts import positive
from benchmarks.errors import BenchmarkError
from benchmarks.summary import Summary, median_of, run_table, summarise
from benchmarks.workloads import NAMES, PlannedRequest, PromptSource, TokenIds, Words, Workload, build, warm_up

RUN_SECONDS = 600.0


def new_session(seconds: float = RUN_SECONDS) -> aiohttp.ClientSession:
    """Every request on a connection of its own, so that none waits for another; each at most `seconds`."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=seconds))


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The name of the first model the server lists. Raises BenchmarkError when it lists none."""
    url = base_url.rstrip("/") + "/v1/models"
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        raise BenchmarkError(f"no model at {url}: {error!r}") from error


async def drive(client: StreamClient, workload: Workload) -> list[RequestRecord]:
    """Send a workload as it says; every record, in no particular order."""
    if workload.concurrency is not None:
        return await _drive_in_order(client, workload.requests, workload.concurrency)
    waiting_for_token = len(workload.requests)
    over = asyncio.Event()

    def first_token() -> None:
        nonlocal waiting_for_token
        waiting_for_token -= 1
        if waiting_for_token == 0:
            over.set()

    async def at_its_time(request: PlannedRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, request.start_at - client.now()))
        record = await client.stream(request, on_first_token=first_token)
        if not record.token_times:
            first_token()  # It failed: nobody needs to wait for it.
        return record

    background = _keep_open(client, workload, over)
    foreground = asyncio.gather(*(at_its_time(request) for request in workload.requests))
    kept, sent = await asyncio.gather(background, foreground)
    return kept + sent


async def _drive_in_order(
    client: StreamClient, requests: Sequence[PlannedRequest], concurrency: int
) -> list[RequestRecord]:
    left = iter(requests)

    async def worker() -> list[RequestRecord]:
        return [await client.stream(request) for request in left]

    return [record for records in await asyncio.gather(*(worker() for _ in range(concurrency))) for record in records]


async def _keep_open(client: StreamClient, workload: Workload, over: asyncio.Event) -> list[RequestRecord]:
    """Keep the background streams going until `over`; one that fails is not followed by another."""
    if workload.background is None:
        return []

    async def one_after_another(request: PlannedRequest, index: int) -> list[RequestRecord]:
        records = [await client.stream(request, until=over)]
        while not over.is_set() and records[-1].error is None:
            assert workload.background is not None
            records.append(await client.stream(workload.background()[index], until=over))
        return records

    streams = enumerate(workload.background())
    found = await asyncio.gather(*(one_after_another(request, index) for index, request in streams))
    return [record for records in found for record in records]


async def run_once(
    base_url: str,
    model: str,
    workload: Workload,
    api: Api = "completions",
    extra: dict[str, Any] | None = None,
    dialect: Dialect = "openai",
) -> tuple[Summary, list[RequestRecord]]:
    """One run of one workload on a session of its own."""
    async with new_session() as session:
        client = StreamClient(session, base_url, model, api, extra, dialect)
        records = await drive(client, workload)
        return summarise(workload.name, records, client.now()), records


async def run_well(
    base_url: str, model: str, workload: Workload, dialect: Dialect = "openai"
) -> tuple[Summary, list[RequestRecord]]:
    """As `run_once`. Raises BenchmarkError when a request failed."""
    summary, records = await run_once(base_url, model, workload, dialect=dialect)
    if summary["errors"]:
        raise BenchmarkError(f"{summary['errors']} requests failed, one of them so: {summary['error_sample']}")
    return summary, records


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="loadgen", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first one the server lists")
    parser.add_argument("-w", "--workload", action="append", choices=NAMES, required=True)
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument("--dialect", choices=("openai", "transformers"), default="openai")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json: send text instead of token ids")
    parser.add_argument("--ids", type=int, nargs=2, metavar=("LOW", "HIGH"), default=(1000, 40000))
    parser.add_argument("--extra", type=json.loads, help="JSON merged into every request's body")
    parser.add_argument("--runs", type=positive, default=1)
    parser.add_argument("--seed", type=int, help="default: the clock")
    parser.add_argument("--no-warm-up", action="store_true")
    parser.add_argument("--records", action="store_true", help="keep every request's times in the JSON")
    parser.add_argument("--out", type=Path, help="JSON of all runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a request failed."""
    args = _parse(argv)
    prompts: PromptSource = TokenIds(*args.ids) if args.tokenizer is None else Words(args.tokenizer)
    seed = time.time_ns() // 1000 if args.seed is None else args.seed
    results = asyncio.run(_measure(args, prompts, seed))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1))
    return int(any(run["errors"] for result in results for run in result["runs"]))


async def _measure(args: argparse.Namespace, prompts: PromptSource, seed: int) -> list[dict[str, Any]]:
    model = args.model
    if model is None:
        async with new_session() as session:
            model = await first_model(session, args.base_url)
    if not args.no_warm_up:
        await run_once(args.base_url, model, warm_up(prompts, seed - 1), args.api, args.extra, args.dialect)
    results = []
    for name in args.workload:
        runs = []
        for index in range(args.runs):
            workload = build(name, prompts, seed + 1000 * index)
            summary, records = await run_once(args.base_url, model, workload, args.api, args.extra, args.dialect)
            if args.records:
                summary["records"] = [_times(record) for record in records]
            runs.append(summary)
        print(f"\n{name} at {args.base_url}, model {model}\n{run_table(runs)}", flush=True)
        if runs[0]["error_sample"]:
            print(f"an error: {runs[0]['error_sample']}")
        median = median_of([{key: value for key, value in run.items() if key != "records"} for run in runs])
        results.append({"workload": name, "model": model, "runs": runs, "median": median})
    return results


def _times(record: RequestRecord) -> dict[str, Any]:
    names = ("kind", "sent_at", "ttft", "itl", "prompt_tokens", "cached_tokens", "output_tokens", "cut", "error")
    return {name: getattr(record, name) for name in names}


if __name__ == "__main__":
    sys.exit(main())

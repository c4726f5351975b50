"""Clients that leave at random moments; afterwards the service must be empty again without further traffic.

python -m benchmarks disconnects                       # starts a service of its own
python -m benchmarks disconnects --base-url http://127.0.0.1:8000
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.counts import positive
from benchmarks.loadgen import first_model, new_session
from benchmarks.service import running_service
from benchmarks.summary import table
from benchmarks.workloads import TokenIds
from cluster.metrics.series import PREFIX

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
ABORTS = "request_aborts_total"
SETTLE_SECONDS = 3.0
"""Gauges are pushed once a second: what they show for three times as long is not an old state."""

Moment = Literal["before the first byte", "mid-stream", "not streaming", "never"]
MOMENTS: tuple[Moment, ...] = ("before the first byte", "mid-stream", "not streaming", "never")


@dataclass(frozen=True, slots=True)
class Visit:
    """One request, and when its client leaves."""

    moment: Moment
    prompt: list[int]
    max_tokens: int
    leave_after: float
    """Seconds after sending; mid-stream, the number of events."""


def plan_visits(count: int, rng: random.Random, prompts: TokenIds) -> list[Visit]:
    """Every moment in equal parts, "never" rarely; short and long prompts, so that some leave in prefill."""
    return [_plan_visit(MOMENTS[index % 3] if index % 10 else "never", rng, prompts) for index in range(count)]


def _plan_visit(moment: Moment, rng: random.Random, prompts: TokenIds) -> Visit:
    prompt = prompts.ids(rng, rng.choice((16, 64, 300, 900)))
    if moment == "mid-stream":
        return Visit(moment, prompt, 200, float(rng.randint(1, 20)))
    if moment == "before the first byte":
        return Visit(moment, prompt, 200, rng.choice((0.0, rng.uniform(0.0, 0.1))))
    return Visit(moment, prompt, 200 if moment == "not streaming" else 8, rng.uniform(0.0, 2.0))


async def visit(session: aiohttp.ClientSession, base_url: str, model: str, plan: Visit) -> str:
    """Send it, leave when planned; what became of it: "left", "answered", or the error."""
    body = {
        "model": model,
        "prompt": plan.prompt,
        "max_tokens": plan.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": plan.moment in ("mid-stream", "before the first byte"),
    }
    events_left = int(plan.leave_after) if plan.moment == "mid-stream" else -1
    seconds = plan.leave_after if plan.moment in ("not streaming", "before the first byte") else None
    try:
        async with asyncio.timeout(seconds), session.post(f"{base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                return f"HTTP {response.status}"
            async for line in response.content:
                events_left -= line.startswith(b"data:")
                if events_left == 0:
                    return "left"
        return "answered"
    except TimeoutError:
        return "left" if seconds is not None else "timed out"
    except aiohttp.ClientError as error:
        return type(error).__name__


def totals(text: str, names: Iterable[str]) -> dict[str, float]:
    """Each of the service's series summed over engines. Raises KeyError for one that is not there."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return {name: found[PREFIX + name] for name in names}


async def scrape(session: aiohttp.ClientSession, base_url: str) -> dict[str, float]:
    async with session.get(f"{base_url}/metrics") as response:
        response.raise_for_status()
        return totals(await response.text(), (*GAUGES, ABORTS))


async def send_visits(
    session: aiohttp.ClientSession, base_url: str, model: str, visits: Sequence[Visit], concurrency: int
) -> Counter[tuple[Moment, str]]:
    """So many at once that some leave while they wait for a seat; counts of (moment, what became of it)."""
    left = iter(visits)

    async def worker() -> list[tuple[Moment, str]]:
        return [(plan.moment, await visit(session, base_url, model, plan)) for plan in left]

    return Counter(pair for pairs in await asyncio.gather(*(worker() for _ in range(concurrency))) for pair in pairs)


async def wait_until_empty(
    session: aiohttp.ClientSession, base_url: str, seconds: float, settle: float = SETTLE_SECONDS
) -> float | None:
    """Look at /metrics, and ask for nothing else, until every gauge is 0 and stays so for `settle` seconds.

    How long until they were 0, in seconds; None when they were not within `seconds`.
    """
    began = time.monotonic()
    empty_since: float | None = None
    while empty_since is None or time.monotonic() - empty_since < settle:
        values = await scrape(session, base_url)
        now = time.monotonic()
        if any(values[gauge] for gauge in GAUGES):
            empty_since = None
            if now - began > seconds:
                return None
        elif empty_since is None:
            empty_since = now
        await asyncio.sleep(0.2)
    return empty_since - began


async def check(base_url: str, args: argparse.Namespace) -> bool:
    """Run it all, print the table, say whether the service came out empty and well."""
    rng = random.Random(args.seed)
    prompts = TokenIds(*args.ids)
    async with new_session(args.request_seconds) as session:
        model = await first_model(session, base_url)
        before = await scrape(session, base_url)
        outcomes = await send_visits(
            session, base_url, model, plan_visits(args.requests, rng, prompts), args.concurrency
        )
        seconds = await wait_until_empty(session, base_url, args.deadline)
        after = await scrape(session, base_url)
        last = await visit(session, base_url, model, Visit("never", prompts.ids(rng, 16), 4, 0.0))
    aborts = int(after[ABORTS] - before[ABORTS])
    num_left = sum(count for (_, outcome), count in outcomes.items() if outcome == "left")
    # Others may have left before the service had begun, or as it ended.
    num_surely_aborted = outcomes[("mid-stream", "left")]
    num_failed = sum(count for (_, outcome), count in outcomes.items() if outcome not in ("left", "answered"))
    print(table(["client leaves", "outcome", "requests"], [[*pair, count] for pair, count in sorted(outcomes.items())]))
    print()
    print(table(["afterwards", "value"], [[name, f"{value:g}"] for name, value in after.items()]))
    checks = [
        (
            "gauges at 0 without traffic: " + (f"after {seconds:.1f} s" if seconds is not None else "no"),
            seconds is not None,
        ),
        (
            f"aborts counted: {aborts} (clients that left: {num_left}, of them mid-stream: {num_surely_aborted})",
            num_surely_aborted <= aborts <= num_left,
        ),
        (f"requests that failed: {num_failed}", num_failed == 0),
        (f"the next request: {last}", last == "answered"),
    ]
    print("\n" + "\n".join(f"{'ok  ' if good else 'MISS'}  {text}" for text, good in checks))
    return all(good for _, good in checks)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="disconnects", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base-url", help="a running service; default: start one")
    parser.add_argument("--requests", type=positive, default=200)
    parser.add_argument("--concurrency", type=positive, default=48)
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds for the gauges to return to 0")
    parser.add_argument("--request-seconds", type=float, default=300.0)
    parser.add_argument("--ids", type=int, nargs=2, metavar=("LOW", "HIGH"), default=(1000, 40000))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the service it starts")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when the service did not come out empty and well."""
    args = _parse(argv)
    running = running_service(args.settings) if args.base_url is None else contextlib.nullcontext(args.base_url)
    with running as base_url:
        return int(not asyncio.run(check(base_url.rstrip("/"), args)))


if __name__ == "__main__":
    sys.exit(main())

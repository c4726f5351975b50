"""Engines by load: 1, 3, 1 while streams become many and few again, each engine on a node that comes and goes.

python -m benchmarks autoscaling            # about four minutes; --help shows the rest

Workers send one stream after the other; how many of them are at work rises, stays and falls. The cluster is Ray's
autoscaler over raylets on this machine. Every text is compared with an undisturbed run. Exit code 1 when a stream
failed or changed, or when the engines did not become as many, and one again.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import aiohttp

from benchmarks.autoscaled_nodes import autoscaled_nodes
from benchmarks.counts import positive
from benchmarks.loadgen import first_model, new_session
from benchmarks.random_model import SLOW, write_served_model
from benchmarks.service import running_service
from benchmarks.stream_load import Load, Stream
from cluster.metrics.series import PREFIX

STREAM_SECONDS = 300.0
SCRAPE_SECONDS = 5.0
_ENGINE_UP = f"{PREFIX}engine_up{{"


class Bench:
    """One ramp against one running service."""

    def __init__(
        self, session: aiohttp.ClientSession, load: Load, base_url: str, num_nodes: Callable[[], int], num_calm: int
    ) -> None:
        """`num_calm`: streams at work before and after the ramp."""
        self._session, self._load, self._url, self._num_nodes = session, load, base_url, num_nodes
        self._num_wanted = num_calm
        self._num_open = 0
        self._turn = count()
        self._calm: list[Stream] = []
        self.streams: list[Stream] = []
        self.num_changed = 0
        self.num_engines = 0
        self._began = time.perf_counter()

    async def calm(self) -> None:
        """Each stream alone, undisturbed."""
        self._calm = [await self._load.run_one(self._session, index) for index in range(self._load.num_streams)]

    def say(self, what: str) -> None:
        print(f"{time.perf_counter() - self._began:7.1f} s  {what}", flush=True)

    async def work(self, number: int, over: asyncio.Event) -> None:
        """One worker: streams while it is one of those that are wanted."""
        while not over.is_set():
            if number >= self._num_wanted:
                await asyncio.sleep(0.1)
                continue
            index = next(self._turn) % self._load.num_streams
            self._num_open += 1
            stream, calm = await self._load.run_one(self._session, index), self._calm[index]
            self._num_open -= 1
            self.streams.append(stream)
            self.num_changed += (stream.text, stream.num_tokens) != (calm.text, calm.num_tokens)

    async def watch(self) -> None:
        """Say when the number of engines or nodes has changed."""
        before: tuple[int, int] | None = None
        while True:
            try:
                self.num_engines = await self._count_engines()
            except (aiohttp.ClientError, TimeoutError) as error:
                self.say(f"the service does not tell its metrics: {error!r}")
            now = self.num_engines, await asyncio.to_thread(self._num_nodes)
            if now != before:
                self.say(f"{now[0]} engines serve, {now[1]} nodes beside the head, {self._num_open} streams open")
            before = now
            await asyncio.sleep(0.5)

    async def _count_engines(self) -> int:
        async with self._session.get(f"{self._url}/metrics", timeout=aiohttp.ClientTimeout(SCRAPE_SECONDS)) as response:
            text = await response.text()
        return sum(line.startswith(_ENGINE_UP) and line.endswith(" 1.0") for line in text.splitlines())

    async def ramp(self, most: int, seconds: float) -> None:
        """From as many streams as now to `most`, evenly."""
        first = self._num_wanted
        step = 1 if most > first else -1
        self.say(f"from {first} streams to {most} within {seconds:g} s")
        for number in range(first + step, most + step, step):
            await asyncio.sleep(seconds / abs(most - first))
            self._num_wanted = number

    async def until_engines(self, wanted: int, seconds: float) -> float | None:
        """Seconds until so many serve; None when they do not in time."""
        began = time.perf_counter()
        while self.num_engines != wanted:
            if time.perf_counter() - began > seconds:
                self.say(f"not {wanted} engines within {seconds:g} s, but {self.num_engines}")
                return None
            await asyncio.sleep(0.1)
        return time.perf_counter() - began


async def run(base_url: str, num_nodes: Callable[[], int], args: argparse.Namespace) -> bool:
    """The whole ramp; whether all was well."""
    async with new_session(STREAM_SECONDS) as session:
        model = await first_model(session, base_url)
        load = Load(base_url, model, args.kinds, args.tokens, vocab=250)
        bench = Bench(session, load, base_url, num_nodes, args.few)
        await bench.calm()
        bench.say(f"each of {args.kinds} streams has run alone; {args.few} streams now")
        over = asyncio.Event()
        workers = [asyncio.ensure_future(bench.work(number, over)) for number in range(args.many)]
        watching = asyncio.ensure_future(bench.watch())
        await asyncio.sleep(args.hold)
        await bench.ramp(args.many, args.ramp)
        up = await bench.until_engines(args.engines, args.patience)
        bench.say(f"{args.many} streams for {args.hold:g} s more")
        await asyncio.sleep(args.hold)
        await bench.ramp(args.few, args.ramp)
        down = await bench.until_engines(1, args.patience)
        await asyncio.sleep(args.hold)
        over.set()
        await asyncio.gather(*workers)
        watching.cancel()
        return report(bench, up, down, args)


def report(bench: Bench, up: float | None, down: float | None, args: argparse.Namespace) -> bool:
    """Print what became of it; whether all was well."""
    errors = [stream.error for stream in bench.streams if stream.error is not None]
    gaps = sorted(stream.longest_gap() for stream in bench.streams)
    print(f"{len(bench.streams)} streams of {args.tokens} tokens: {len(errors)} failed, {bench.num_changed} changed")
    print(f"longest pause in a stream: median {gaps[len(gaps) // 2]:.2f} s, most {gaps[-1]:.2f} s")
    for what, seconds in ((f"{args.engines} engines after the way up", up), ("1 engine after the way down", down)):
        print(f"{what}: {'never' if seconds is None else f'{seconds:.1f} s'}")
    for error in sorted(set(errors)):
        print(f"an error: {error}")
    return not errors and not bench.num_changed and up is not None and down is not None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="autoscaling", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engines", type=positive, default=3, help="as many as there may be")
    parser.add_argument("--few", type=positive, default=4, help="streams before and after")
    parser.add_argument("--many", type=positive, default=24, help="streams between")
    parser.add_argument("--tokens", type=positive, default=1000, help="of each stream")
    parser.add_argument("--kinds", type=positive, default=4, help="different streams")
    parser.add_argument("--blocks", type=positive, default=400, help="KV blocks of an engine, of 16 tokens")
    parser.add_argument("--ramp", type=float, default=15.0, help="seconds of the way up, and of the way down")
    parser.add_argument("--hold", type=float, default=15.0, help="seconds before, between and after")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds until engines have come or gone")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the service")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when something was lost, cut or changed, or the engines did not come and go."""
    args = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="chunkserve-tiny-") as model:
        write_served_model(Path(model), SLOW)
        settings = [
            f"model.path={model}", "model.dtype=float32", "cache.enable_prefix_caching=false",
            f"cache.num_blocks={args.blocks}", "cache.block_size=16", f"autoscaling.max_replicas={args.engines}",
            "autoscaling.up_seconds=3", "autoscaling.down_seconds=10", *args.settings,
        ]  # fmt: skip
        # The head holds the front end alone; an engine and its rank fill a node.
        with (
            autoscaled_nodes(head_cpus=1, node_cpus=2, max_nodes=args.engines) as (address, num_nodes),
            running_service(settings, address=address) as base_url,
        ):
            return int(not asyncio.run(run(base_url, num_nodes, args)))


if __name__ == "__main__":
    sys.exit(main())

"""Streams under faults: does every one come to its end, with the same text as undisturbed, and how long does it wait?

python -m benchmarks survival                                    # all faults, tiny model; --help shows the rest
python -m benchmarks survival -f kill-worker=20 --book survival.json

Each trial starts 16 streams (half greedy, half sampled with a seed), makes the fault at a random moment, and reads
them to their ends. With --book a command that was cut short goes on where it was. Exit code 1 when a stream failed,
changed, or waited longer than the limit.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp

from benchmarks.counts import positive
from benchmarks.errors import BenchmarkError
from benchmarks.faults import FAULTS
from benchmarks.footprint import Footprint, footprints
from benchmarks.loadgen import first_model, new_session
from benchmarks.nodes import two_nodes
from benchmarks.random_model import write_served_model
from benchmarks.scenes import ODD_STREAM, SCENES, Scene
from benchmarks.service import running_service
from benchmarks.service_processes import FaultError, ServiceProcesses
from benchmarks.stream_load import Load, Stream
from benchmarks.trials import Book, Trial, report
from cluster.metrics.series import PREFIX

READY_SECONDS = 120.0
"""After a trial, until the service is whole again."""
STREAM_SECONDS = 300.0
METRICS_SECONDS = 2.5
"""Until engines have pushed what they counted."""
SETTLE_SECONDS = 10.0
"""Until what is replaced after a fault holds what it will hold."""


class Bench:
    """Trials of one scene on one running service."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, load: Load, scene: Scene, repair: Callable[[], None]
    ) -> None:
        """`repair`: what an operator would do after the fault."""
        self._session, self._url, self._load, self._scene, self._repair = session, base_url, load, scene, repair
        self._processes = ServiceProcesses(os.getpid())
        self._calm: list[Stream] = []
        self._seconds = 0.0
        self._engines: set[str] = set()

    async def calm(self) -> None:
        """The undisturbed run, twice: the first one warms the service up. Raises FaultError when it is not calm."""
        for _ in range(2):
            began = time.perf_counter()
            self._calm = await self._load.run(self._session)
            self._seconds = time.perf_counter() - began
        errors = [stream.error for stream in self._calm if stream.error is not None]
        if errors:
            raise FaultError(f"the undisturbed run has errors: {errors[0]}")
        self._engines = await self._serving_engines() if self._scene.same_engines else set()

    async def trial(self, seed: int) -> Trial:
        """One fault at a moment that the seed names, within the middle of the run. Raises FaultError."""
        rng, scene = random.Random(seed), self._scene
        unlike = {} if scene.client is None else {ODD_STREAM: scene.client(rng, self._load.max_tokens)}
        recoveries = sum((await self._counted("engine_recoveries")).values())
        running = asyncio.ensure_future(self._load.run(self._session, unlike))
        await asyncio.sleep(rng.uniform(0.05, 0.5) * self._seconds)
        at = time.perf_counter()
        watching = asyncio.ensure_future(self._watch(at))
        notes = [client.what for client in unlike.values()]
        if scene.fault is not None:
            notes.append(await asyncio.to_thread(FAULTS[scene.fault], self._processes, rng))
        until = time.perf_counter()
        streams = await running
        self._repair()  # in this thread, for Ray sets signal handlers when it starts a node
        await self._wait_whole()
        watching.cancel()
        unhealthy_after = (await asyncio.gather(watching, return_exceptions=True))[0]
        meant = set(unlike)
        if scene.hits_some:
            meant |= {index for index, stream in enumerate(streams) if stream.waited_from_to(at + 1, until)}
        if meant:
            waited = ", ".join(f"{streams[index].longest_gap():.2f}" for index in sorted(meant))
            notes.append(f"{len(meant)} streams that it was meant for waited {waited} s at most")
        must_fail = {} if scene.fatal is None else dict.fromkeys(unlike, scene.fatal)
        return Trial(
            failed=sum(not _ended_well(stream, must_fail.get(index)) for index, stream in enumerate(streams)),
            changed=sum(not _as_calm(stream, calm) for stream, calm in zip(streams, self._calm, strict=True)),
            longest_gap=max(stream.longest_gap() for index, stream in enumerate(streams) if index not in meant),
            unhealthy_after=unhealthy_after if isinstance(unhealthy_after, float) else None,
            recoveries=round(sum((await self._counted("engine_recoveries")).values()) - recoveries),
            lost_engines=len(self._engines - await self._serving_engines()) if scene.same_engines else 0,
            note="; ".join(notes),
            errors=sorted({stream.error for stream in streams if stream.error is not None}),
        )

    async def _serving_engines(self) -> set[str]:
        """By the names that metrics give them, those that generate when there are streams."""
        before = await self._counted("generation_tokens")
        await self._load.run(self._session)
        after = await self._counted("generation_tokens")
        return {engine for engine, count in after.items() if count > before.get(engine, 0)}

    async def _counted(self, name: str) -> Counter[str]:
        """A counter of engines, by engine. Raises FaultError when the service does not tell."""
        await asyncio.sleep(METRICS_SECONDS)
        found: Counter[str] = Counter()
        try:
            async with self._session.get(f"{self._url}/metrics", timeout=aiohttp.ClientTimeout(10)) as response:
                response.raise_for_status()
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise FaultError(f"the service does not tell its metrics: {error!r}") from None
        for line in text.splitlines():
            if line.startswith(f"{PREFIX}{name}_total{{"):
                labels, _, value = line.rpartition(" ")
                found[labels.partition('engine="')[2].partition('"')[0]] += round(float(value))
        return found

    async def _watch(self, since: float) -> float:
        """Until /health is not good; seconds since the fault."""
        while await self._is_healthy():  # noqa: ASYNC110 - what changes is in another process
            await asyncio.sleep(0.05)
        return time.perf_counter() - since

    async def _is_healthy(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _wait_whole(self) -> None:
        """Raises FaultError when the service does not come back."""
        deadline = time.monotonic() + READY_SECONDS
        while not (await self._is_healthy() and await asyncio.to_thread(self._all_ranks_serve)):
            if time.monotonic() > deadline:
                raise FaultError(f"the service is not whole {READY_SECONDS:g} s after the fault")
            await asyncio.sleep(0.2)

    def _all_ranks_serve(self) -> bool:
        try:
            ranks = self._processes.ranks()
        except FaultError:
            return False
        return len(ranks) == self._scene.num_ranks

    def footprints(self) -> dict[str, Footprint]:
        """What the service's processes hold now."""
        return footprints(self._processes)


@contextmanager
def running_scene(scene: Scene, settings: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start the scene's service; yields its base URL and what repairs it after a fault."""
    with ExitStack() as stack:
        address: str | None = None
        repair: Callable[[], None] = _nothing
        if scene.nodes:
            address, repair = stack.enter_context(two_nodes(head_cpus=3, far_cpus=2))
        service = running_service([*settings, *scene.settings], address=address, module=scene.module)
        yield stack.enter_context(service), repair


def _ended_well(stream: Stream, fatal: str | None) -> bool:
    return stream.error is None if fatal is None else stream.error is not None and fatal in stream.error


def _as_calm(stream: Stream, calm: Stream) -> bool:
    """Whether it is the undisturbed one, or with an error its beginning."""
    if stream.error is not None:
        return calm.text.startswith(stream.text)
    return (stream.text, stream.num_tokens) == (calm.text, calm.num_tokens)


def _nothing() -> None:
    """Serve repairs by itself."""


async def run_scene(
    name: str, count: int, book: Book, base_url: str, repair: Callable[[], None], args: argparse.Namespace
) -> None:
    """The trials of a scene that the book lacks."""
    async with new_session(STREAM_SECONDS) as session:
        model = await first_model(session, base_url)
        load = Load(base_url, model, args.streams, args.tokens, args.vocab)
        bench = Bench(session, base_url, load, SCENES[name], repair)
        await bench.calm()
        before: dict[str, Footprint] | None = None
        missing = [index for index in range(count) if str(index) not in book.trials.get(name, {})]
        for index in missing:
            trial = await bench.trial(args.seed + index)
            book.add(name, index, trial)
            print(f"{name} {index}: {trial}", flush=True)
            await asyncio.sleep(SETTLE_SECONDS if index in (missing[0], missing[-1]) else 0)
            before = before or bench.footprints()
        after = bench.footprints()
        for part, footprint in (before or {}).items():
            print(f"  {part}, after the first fault and after {len(missing)}: {footprint.change_to(after[part])}")


@contextmanager
def _model(path: str) -> Iterator[str]:
    if path != "tiny":
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="chunkserve-tiny-") as directory:
        write_served_model(Path(directory))
        yield directory


def _fault(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in SCENES:
        raise argparse.ArgumentTypeError(f"no fault is called {name!r}; there are {', '.join(SCENES)}")
    return name, positive(count or "1")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="survival", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "-f", "--fault", action="append", type=_fault, metavar="NAME[=COUNT]", help=f"of {', '.join(SCENES)}"
    )
    parser.add_argument("--model", default="tiny", help="a path or hub id; default: a tiny one with random weights")
    parser.add_argument("--book", type=Path, help="trials are kept in this file, and not run again")
    parser.add_argument("--streams", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=1200, help="of each stream")
    parser.add_argument("--vocab", type=int, default=250, help="prompts are of token ids from 3 to this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of every service")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a trial was not good, 2 when one could not be made."""
    args = _parse(argv)
    wanted = dict(args.fault or [(name, 1) for name in SCENES])
    book = Book(None, {})
    try:
        same = {name: getattr(args, name) for name in ("model", "streams", "tokens", "vocab", "seed", "settings")}
        book = Book(args.book, same)
        with _model(args.model) as model:
            for name, count in wanted.items():
                if all(str(index) in book.trials.get(name, {}) for index in range(count)):
                    continue
                settings = [f"model.path={model}", "model.dtype=float32", "cache.memory_gb=0.25", *args.settings]
                with running_scene(SCENES[name], settings) as (base_url, repair):
                    asyncio.run(run_scene(name, count, book, base_url, repair, args))
    except BenchmarkError as error:
        print(f"survival: {error}", file=sys.stderr)
        report(book)
        return 2
    return int(not report(book))


if __name__ == "__main__":
    sys.exit(main())

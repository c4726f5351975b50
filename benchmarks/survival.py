"""Streams under faults: does every one come to its end, with the same text as undisturbed, and how long does it wait?

python -m benchmarks survival                                    # all faults, tiny model; --help shows the rest
python -m benchmarks survival -f kill-worker=20 --book survival.json

Each trial starts 16 streams (half greedy, half sampled with a seed), makes the fault at a random moment, and reads
them to their ends. With --book a command that was cut short goes on where it was. Exit code 1 when a stream failed,
changed, or waited longer than the limit.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.faults import FAULTS, FaultError, ServiceProcesses
from benchmarks.footprint import Footprint, footprints
from benchmarks.loadgen import first_model, new_session
from benchmarks.nodes import two_nodes
from benchmarks.random_model import write_served_model
from benchmarks.service import running_service
from benchmarks.stream_load import Load, Stream
from benchmarks.summary import spread_of, table

READY_SECONDS = 120.0
"""After a trial, until the service is whole again."""
STREAM_SECONDS = 300.0
SETTLE_SECONDS = 10.0
"""Until what is replaced after a fault holds what it will hold."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A fault, the service it is made in, and what it may cost."""

    fault: str
    settings: tuple[str, ...]
    num_ranks: int
    """Of all engines together."""
    limit: float
    """Seconds that the longest gap in any stream may last (tiny model)."""
    nodes: bool = False
    """On two nodes, of which the head has room for all but one engine."""


_TP2 = ("parallel.tensor_parallel_size=2",)
_TWO = ("parallel.num_replicas=2",)
SCENES = {
    "kill-worker": Scene("kill-worker", _TP2, 2, 5.0),
    "stop-worker": Scene("stop-worker", _TP2, 2, 15.0),
    "slow-worker": Scene("slow-worker", _TP2, 2, 15.0),
    "starve-worker": Scene("starve-worker", _TP2, 2, 15.0),
    "cut-link": Scene("cut-link", _TP2, 2, 5.0),
    "garbage": Scene("garbage", _TP2, 2, 1.0),
    "full-disk": Scene("full-disk", _TP2, 2, 1.0),
    "kill-engine": Scene("kill-engine", (), 1, 12.0),
    "kill-engine-of-two": Scene("kill-engine", _TWO, 2, 1.0),
    "stop-engine-of-two": Scene("stop-engine", _TWO, 2, 15.0),
    "redeploy": Scene("redeploy", (), 1, 12.0),
    "redeploy-of-two": Scene("redeploy", _TWO, 2, 5.0),
    "kill-node": Scene("kill-node", _TWO, 2, 12.0, nodes=True),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """What one fault cost."""

    failed: int
    """Streams with an error, or without an end."""
    changed: int
    """Streams whose text or number of tokens is not that of the undisturbed run."""
    longest_gap: float
    """Seconds without a token, of the stream that waited longest; from sending to the first token counts too."""
    unhealthy_after: float | None
    """Seconds from the fault to the first /health that is not good; None: it was good all the time."""
    note: str
    errors: list[str]


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

    async def calm(self) -> None:
        """The undisturbed run, twice: the first one warms the service up. Raises FaultError when it is not calm."""
        for _ in range(2):
            began = time.perf_counter()
            self._calm = await self._load.run(self._session)
            self._seconds = time.perf_counter() - began
        errors = [stream.error for stream in self._calm if stream.error is not None]
        if errors:
            raise FaultError(f"the undisturbed run has errors: {errors[0]}")

    async def trial(self, seed: int) -> Trial:
        """One fault at a moment that the seed names, within the middle of the run. Raises FaultError."""
        rng = random.Random(seed)
        running = asyncio.ensure_future(self._load.run(self._session))
        await asyncio.sleep(rng.uniform(0.05, 0.5) * self._seconds)
        at = time.perf_counter()
        watching = asyncio.ensure_future(self._watch(at))
        note = await asyncio.to_thread(FAULTS[self._scene.fault], self._processes, rng)
        streams = await running
        self._repair()  # in this thread, for Ray sets signal handlers when it starts a node
        await self._wait_whole()
        watching.cancel()
        unhealthy_after = (await asyncio.gather(watching, return_exceptions=True))[0]
        pairs = list(zip(streams, self._calm, strict=True))
        return Trial(
            failed=sum(stream.error is not None for stream in streams),
            changed=sum(
                stream.error is None and (stream.text, stream.num_tokens) != (calm.text, calm.num_tokens)
                for stream, calm in pairs
            ),
            longest_gap=max(after - before for stream in streams for before, after in pairwise(stream.times)),
            unhealthy_after=unhealthy_after if isinstance(unhealthy_after, float) else None,
            note=note,
            errors=sorted({stream.error for stream in streams if stream.error is not None}),
        )

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


class Book:
    """Trials by scene and index, in a JSON file or, without a path, in memory."""

    def __init__(self, path: Path | None, same: dict[str, Any]) -> None:
        """Raises FaultError when the file holds trials of another load than `same`."""
        self._path, self._same = path, same
        self.trials: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            content = json.loads(path.read_text())
            if content["same"] != same:
                raise FaultError(f"{path} holds trials of {content['same']}, and not of {same}")
            self.trials = content["trials"]

    def add(self, name: str, index: int, trial: Trial) -> None:
        self.trials.setdefault(name, {})[str(index)] = asdict(trial)
        if self._path is not None:
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text(json.dumps({"same": self._same, "trials": self.trials}, indent=1))
            os.replace(new, self._path)


@contextmanager
def running_scene(scene: Scene, settings: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start the scene's service; yields its base URL and what repairs it after a fault."""
    with ExitStack() as stack:
        address: str | None = None
        repair: Callable[[], None] = _nothing
        if scene.nodes:
            address, repair = stack.enter_context(two_nodes(head_cpus=3, far_cpus=2))
        yield stack.enter_context(running_service([*settings, *scene.settings], address=address)), repair


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


def report(book: Book) -> bool:
    """Print the table; whether every trial was good."""
    rows, good = [], True
    for name, trials in book.trials.items():
        scene, runs = SCENES[name], list(trials.values())
        gaps = [round(run["longest_gap"], 2) for run in runs]
        seen = [round(run["unhealthy_after"], 2) for run in runs if run["unhealthy_after"] is not None]
        failed, changed = (sum(run[key] for run in runs) for key in ("failed", "changed"))
        fine = not failed and not changed and max(gaps) <= scene.limit
        good &= fine
        verdict = "ok" if fine else "MISS"
        gap, health = spread_of(gaps), spread_of(seen) if seen else "-"
        rows.append([name, len(runs), failed, changed, gap, scene.limit, health, verdict])
    header = ["fault", "trials", "failed", "changed", "longest gap, s", "limit", "unhealthy after, s"]
    print(table([*header, ""], rows))
    return good


@contextmanager
def _model(path: str) -> Iterator[str]:
    if path != "tiny":
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="chunkserve-tiny-") as directory:
        write_served_model(Path(directory))
        yield directory


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="survival", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-f", "--fault", action="append", metavar="NAME=COUNT", help=f"of {', '.join(SCENES)}")
    parser.add_argument("--model", default="tiny", help="a path or hub id; default: a tiny one with random weights")
    parser.add_argument("--book", type=Path, help="trials are kept in this file, and not run again")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1200, help="of each stream")
    parser.add_argument("--vocab", type=int, default=250, help="prompts are of token ids from 3 to this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of every service")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a trial was not good, 2 when one could not be made."""
    args = _parse(argv)
    wanted = {name: int(count or 1) for name, _, count in (each.partition("=") for each in args.fault or SCENES)}
    unknown = sorted(set(wanted) - set(SCENES))
    if unknown:
        print(f"survival: no fault is called {unknown[0]!r}; there are {', '.join(SCENES)}", file=sys.stderr)
        return 2
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
    except FaultError as error:
        print(f"survival: {error}", file=sys.stderr)
        report(book)
        return 2
    return int(not report(book))


if __name__ == "__main__":
    sys.exit(main())

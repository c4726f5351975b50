"""Our server and a peer on one machine, run by run in turn: same model, same prompts, ratios of paired runs.

    python -m benchmarks side_by_side -w W1 -w W4 --budget 128,256,512 --rounds 5 --out runs.json

W1 is run at every budget (tokens a step) of --budget, the other workloads at --budget-otherwise, by default
the peer's best. Both servers are started once for each budget and take turns, which goes first changing from round to
round; the one whose turn it is not is stopped meanwhile (SIGSTOP), so that it uses nothing.

A run disturbed by other processes is repeated, and left out if that does not help. Every run is in --out at once, and
a command that is repeated with the same --out continues there. Exits with 1 when a target is missed.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.client import Dialect
from benchmarks.comparison import Pair, Place, is_disturbed, report
from benchmarks.counts import positive
from benchmarks.loadgen import first_model, new_session, run_once, run_well
from benchmarks.machine import CpuWatch, children, cores_used_by, paused
from benchmarks.options import processor_dtype
from benchmarks.peers.running import PEERS, Peer, running_peer
from benchmarks.run_book import RunBook
from benchmarks.service import running_service
from benchmarks.summary import Summary
from benchmarks.workloads import NAMES, PromptSource, TokenIds, Words, build, warm_up
from cluster.models.store import open_store
from cluster.settings.tree import DEFAULT_MODEL

OURS = "ours"
ATTEMPTS = 3
SETTLE_SECONDS = 1.0
IDLE_AFTER_SECONDS = 5.0
IDLE_SECONDS = 3.0


class Comparison:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace, peer: Peer, model: Path, book: RunBook) -> None:
        self._args, self._peer, self._model, self._book = args, peer, model, book
        self._prompts: PromptSource = TokenIds(*args.ids) if peer.takes_token_ids else Words(model)

    def places(self) -> list[Place]:
        """What is measured where: W1 at every budget, the others at one."""
        otherwise = self._args.budget_otherwise or self._peer.best_budget
        budgets = {name: self._args.budget if name == "W1" else [otherwise] for name in self._args.workload}
        return [(name, budget) for name, chosen in budgets.items() for budget in chosen]

    def run(self) -> None:
        """Make all runs that the book does not have yet."""
        for budget in sorted({budget for _, budget in self.places()}):
            missing = [
                (index, name)
                for index in range(self._args.rounds)
                for name, at in self.places()
                if at == budget and not self._is_done(name, budget, index)
            ]
            if missing:
                self._run_in_turn(budget, missing)

    def pairs(self) -> dict[Place, list[Pair]]:
        """All complete pairs."""
        return {
            (name, budget): [
                Pair(self._book.run(name, budget, index, OURS), self._book.run(name, budget, index, self._peer.name))
                for index in range(self._args.rounds)
                if all(self._book.has_run(name, budget, index, server) for server in (OURS, self._peer.name))
            ]
            for name, budget in self.places()
        }

    def _is_done(self, name: str, budget: int, index: int) -> bool:
        """Whether both servers did this round, with the machine to themselves."""
        return all(
            self._book.has_run(name, budget, index, server)
            and not is_disturbed(self._book.run(name, budget, index, server))
            for server in (OURS, self._peer.name)
        )

    def _run_in_turn(self, budget: int, missing: Sequence[tuple[int, str]]) -> None:
        with self._server(OURS, budget) as ours, ExitStack() as stack:
            with paused(ours.pid):
                peer = stack.enter_context(self._server(self._peer.name, budget))
            for index, name in missing:
                for server, other in ((ours, peer), (peer, ours)) if index % 2 == 0 else ((peer, ours), (ours, peer)):
                    with paused(other.pid):
                        time.sleep(SETTLE_SECONDS)  # what has just gone on catches up with its timers
                        self._measure(server, name, budget, index)

    @contextmanager
    def _server(self, name: str, budget: int) -> Iterator["_Server"]:
        """Start one, warm it up, and see what it uses when idle."""
        before = children()
        started = time.monotonic()
        with self._starting(name, budget) as url:
            seconds = time.monotonic() - started
            [pid] = children() - before
            server = _Server(name, url, pid, "openai" if name == OURS else self._peer.dialect)
            asyncio.run(_warm_up(server, self._prompts))
            time.sleep(IDLE_AFTER_SECONDS)
            idle = cores_used_by(pid, IDLE_SECONDS)
            self._book.add_start(name, budget, seconds, idle)
            print(f"{name}, budget {budget}: up after {seconds:.0f} s; idle it uses {idle:.3f} cores", flush=True)
            yield server

    def _starting(self, server: str, budget: int) -> AbstractContextManager[str]:
        if server != OURS:
            return running_peer(self._peer, self._model, budget)
        settings = [
            f"model.path={self._model}",
            f"model.dtype={processor_dtype()}",
            f"scheduler.max_num_batched_tokens={budget}",
            "cache.memory_gb=1",
            *self._args.settings,
        ]
        return running_service(settings)

    def _measure(self, server: "_Server", name: str, budget: int, index: int) -> None:
        tries: list[Summary] = []
        while len(tries) < ATTEMPTS and (not tries or is_disturbed(tries[-1])):
            seed = self._book.seed + 1000 * index + len(tries)  # other prompts: the last try's are in its cache
            tries.append(asyncio.run(_run(server, name, self._prompts, seed)))
        summary = min(tries, key=lambda run: float(run["other_cores"]))
        self._book.add_run(name, budget, index, server.name, summary)
        others = f"; others used {summary['other_cores']:.2f} cores" if is_disturbed(summary) else ""
        print(f"round {index + 1}, {name} at {budget}, {server.name}: {summary['wall_s']:.1f} s{others}", flush=True)


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    url: str
    pid: int
    dialect: Dialect


async def _warm_up(server: _Server, prompts: PromptSource) -> None:
    async with new_session() as session:
        model = await first_model(session, server.url)
    await run_once(server.url, model, warm_up(prompts, time.time_ns()), dialect=server.dialect)


async def _run(server: _Server, name: str, prompts: PromptSource, seed: int) -> Summary:
    """One run, and how many cores others used. Raises BenchmarkError when a request failed."""
    async with new_session() as session:
        model = await first_model(session, server.url)
    watch = CpuWatch()
    summary, _ = await run_well(server.url, model, build(name, prompts, seed), server.dialect)
    summary["other_cores"] = round(watch.other_cores(), 3)
    return summary


def _budgets(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="side_by_side", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-w", "--workload", action="append", choices=NAMES, help="default: W1 to W4")
    parser.add_argument("--peer", choices=tuple(PEERS), default="vllm")
    parser.add_argument("--budget", type=_budgets, default=[128, 256, 512], help="for W1; default: 128,256,512")
    parser.add_argument("--budget-otherwise", type=positive, help="for the other workloads; default: the peer's best")
    parser.add_argument("--rounds", type=positive, default=5, help="pairs of runs of each workload at each budget")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory or hub id")
    parser.add_argument("--ids", type=int, nargs=2, metavar=("LOW", "HIGH"), default=(1000, 40000))
    parser.add_argument("--out", type=Path, help="JSON of all runs; where it exists the command continues it")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="more settings of our server")
    args = parser.parse_args(argv)
    args.workload = args.workload or ["W1", "W2", "W3", "W4"]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a target is missed."""
    args = _parse(argv)
    peer = PEERS[args.peer]()
    model = open_store(print).resolve(args.model).directory
    same: dict[str, Any] = {
        "peer": peer.title,
        "model": str(model),
        "settings": args.settings,
        "dtype": processor_dtype(),
    }
    comparison = Comparison(args, peer, model, RunBook(args.out, same))
    comparison.run()
    text, good = report(comparison.pairs(), peer.title, with_targets=args.peer == "vllm")
    print(f"\n{text}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

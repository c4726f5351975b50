"""Our server and a peer on one machine, run by run in turn: same model, same prompts, ratios of paired runs.

    python -m benchmarks side_by_side -w W1 -w W4 --budget 128,256,512 --rounds 5 --out runs.json

W1 is run at every budget (tokens a step) of --budget, the other workloads at --budget-otherwise, by default
the peer's best. Both servers are started once for each budget and take turns, which goes first changing from round to
round; what they use when idle is shown. With --alone only one of them is up at a time: slower, and the check
that an idle neighbour does not matter.

A run disturbed by other processes is repeated, and left out if that does not help. Every run is in --out at once, and
a command that is repeated with the same --out continues there. Exits with 1 when a target is missed.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.client import Dialect
from benchmarks.comparison import Pair, Place, is_disturbed, report
from benchmarks.loadgen import first_model, new_session, run_once
from benchmarks.machine import CpuWatch, children, cores_used_by
from benchmarks.peers.running import PEERS, Peer, running_peer
from benchmarks.run_book import RunBook
from benchmarks.service import running_service
from benchmarks.summary import Summary
from benchmarks.workloads import NAMES, PromptSource, TokenIds, Words, build, warm_up
from cluster.models.store import open_store
from cluster.settings.tree import DEFAULT_MODEL

OURS = "ours"
ATTEMPTS = 3
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
            if missing and self._args.alone:
                self._run_alone(budget, missing)
            elif missing:
                self._run_in_turn(budget, missing)

    def pairs(self) -> dict[Place, list[Pair]]:
        """All complete pairs."""
        return {
            (name, budget): [
                Pair(self._book.run(name, budget, index, OURS), self._book.run(name, budget, index, self._peer.name))
                for index in range(self._args.rounds)
                if all(self._book.has_run(name, budget, index, server) for server in self._servers(index))
            ]
            for name, budget in self.places()
        }

    def _is_done(self, name: str, budget: int, index: int) -> bool:
        """Whether both servers did this round, with the machine to themselves."""
        return all(
            self._book.has_run(name, budget, index, server)
            and not is_disturbed(self._book.run(name, budget, index, server))
            for server in self._servers(index)
        )

    def _servers(self, index: int) -> list[str]:
        """Who goes first in a round."""
        return [OURS, self._peer.name] if index % 2 == 0 else [self._peer.name, OURS]

    def _run_in_turn(self, budget: int, missing: Sequence[tuple[int, str]]) -> None:
        with ExitStack() as stack:
            urls = {server: stack.enter_context(self._server(server, budget)) for server in self._servers(0)}
            for index, name in missing:
                for server in self._servers(index):
                    self._measure(server, urls[server], name, budget, index)

    def _run_alone(self, budget: int, missing: Sequence[tuple[int, str]]) -> None:
        for index in sorted({index for index, _ in missing}):
            for server in self._servers(index):
                with self._server(server, budget) as url:
                    for name in [name for at, name in missing if at == index]:
                        self._measure(server, url, name, budget, index)

    @contextmanager
    def _server(self, server: str, budget: int) -> Iterator[str]:
        """Start one, warm it up, and see what it uses when idle."""
        before = children()
        started = time.monotonic()
        with self._starting(server, budget) as url:
            seconds = time.monotonic() - started
            asyncio.run(_warm_up(url, self._prompts, self._dialect(server)))
            [process] = children() - before
            idle = cores_used_by(process, IDLE_SECONDS)
            self._book.add_start(server, budget, seconds, idle)
            print(f"{server}, budget {budget}: up after {seconds:.0f} s; idle it uses {idle:.3f} cores", flush=True)
            yield url

    def _starting(self, server: str, budget: int) -> AbstractContextManager[str]:
        if server != OURS:
            return running_peer(self._peer, self._model, budget)
        settings = [
            f"model.path={self._model}",
            "model.dtype=bfloat16",
            f"scheduler.max_num_batched_tokens={budget}",
            "cache.memory_gb=1",
            *self._args.settings,
        ]
        return running_service(settings)

    def _dialect(self, server: str) -> Dialect:
        return "openai" if server == OURS else self._peer.dialect

    def _measure(self, server: str, url: str, name: str, budget: int, index: int) -> None:
        tries: list[Summary] = []
        while len(tries) < ATTEMPTS and (not tries or is_disturbed(tries[-1])):
            seed = self._book.seed + 1000 * index + len(tries)  # other prompts: the last try's are in its cache
            tries.append(asyncio.run(_run(url, name, self._prompts, seed, self._dialect(server))))
        summary = min(tries, key=lambda run: float(run["other_cores"]))
        self._book.add_run(name, budget, index, server, summary)
        others = f"; others used {summary['other_cores']:.2f} cores" if is_disturbed(summary) else ""
        print(f"round {index + 1}, {name} at {budget}, {server}: {summary['wall_s']:.1f} s{others}", flush=True)


async def _warm_up(url: str, prompts: PromptSource, dialect: Dialect) -> None:
    async with new_session() as session:
        model = await first_model(session, url)
    await run_once(url, model, warm_up(prompts, time.time_ns()), dialect=dialect)


async def _run(url: str, name: str, prompts: PromptSource, seed: int, dialect: Dialect) -> Summary:
    """One run, and how many cores others used. Raises ValueError when a request failed."""
    async with new_session() as session:
        model = await first_model(session, url)
    watch = CpuWatch()
    summary, _ = await run_once(url, model, build(name, prompts, seed), dialect=dialect)
    summary["other_cores"] = round(watch.other_cores(), 3)
    if summary["errors"]:
        raise ValueError(f"{summary['errors']} requests failed, one of them so: {summary['error_sample']}")
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
    parser.add_argument("--budget-otherwise", type=int, help="for the other workloads; default: the peer's best")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs of each workload at each budget")
    parser.add_argument("--alone", action="store_true", help="one server at a time, each started in every round")
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
    signal.signal(signal.SIGTERM, _leave)  # so that the servers are stopped
    peer = PEERS[args.peer]()
    model = open_store(print).resolve(args.model).directory
    same: dict[str, Any] = {"peer": peer.title, "model": str(model), "settings": args.settings, "alone": args.alone}
    comparison = Comparison(args, peer, model, RunBook(args.out, same))
    comparison.run()
    text, good = report(comparison.pairs(), peer.title, with_targets=args.peer == "vllm")
    print(f"\n{text}")
    return int(not good)


def _leave(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())

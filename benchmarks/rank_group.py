"""The ranks of a tensor-parallel group as plain processes, and a record of when each came to a collective and left."""

import multiprocessing
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from workers.collectives import Collectives, CollectiveStats

SECONDS = 300.0
"""Deadline of everything that ranks do here."""

Times = list[tuple[int, int]]
"""(came, left) of each call in order, nanoseconds of the clock that all processes of a machine share."""


class Recorded:
    """Collectives that write down their times."""

    def __init__(self, inner: Collectives) -> None:
        self.name = inner.name
        self.times: Times = []
        self._inner = inner

    def all_reduce(self, tensor: torch.Tensor) -> None:
        came = time.monotonic_ns()
        self._inner.all_reduce(tensor)
        self.times.append((came, time.monotonic_ns()))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        came = time.monotonic_ns()
        out = self._inner.gather(tensor)
        self.times.append((came, time.monotonic_ns()))
        return out

    def stats(self) -> CollectiveStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """What the same calls took on all ranks, without the wait for the last rank to come."""

    last: list[float]
    """Each call on the rank that came last: it waits for nobody, neither for a rank nor for a core."""
    every: list[float]
    """Each call on each rank, from the moment the last one came. With more ranks than cores this holds
    the wait for a core, which another rank computes on meanwhile."""


def call_seconds(ranks: list[Times]) -> CallSeconds:
    """From the times of every rank."""
    last, every = [], []
    for call in zip(*ranks, strict=True):
        last_came, last_left = max(call)
        last.append((last_left - last_came) / 1e9)
        every += [(left - last_came) / 1e9 for _, left in call]
    return CallSeconds(last, every)


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """function(rank, size, rendezvous, *args) in a process a rank; what they return, in rank order.

    Raises RuntimeError when a rank gives nothing in time; it prints its own traceback.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    processes, pipes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, function, rank, size, rendezvous, *args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return [_receive(pipe, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(pipe: Connection, function: Callable[..., Any], *args: Any) -> None:
    pipe.send(function(*args))


def _receive(pipe: Connection, rank: int) -> Any:
    try:
        if pipe.poll(SECONDS):
            return pipe.recv()
    except EOFError:
        pass
    raise RuntimeError(f"rank {rank} gave no result")

"""What ranks of the shared-memory tests do, and the processes they are; ranks need no pytest."""

import ctypes
import hashlib
import logging
import multiprocessing
import os
import random
import resource
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tp_ranks import free_rendezvous

from workers import shared_memory
from workers.kernels.build import BuildError
from workers.shared_memory import SharedMemoryCollectives, SharedMemoryUnavailable
from workers.tensor_parallel import TensorParallel

SECONDS = 120.0
CPU = torch.device("cpu")
SUMMED = (torch.float32, torch.bfloat16)
GATHERED = (*SUMMED, torch.int64, torch.float64, torch.bool)
SLOT_BYTES = 4096


class Ranks:
    """function(rank, size, rendezvous, say, *args) in a process a rank; `say` sends a value to the test."""

    def __init__(self, size: int, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        rendezvous = free_rendezvous()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_main, args=(theirs, function, rank, size, rendezvous, *args), daemon=True, name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)

    def hear(self, rank: int) -> Any:
        """The next value that a rank says; AssertionError with its traceback when it fails, or is late."""
        assert self._pipes[rank].poll(SECONDS), f"nothing from rank {rank} within {SECONDS} s"
        failed, value = self._pipes[rank].recv()
        assert not failed, f"rank {rank}:\n{value}"
        return value


def _main(pipe: Connection, function: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    rank, size, rendezvous, *rest = args
    try:
        function(rank, size, rendezvous, lambda value: pipe.send((False, value)), *rest)
    except Exception:
        pipe.send((True, traceback.format_exc()))


def tensor_of(seed: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Random values of all magnitudes; some infinite."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "little"))
    if not dtype.is_floating_point:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-4, 4, (count,), generator=generator)
    values[torch.rand(count, generator=generator) < 0.01] = torch.inf
    return values.to(dtype)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """In float32, from rank 0 on, rounded at the end."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def random_calls(rank: int, size: int, rendezvous: str, say: Callable[[Any], None], seed: int, num_calls: int) -> None:
    """Calls of random kinds and sizes, after random delays, each against the reference; says a hash of all results."""
    tp = TensorParallel.connect(rank, size, rendezvous, CPU, SECONDS)
    collectives = SharedMemoryCollectives(rank, size, SECONDS, slot_bytes=SLOT_BYTES)
    say(os.getpid())
    together = random.Random(seed)  # the same on every rank
    alone = random.Random(f"{seed} {rank}")
    results = hashlib.sha256()
    for call in range(num_calls):
        gathers = together.random() < 0.3
        dtype = together.choice(GATHERED if gathers else SUMMED)
        count = together.choice((0, 1, 2, together.randrange(200), together.randrange(6000)))
        parts = [tensor_of(f"{seed} {call} {r}", dtype, count) for r in range(size)]
        mine = parts[rank].clone()
        time.sleep(alone.choice((0, 0, 0, 1e-4, 1e-3, alone.choice((3e-3, 0.08)))))
        if gathers:
            result, expected = collectives.gather(mine), torch.stack(parts)
        else:
            collectives.all_reduce(mine)
            result, expected = mine, sum_in_order(parts)
        same = torch.equal(result.view(torch.uint8), expected.view(torch.uint8))
        assert same, f"call {call}: {'gather' if gathers else 'sum'} of {count} {dtype}"
        results.update(result.view(torch.uint8).numpy().tobytes())
    assert collectives.stats().calls == num_calls
    collectives.close()
    tp.close()
    say(results.hexdigest())


def sums_until_it_fails(
    rank: int, size: int, rendezvous: str, say: Callable[[Any], None], timeout_seconds: float
) -> None:
    """Says that it sums, and then what ended it."""
    tp = TensorParallel.connect(rank, size, rendezvous, CPU, SECONDS)
    collectives = SharedMemoryCollectives(rank, size, timeout_seconds)
    tensor = torch.ones(100)
    collectives.all_reduce(tensor)
    say("sums")
    try:
        while True:
            collectives.all_reduce(tensor.fill_(1.0))
            time.sleep(1e-3)
    except RuntimeError as error:
        say(str(error))
    try:
        collectives.gather(tensor)
    except RuntimeError as error:
        say(str(error))
    say(tp.rank)


def one_after_the_other(rank: int, size: int, rendezvous: str, say: Callable[[Any], None], num_calls: int) -> None:
    """Of two ranks the first always comes first; says its stats."""
    tp = TensorParallel.connect(rank, size, rendezvous, CPU, SECONDS)
    collectives = SharedMemoryCollectives(rank, size, SECONDS)
    arrivals = ctypes.c_uint64.from_address(collectives._state.segment)  # the segment begins with them
    for call in range(num_calls):
        deadline = time.monotonic() + SECONDS
        while rank and arrivals.value <= size * call:
            assert time.monotonic() < deadline, f"rank 0 did not come to call {call}"
            time.sleep(1e-4)
        collectives.all_reduce(torch.zeros(1))
    say(collectives.stats())
    collectives.close()
    tp.close()


def mappings(rank: int, size: int, rendezvous: str, say: Callable[[Any], None]) -> None:
    """Says the names under which memory of our own is mapped."""
    tp = TensorParallel.connect(rank, size, rendezvous, CPU, SECONDS)
    tp.all_reduce(torch.zeros(1))
    lines = Path("/proc/self/maps").read_text().splitlines()
    say([line.split(maxsplit=5)[5] for line in lines if " /memfd:" in line or " /dev/shm/" in line])
    tp.close()


def _no_compiler() -> None:
    def fail() -> None:
        raise BuildError("no C++ compiler")

    shared_memory.library = fail


def _other_node() -> None:
    shared_memory._BOOT_ID = Path("/proc/version")


def _no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


HINDRANCES = {"no compiler": _no_compiler, "other node": _other_node, "no room": _no_room}


def hindered(
    rank: int, size: int, rendezvous: str, say: Callable[[Any], None], hindrance: str, hindered_rank: int
) -> None:
    """One rank cannot share memory; says why, what a sum gives, and what the log says."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("workers.tensor_parallel").addHandler(handler)
    if rank == hindered_rank:
        HINDRANCES[hindrance]()
    tp = TensorParallel.connect(rank, size, rendezvous, CPU, SECONDS)
    try:
        SharedMemoryCollectives(rank, size, SECONDS)
    except SharedMemoryUnavailable as error:
        say(str(error))
    say(tp.all_reduce(torch.tensor([rank + 1.0])).item())
    say(messages)
    tp.close()

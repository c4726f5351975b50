"""Runs a function on every rank of a Gloo group of spawned processes, with a deadline on everything."""

import multiprocessing
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from workers.tensor_parallel import TensorParallel

_DEADLINE_SECONDS = 120.0


def free_rendezvous() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """function(tp, *args) on each rank; its results (plain picklable values, no tensors) in rank order.

    `function` is a module's top-level name. Raises AssertionError with a rank's traceback, or naming those late.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    rendezvous = free_rendezvous()
    ranks = [
        context.Process(target=_rank, args=(rank, size, rendezvous, answers, function, args), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + _DEADLINE_SECONDS
    try:
        while len(results) < size:
            try:
                rank, ok, value = answers.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"ranks {set(range(size)) - results.keys()} gave no result in time") from None
            assert ok, f"rank {rank} failed:\n{value}"
            results[rank] = value
        for process in ranks:
            process.join(timeout=max(deadline - time.monotonic(), 1.0))
            assert process.exitcode == 0, f"a rank ended with exit code {process.exitcode}"
    finally:
        for process in ranks:
            process.kill()
            process.join(timeout=10)
    return [results[rank] for rank in range(size)]


def _rank(
    rank: int, size: int, rendezvous: str, answers: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        tp = TensorParallel.connect(rank, size, rendezvous, torch.device("cpu"), timeout_seconds=60)
        result = function(tp, *args)
        tp.close()
        answers.put((rank, True, result))
    except Exception:
        answers.put((rank, False, traceback.format_exc()))

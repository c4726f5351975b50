"""What this machine allows a kernel at most: how fast it reads memory and multiplies, measured beside the kernel."""

import mmap
import time
from collections.abc import Callable

import torch

READ_BYTES = 128 << 20
MATRIX = 2048
QUIET_SECONDS = 0.02
"""After torch's last loop its threads spin for a while, and would be in the way of the next contender's."""


def reading() -> Callable[[], None]:
    """Reads READ_BYTES once a call."""
    pages = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.float32).fill_(1)

    def read() -> None:
        memory.sum()

    return read


def multiplying(dtype: torch.dtype) -> Callable[[], None]:
    """torch's product of two MATRIX x MATRIX matrices a call."""
    a = torch.randn(MATRIX, MATRIX, dtype=dtype)

    def multiply() -> None:
        torch.mm(a, a)

    return multiply


def floor_seconds(num_bytes: int, flops: int, read_seconds: float, multiply_seconds: float) -> float:
    """The larger of the time to read so much and the time of so many operations, from a call of each of the above."""
    return max(num_bytes * read_seconds / READ_BYTES, flops * multiply_seconds / (2 * MATRIX**3))


def seconds_of(run: Callable[[], None]) -> float:
    """Of one call, after a pause."""
    time.sleep(QUIET_SECONDS)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started

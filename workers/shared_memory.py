"""Collectives of ranks on one node, through memory that all of them map: microseconds, where sockets take hundreds.

`workers/kernels/source/all_reduce.cpp` says how. The memory has no name, so that nothing is left of it however
the ranks end; the others find it through rank 0's descriptor.
"""

import ctypes
import mmap
import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from workers.collectives import CollectiveStats
from workers.kernels.build import BuildError
from workers.kernels.library import POINTER, SIZE, SUFFIXES, library

MAX_RANKS = 64
SLOT_BYTES = 1 << 20
"""Of a piece of a call; a rank has two."""
YIELD_SECONDS = 1e-3
"""A rank that waits for longer sleeps. Until then it offers its core to others over and over, and is back at once."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_SPACE = Path("/proc/self/ns/pid")


class SharedMemoryUnavailable(Exception):
    """These ranks cannot share memory; the message says why, the same on all of them."""


class _Rank(ctypes.Structure):
    """`Rank` in all_reduce.cpp."""

    _fields_ = (
        ("segment", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("yield_ns", ctypes.c_int64),
        ("deadline_ns", ctypes.c_int64),
        ("waiting_ns", ctypes.c_int64),
        ("working_ns", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("pieces", ctypes.c_uint64),
        ("missing", ctypes.c_uint64),
        ("processes", ctypes.c_int32 * MAX_RANKS),
    )


@dataclass(frozen=True, slots=True)
class _Introduction:
    """What a rank tells the others before they share anything."""

    space: str
    """Ranks with the same one see the same processes."""
    process_id: int
    segment: int
    """Rank 0's descriptor of the memory."""
    problem: str
    """Why this rank cannot take part, or nothing."""


class SharedMemoryCollectives:
    """float32 and bfloat16 are summed here, in float32 and in rank order; sums of other dtypes are Gloo's.

    A rank that is `timeout_seconds` late, or has ended, is named by the RuntimeError that every other rank
    raises. After that the group is of no use.
    """

    name = "shared memory"

    def __init__(self, rank: int, size: int, timeout_seconds: float, slot_bytes: int = SLOT_BYTES) -> None:
        """All ranks of the default process group call it. Raises SharedMemoryUnavailable, on all of them or none."""
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._state = _Rank(rank=rank, size=size, slot_bytes=slot_bytes, processes=(-1,) * MAX_RANKS)
        self._state.deadline_ns = int(timeout_seconds * 1e9)
        self._state.yield_ns = int(YIELD_SECONDS * 1e9)
        try:
            self._share()
        except SharedMemoryUnavailable:
            self.close()
            raise
        self._own = ctypes.addressof(self._state)
        self._sums = {
            dtype: library().function("all_reduce" + suffix, POINTER, POINTER, SIZE, releases_lock=True)
            for dtype, suffix in SUFFIXES.items()
        }
        self._gather = library().function("all_gather", POINTER, POINTER, POINTER, SIZE, releases_lock=True)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """As `Collectives.all_reduce`; raises ValueError for a tensor that is not contiguous."""
        add = self._sums.get(tensor.dtype)
        if add is None:
            dist.all_reduce(tensor)
        elif not tensor.is_contiguous():
            raise ValueError("only a contiguous tensor is summed in place")
        elif add(self._own, tensor.data_ptr(), tensor.numel()):
            raise self._missing_ranks()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Collectives.gather`, for every dtype."""
        tensor = tensor.contiguous()
        out = tensor.new_empty((self._size, *tensor.shape))
        if self._gather(self._own, tensor.data_ptr(), out.data_ptr(), tensor.nbytes):
            raise self._missing_ranks()
        return out

    def stats(self) -> CollectiveStats:
        """Without Gloo's."""
        state = self._state
        return CollectiveStats(state.calls, state.waiting_ns / 1e9, state.working_ns / 1e9)

    def close(self) -> None:
        """The memory goes with this object."""
        for rank, descriptor in enumerate(self._state.processes):
            if descriptor >= 0:
                self._state.processes[rank] = -1
                os.close(descriptor)

    def _share(self) -> None:
        """Rank 0 makes the segment, everybody maps it, and then it loses its only descriptor."""
        rank, size = self._state.rank, self._size
        segment, problem = -1, ""
        try:
            if size > MAX_RANKS:
                raise OSError(f"no more than {MAX_RANKS} can")
            num_bytes = library().function("segment_header_bytes")() + 2 * size * self._state.slot_bytes
            if rank == 0:
                segment = _descriptor(library().function("new_segment", SIZE)(num_bytes))
            space = f"{_BOOT_ID.read_text()} {os.readlink(_PROCESS_SPACE)}"
        except (BuildError, OSError) as error:
            problem, space = str(error), ""
        try:
            ranks = _exchange(_Introduction(space, os.getpid(), segment, problem), size)
            _refuse([one.problem for one in ranks])
            if any(one.space != ranks[0].space for one in ranks):
                raise SharedMemoryUnavailable("they are not in one container of one node")
            try:
                self._map(ranks[0], num_bytes)
                self._watch(ranks)
            except OSError as error:
                problem = str(error)
            _refuse(_exchange(problem, size))
        finally:
            if segment >= 0:
                os.close(segment)

    def _map(self, first: _Introduction, num_bytes: int) -> None:
        descriptor = os.open(f"/proc/{first.process_id}/fd/{first.segment}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
        self._state.segment = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def _watch(self, ranks: list[_Introduction]) -> None:
        watch = library().function("watch_process", ctypes.c_int)
        for rank, one in enumerate(ranks):
            if rank != self._state.rank:
                self._state.processes[rank] = _descriptor(watch(one.process_id))

    def _missing_ranks(self) -> RuntimeError:
        causes = [
            f"rank {rank} {'has ended' if self._has_ended(rank) else f'did not come within {self._timeout_seconds} s'}"
            for rank in range(self._size)
            if self._state.missing >> rank & 1
        ]
        return RuntimeError(f"a collective of rank {self._state.rank} failed: {', '.join(causes)}")

    def _has_ended(self, rank: int) -> bool:
        if rank == self._state.rank:  # it was stopped, and the others have given it up
            return False
        poll = select.poll()
        poll.register(self._state.processes[rank], select.POLLIN)
        return bool(poll.poll(0))


_Shared = TypeVar("_Shared")


def _exchange(value: _Shared, size: int) -> list[_Shared]:
    """Every rank's value, in rank order."""
    values = [value] * size
    dist.all_gather_object(values, value)
    return values


def _refuse(problems: list[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise SharedMemoryUnavailable(f"rank {rank}: {problem}")


def _descriptor(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result

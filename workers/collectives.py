"""What a group of ranks does together, over torch's process group: NCCL's or Gloo's."""

import time
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class CollectiveStats:
    """Totals of one rank since it joined its group."""

    calls: int = 0
    waiting_seconds: float = 0.0
    """From this rank's entry into a call to the last rank's."""
    working_seconds: float = 0.0
    """What calls took from the last rank's entry on. Where the two cannot be told apart, all of it."""

    @property
    def seconds(self) -> float:
        return self.waiting_seconds + self.working_seconds


class Collectives(Protocol):
    """Every rank makes the same calls, with tensors of the same shape; RuntimeError when one does not come in time."""

    @property
    def name(self) -> str:
        """For logs."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place; the same bits on every rank. The tensor is contiguous."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, in rank order: [size, *shape], a new tensor."""

    def stats(self) -> CollectiveStats:
        """What they have taken so far."""

    def close(self) -> None:
        """Free what they hold; no call may follow."""


class ProcessGroupCollectives:
    """Those of torch's default process group, which must be there."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.name = str(dist.get_backend())
        self._size = size
        self._on_host = device.type == "cpu"
        self._calls = 0
        self._seconds = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        started = time.perf_counter()
        dist.all_reduce(tensor)
        self._count(started)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        tensor = tensor.contiguous()
        out = tensor.new_empty((self._size, *tensor.shape))
        dist.all_gather(list(out.unbind(0)), tensor)
        self._count(started)
        return out

    def stats(self) -> CollectiveStats:
        """No seconds on a GPU, whose collectives the host does not wait for."""
        return CollectiveStats(self._calls, 0.0, self._seconds)

    def close(self) -> None:
        """The process group is not theirs."""

    def _count(self, started: float) -> None:
        self._calls += 1
        if self._on_host:
            self._seconds += time.perf_counter() - started

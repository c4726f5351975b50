"""The ranks of one group and the few collectives they need.

It knows nothing of models; `workers.partition` says who holds what.
"""

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from workers.collectives import Collectives, CollectiveStats, ProcessGroupCollectives
from workers.interface import interface_of, local_address
from workers.kernels.argmax import argmax_rows
from workers.shared_memory import SharedMemoryCollectives, SharedMemoryUnavailable

logger = logging.getLogger(__name__)


class TensorParallel:
    """One rank's view of its group. A group of one needs no process group and its collectives cost nothing.

    A collective that a rank does not join within the timeout raises on the others.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        """For one rank. Larger groups are made by `connect`; without collectives they are only a rank and a size."""
        self.rank = rank
        self.size = size
        self._device = device or torch.device("cpu")
        self._collectives = collectives

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        rendezvous: str,
        device: torch.device,
        timeout_seconds: float,
        listener: socket.socket | None = None,
    ) -> "TensorParallel":
        """Meet the other ranks at `rendezvous` ("tcp://host:port", on rank 0's node) over NCCL or Gloo.

        `listener`: rank 0's socket, if it listens at the rendezvous already; it is taken over. Whoever comes before
        rank 0 dials again and again. Ranks on the CPUs of one node then share memory where they can. The timeout
        holds for the meeting and for every later collective. Raises RuntimeError (torch's DistError and
        DistNetworkError are) naming the rendezvous when the ranks do not come together.
        """
        if size == 1:
            if listener is not None:
                listener.close()
            return cls(device=device)
        host, port = _host_and_port(rendezvous)
        _pin_interface(host, port)
        timeout = timedelta(seconds=timeout_seconds)
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            store = TCPStore(
                host, port, size, rank == 0, timeout, master_listen_fd=None if listener is None else listener.detach()
            )
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
            collectives = _collectives(rank, size, device, timeout_seconds)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"rank {rank} of {size} could not join the group at {rendezvous}: {error}") from error
        return cls(rank, size, device, collectives)

    def close(self) -> None:
        """Leave the group."""
        if self._collectives is not None:
            self._collectives.close()
            dist.destroy_process_group()

    @property
    def transport(self) -> str:
        """What the collectives go over: "shared memory", "gloo" or "nccl"; "none" for a single rank."""
        return "none" if self._collectives is None else self._collectives.name

    def stats(self) -> CollectiveStats:
        """What this rank's collectives have taken."""
        return CollectiveStats() if self._collectives is None else self._collectives.stats()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; the same bits on every rank."""
        if self.size > 1:
            self._group().all_reduce(tensor)
        return tensor

    def gather_vocab(self, shard: torch.Tensor, shard_sizes: Sequence[int]) -> torch.Tensor:
        """Rank r's [rows, shard_sizes[r]] side by side -> [rows, sum(shard_sizes)], on every rank."""
        if self.size == 1:
            return shard
        widest = max(shard_sizes)
        padded = torch.nn.functional.pad(shard, (0, widest - shard.shape[1]))
        gathered = self._group().gather(padded)  # [size, rows, widest]
        return torch.cat([part[:, :width] for part, width in zip(gathered, shard_sizes, strict=True)], dim=1)

    def argmax(self, shard: torch.Tensor, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest logit [rows], its id [rows] int64) over all shards; this one starts at `first_id`.

        Ties go to the lowest id. Gathers two numbers a row. A NaN anywhere in a row makes its largest NaN.
        """
        largest, ids = argmax_rows(shard)
        ids += first_id
        if self.size == 1:
            return largest, ids
        # float64 holds every id and every logit exactly; ranks are in id order, so the first maximum wins ties.
        every = self._group().gather(torch.stack((largest.double(), ids.double())))  # [size, 2, rows]
        winner = every[:, 0].argmax(dim=0, keepdim=True)
        best, best_ids = every.gather(0, winner[:, None].expand(1, 2, -1))[0]
        return best.to(shard.dtype), best_ids.long()

    def total(self, value: int) -> int:
        """The sum of the ranks' values, on every rank."""
        return int(self.all_reduce(torch.tensor(value, dtype=torch.int64, device=self._device)).item())

    def _group(self) -> Collectives:
        assert self._collectives is not None, "`connect` makes groups that are larger than one"
        return self._collectives


def _collectives(rank: int, size: int, device: torch.device, timeout_seconds: float) -> Collectives:
    """Those of the default process group, or faster ones. Every rank of the group calls it, and all get the same."""
    chosen: Collectives = ProcessGroupCollectives(size, device)
    cause = ""
    if device.type == "cpu":
        try:
            chosen = SharedMemoryCollectives(rank, size, timeout_seconds)
        except SharedMemoryUnavailable as error:
            cause = f", which is slow: the ranks cannot share memory: {error}"
    if rank == 0:
        logger.log(logging.WARNING if cause else logging.INFO, "collectives over %s%s", chosen.name, cause)
    return chosen


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    url = urlsplit(rendezvous)
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ValueError(f"rendezvous is {rendezvous!r}; it must read tcp://host:port")
    return url.hostname, url.port


def _pin_interface(host: str, port: int) -> None:
    """Make Gloo and NCCL use the interface that holds this node's address.

    Left alone, Gloo binds whatever the host name resolves to, often 127.0.1.1, where no other node finds it.
    A choice the user made stands.
    """
    address = local_address(host, port)
    interface = interface_of(address)
    if interface is None:
        logger.warning("no interface is known to hold %s; Gloo and NCCL choose one themselves", address)
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)

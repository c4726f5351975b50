"""The ranks of an engine placed, brought together and made to sum, as they will be; without a model."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.engine.rank_actors import by_node
from cluster.engine.settings import EngineSettings
from cluster.errors import EngineError, root_cause
from workers.actor import listen_for_ranks
from workers.logs import log_to_stderr

PLACE_SECONDS = 60.0
MEET_SECONDS = 60.0
"""Of the rendezvous, and of each sum."""
SUM_SECONDS = 60.0
"""Of all sums together."""
SIZES = (4 << 10, 256 << 10, 4 << 20)
"""Bytes that are summed: about one row's hidden state, a few hundred rows', a large prefill's."""
NUM_CALLS = 30
NUM_WARM = 5


@dataclass(frozen=True, slots=True)
class SumTimes:
    """What one rank saw."""

    transport: str
    medians: tuple[float, ...]
    """Seconds, by size."""

    def __str__(self) -> str:
        times = (f"{_size(size)} in {1e3 * median:.2g} ms" for size, median in zip(SIZES, self.medians, strict=True))
        return f"over {self.transport}: {', '.join(times)} (p50)"


class RankProbe:
    """A rank without a model; methods are called in the order they stand here."""

    def __init__(self, device: str) -> None:
        log_to_stderr()
        self._device = device
        self._listener: Any = None

    def node_id(self) -> str:
        """Ray's name of the node that this runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def rendezvous(self) -> str:
        """Where the ranks meet; only rank 0 is asked."""
        self._listener, rendezvous = listen_for_ranks(ray.util.get_node_ip_address())
        return rendezvous

    def sums(self, rank: int, size: int, rendezvous: str) -> SumTimes:
        """Join, and sum tensors of SIZES. Raises RuntimeError when ranks do not come or a sum is wrong."""
        import torch

        from workers.device import select_device
        from workers.tensor_parallel import TensorParallel

        device = select_device(self._device, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        tp = TensorParallel.connect(rank, size, rendezvous, device, MEET_SECONDS, self._listener)
        medians = []
        for num_bytes in SIZES:
            seconds = []
            for _ in range(NUM_WARM + NUM_CALLS):
                tensor = torch.full((num_bytes // 4,), float(rank + 1), device=device)
                started = time.perf_counter()
                total = float(tp.all_reduce(tensor)[-1])  # reading it waits for a GPU
                seconds.append(time.perf_counter() - started)
                if total != size * (size + 1) / 2:
                    raise RuntimeError(f"rank {rank} got {total:g} as the sum of 1 to {size}")
            medians.append(statistics.median(seconds[NUM_WARM:]))
        transport = tp.transport
        tp.close()
        return SumTimes(transport, tuple(medians))


def try_sums(engine: EngineSettings) -> tuple[int, SumTimes]:
    """The number of nodes that an engine's ranks were placed on, and the times of rank 0.

    Raises EngineError naming what did not happen in time or failed. Nothing is left of it.
    """
    num_ranks = engine.worker.tensor_parallel_size
    bundles = engine.placement_bundles()
    group = placement_group(bundles, engine.strategy)
    try:
        if not group.wait(PLACE_SECONDS):
            raise EngineError(
                f"Ray did not place the bundles {bundles} by {engine.strategy} within {PLACE_SECONDS:g} s"
            )
        probes = [_place(engine, group, 1 + index) for index in range(num_ranks)]
        nodes = _get("start", [probe.node_id.remote() for probe in probes], PLACE_SECONDS)
        probes = [probes[index] for index in by_node(nodes)]
        (rendezvous,) = _get("listen", [probes[0].rendezvous.remote()], PLACE_SECONDS)
        sums = [probe.sums.remote(rank, num_ranks, rendezvous) for rank, probe in enumerate(probes)]
        first, *_ = _get("sum", sums, MEET_SECONDS + SUM_SECONDS)
        return len(set(nodes)), first
    finally:
        remove_placement_group(group)  # which ends the ranks in it


def _place(engine: EngineSettings, group: PlacementGroup, index: int) -> Any:
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    options = ray.remote(RankProbe).options(
        num_cpus=engine.rank_cpus, num_gpus=engine.rank_gpus, scheduling_strategy=place
    )
    return options.remote(engine.worker.device)


def _get(what: str, calls: list[Any], seconds: float) -> list[Any]:
    try:
        return list(ray.get(calls, timeout=seconds))
    except GetTimeoutError:
        raise EngineError(f"not every rank did {what} within {seconds:g} s") from None
    except RayError as error:
        raise EngineError(f"a rank did not {what}: {root_cause(error)}") from error


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"

"""Where ranks run: worker actors in a placement group, and spare ones that wait to take over."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.awake import awake_timeout
from cluster.engine.executor import NoRoom
from cluster.engine.settings import EngineSettings
from cluster.errors import ExecutorError
from workers.actor import WorkerActor

T = TypeVar("T")


def by_node(nodes: Sequence[str]) -> list[int]:
    """The order in which actors become ranks, given each one's node: those of a node follow each other, so that
    neighbours in the group are neighbours on the network; else as they are.
    """
    return sorted(range(len(nodes)), key=lambda index: nodes.index(nodes[index]))


_WORKER_ACTOR = ray.remote(WorkerActor)
"""Made once: each one exports the class anew."""


async def off_loop(seconds: float, call: Callable[..., T], *args: Any) -> T:
    """A call of Ray that may block, on another thread. Raises ExecutorError when it takes longer than `seconds`."""
    try:
        async with awake_timeout(seconds):
            return await asyncio.to_thread(call, *args)
    except TimeoutError:
        raise ExecutorError(f"Ray did not answer within {seconds:g} s", "startup") from None


class RankActors:
    """Makes one actor a rank, in the placement group of the actor that builds this, else in one of its own.

    Build it on an actor's main thread, where the current placement group is known. In a group of its
    builder, bundle 0 is the builder's and each other one a rank's.

    A spare is a process beside the rank's that has imported what a rank needs: starting one takes longer than
    all the rest of a recovery. It costs memory for its modules and, while it waits, no time. A rank with a GPU
    has none, for only the holder of the GPU in Ray's books sees it.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._num_ranks = settings.worker.tensor_parallel_size
        self._outer_group: PlacementGroup | None = ray.util.get_current_placement_group()
        self._own_group: PlacementGroup | None = None
        self._spares: list[Any] = []

    async def take(self) -> list[Any]:
        """One actor a rank: the spares, or else new ones. Raises ExecutorError when there is no room for them."""
        spares, self._spares = self._spares, []
        if spares:
            return spares
        return await self._make(self._settings.rank_cpus, self._settings.rank_gpus)

    async def make_spares(self) -> None:
        """Start processes for the ranks after these, and wait for nothing. Call it once the ranks serve."""
        if not self._settings.warm_spares or self._settings.rank_gpus:
            return
        # The rank holds the bundle's CPUs, and the spare takes nothing until it is the rank itself.
        self._spares = await self._make(0, 0)
        for spare in self._spares:
            spare.warm_up.remote()

    def give_up_spares(self) -> list[Any]:
        """The spares, to be killed."""
        spares, self._spares = self._spares, []
        return spares

    async def remove_group(self) -> None:
        """Give back what was reserved here; a group of the builder is not touched."""
        group, self._own_group = self._own_group, None
        if group is not None:
            await off_loop(self._settings.deadlines.shutdown, remove_placement_group, group)

    async def _make(self, num_cpus: float, num_gpus: float) -> list[Any]:
        """One actor a rank, each of which takes so much."""
        group, first_bundle = await self._group()

        def make(index: int) -> Any:
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=first_bundle + index)
            options = _WORKER_ACTOR.options(
                num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=place, max_restarts=0
            )
            return options.remote(self._settings.worker)

        return await off_loop(self._settings.deadlines.place, lambda: [make(index) for index in range(self._num_ranks)])

    async def _group(self) -> tuple[PlacementGroup, int]:
        """The group, and the bundle of its first rank."""
        if self._own_group is not None:
            return self._own_group, 0
        if self._outer_group is None:
            return await self._create_group(), 0
        if self._outer_group.bundle_count < 1 + self._num_ranks:
            raise ExecutorError(
                f"the placement group has {self._outer_group.bundle_count} bundles; the engine and"
                f" {self._num_ranks} ranks need {1 + self._num_ranks}"
            )
        return self._outer_group, 1

    async def _create_group(self) -> PlacementGroup:
        bundles = [self._settings.rank_bundle() for _ in range(self._num_ranks)]
        seconds = self._settings.deadlines.place
        group: PlacementGroup = await off_loop(seconds, placement_group, bundles, self._settings.strategy)
        self._own_group = group
        ready = await off_loop(seconds, group.ready)
        try:
            await asyncio.wait_for(ready, seconds)
        except TimeoutError:
            raise NoRoom(
                f"no room in the cluster for {self._num_ranks} ranks of {bundles[0]} within {seconds:g} s"
            ) from None
        return group

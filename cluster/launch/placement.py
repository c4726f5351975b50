"""What the application asks of a cluster, and why a cluster cannot hold it, in words. Does not know Ray's API."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.engine.settings import EngineSettings, Placement
from cluster.settings.tree import GIB, Settings

FRONTEND_CPUS = 1.0
OBJECT_STORE_BODIES = 4
"""Request bodies of the largest size that a node's object store must hold: long prompts reach engines through it."""

Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU, memory (bytes), object_store_memory (bytes)."""
_BYTES = {"memory": "memory", "object_store_memory": "object store"}
_TOLD = ("GPU", "CPU", "memory")
"""What an engine may take, in the order in which it is told."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node and what it has."""

    name: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class Demand:
    """What the application needs at its smallest number of engines."""

    placement: Placement
    engine: Resources
    """Of an engine's own process."""
    rank: Resources
    """Of each rank. Memory is what its weights and keys and values take, and no more is known before it loads."""
    num_ranks: int
    """Of an engine."""
    num_engines: int
    num_frontends: int
    object_store_bytes: float
    """On a node that front ends or engines are on."""

    @property
    def whole(self) -> dict[str, float]:
        """An engine with all its ranks."""
        return {name: self.engine.get(name, 0.0) + self.num_ranks * self.rank.get(name, 0.0) for name in _names(self)}


def cpus_needed(settings: Settings, engine: EngineSettings) -> int:
    """Ray CPUs of the whole application at its largest. A Ray of our own has as many, whatever the machine has:
    they are a promise between Ray and the application, and Ray starts as many worker processes ahead.
    """
    one_engine = sum(bundle["CPU"] for bundle in engine.placement_bundles())
    return round(settings.server.num_frontends * FRONTEND_CPUS + settings.most_replicas * one_engine)


def demand_of(settings: Settings, engine: EngineSettings) -> Demand:
    """From settings, and from the sizes of the weights if they are in a directory here."""
    worker = engine.worker
    rank = engine.rank_bundle()
    if not engine.rank_gpus:
        weights = sum(file.stat().st_size for file in Path(worker.model_path).glob("*.safetensors"))
        cache = 0 if worker.num_blocks else worker.kv_memory_bytes
        rank["memory"] = (weights + cache) / worker.tensor_parallel_size
    return Demand(
        engine.placement,
        {"CPU": engine.engine_cpus},
        rank,
        worker.tensor_parallel_size,
        settings.least_replicas,
        settings.server.num_frontends,
        OBJECT_STORE_BODIES * settings.server.max_body_mb * (1 << 20),
    )


def placement_problems(demand: Demand, nodes: Iterable[Node]) -> list[str]:
    """Why these nodes cannot hold the application, a reason a string; none if they can.

    A node's memory counts with its object store, which takes memory only as it fills.
    """
    nodes = [_with_all_memory(node) for node in nodes]
    if not nodes:
        return ["the cluster has no living node"]
    problems = _too_little_in_all(demand, nodes)
    if not problems:
        num_engines, left = _fill(demand, nodes)
        if num_engines == 0:
            problems = [_no_engine_fits(demand, nodes)]
        elif num_engines < demand.num_engines:
            problems = [
                f"there is room for {num_engines} of {demand.num_engines} engines"
                " (parallel.num_replicas or autoscaling.min_replicas); each takes"
                f" {_amounts(demand.whole)}; {_shown(nodes, _names(demand))}"
            ]
        elif left < demand.num_frontends:
            problems = [
                f"beside the engines, there is room for {left} of {demand.num_frontends} front ends"
                f" (server.num_frontends), which take {FRONTEND_CPUS:g} CPU each; {_shown(nodes, ('CPU',))}"
            ]
    if all(node.resources.get("object_store_memory", 0.0) < demand.object_store_bytes for node in nodes):
        problems.append(
            f"no node has {_amount('object_store_memory', demand.object_store_bytes)}, which"
            f" {OBJECT_STORE_BODIES} requests of server.max_body_mb take; {_shown(nodes, ('object_store_memory',))}"
        )
    return problems


def _too_little_in_all(demand: Demand, nodes: Sequence[Node]) -> list[str]:
    problems = []
    for name, wanted in demand.whole.items():
        there = sum(node.resources.get(name, 0.0) for node in nodes)
        if there < wanted:
            problems.append(
                f"an engine asks for {_amount(name, wanted)} (parallel.tensor_parallel_size={demand.num_ranks}),"
                f" and all nodes together have {_amount(name, there)}; {_shown(nodes, (name,))}"
            )
    return problems


def _no_engine_fits(demand: Demand, nodes: Sequence[Node]) -> str:
    if demand.placement == "spread":
        room = {node.name: _times(node.resources, demand.rank) for node in nodes}
        return (
            f"the nodes have no room for an engine (parallel.tensor_parallel_size={demand.num_ranks}): a rank takes"
            f" {_amounts(demand.rank)} of one node, the engine beside them {_amounts(demand.engine)};"
            f" ranks that fit: {', '.join(f'{name} {count}' for name, count in room.items())}"
        )
    said = (
        f"no single node has room for an engine (parallel.tensor_parallel_size={demand.num_ranks},"
        f" parallel.placement=pack), which takes {_amounts(demand.whole)}; {_shown(nodes, _names(demand))}"
    )
    if _fill(replace(demand, placement="spread"), nodes)[0]:
        return said + "; parallel.placement=spread lets ranks be on several nodes"
    return said


def _fill(demand: Demand, nodes: Sequence[Node]) -> tuple[int, int]:
    """How many of the engines find room, and how many front ends would beside them."""
    left = [dict(node.resources) for node in nodes]
    num_engines = 0
    while num_engines < demand.num_engines and _take_engine(demand, left):
        num_engines += 1
    return num_engines, sum(_times(resources, {"CPU": FRONTEND_CPUS}) for resources in left)


def _take_engine(demand: Demand, left: list[dict[str, float]]) -> bool:
    if demand.placement == "pack":
        return _take(demand.whole, left)
    return all(_take(demand.rank, left) for _ in range(demand.num_ranks)) and _take(demand.engine, left)


def _take(wanted: Resources, left: list[dict[str, float]]) -> bool:
    """From the first node that has it all."""
    for resources in left:
        if _times(resources, wanted):
            for name, amount in wanted.items():
                resources[name] -= amount
            return True
    return False


def _times(have: Resources, wanted: Resources) -> int:
    """How often `wanted` fits."""
    return math.floor(min(have.get(name, 0.0) / amount for name, amount in wanted.items() if amount))


def _names(demand: Demand) -> tuple[str, ...]:
    """Resources that an engine or its ranks take."""
    return tuple(name for name in _TOLD if demand.engine.get(name) or demand.rank.get(name))


def _with_all_memory(node: Node) -> Node:
    memory = node.resources.get("memory", 0.0) + node.resources.get("object_store_memory", 0.0)
    return Node(node.name, {**node.resources, "memory": memory})


def _amount(name: str, amount: float) -> str:
    """ "1 GPU", "2 CPUs", "4.00 GiB of memory"."""
    if name in _BYTES:
        return f"{amount / GIB:.2f} GiB of {_BYTES[name]}"
    return f"{amount:g} {name}" + ("" if amount == 1 else "s")


def _amounts(resources: Resources) -> str:
    return ", ".join(_amount(name, resources[name]) for name in _TOLD if resources.get(name))


def _shown(nodes: Sequence[Node], names: Sequence[str]) -> str:
    """What each node has of these."""
    return "; ".join(
        f"node {node.name} has " + ", ".join(_amount(name, node.resources.get(name, 0.0)) for name in names)
        for node in nodes
    )

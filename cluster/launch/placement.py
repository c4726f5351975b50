"""What the application asks of a cluster: CPUs in all, and how an engine's bundles are placed."""

from collections.abc import Iterable, Mapping, Sequence

from cluster.engine.settings import EngineSettings
from cluster.settings.tree import Settings

FRONTEND_CPUS = 1.0


def cpus_needed(settings: Settings, engine: EngineSettings) -> int:
    """Ray CPUs of the whole application at its largest. A Ray of our own has as many, whatever the machine has:
    they are a promise between Ray and the application, and Ray starts as many worker processes ahead.
    """
    one_engine = sum(bundle["CPU"] for bundle in engine.placement_bundles())
    return round(settings.server.num_frontends * FRONTEND_CPUS + settings.parallel.num_replicas.high * one_engine)


def placement_strategy(bundles: Sequence[Mapping[str, float]], nodes: Iterable[Mapping[str, float]]) -> str:
    """STRICT_PACK if one node can hold all bundles of an engine, else PACK over several.

    `nodes` are the total resources of each living node.
    """
    wanted: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            wanted[name] = wanted.get(name, 0.0) + amount
    fits = any(all(node.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in nodes)
    return "STRICT_PACK" if fits else "PACK"

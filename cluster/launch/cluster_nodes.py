"""The nodes of the connected cluster, and those that its autoscaler may still start."""

from typing import Any

import ray
from ray._private.state import available_resources_per_node, state

from cluster.launch.placement import Demand, Node


def living_nodes() -> list[dict[str, Any]]:
    """Ray's own rows (NodeID, NodeManagerAddress, Resources ...) of nodes that live."""
    return [row for row in ray.nodes() if row["Alive"]]


def node_name(row: dict[str, Any]) -> str:
    """Its address, and the beginning of Ray's name, since several may share a machine."""
    return f"{row['NodeManagerAddress']} ({row['NodeID'][:6]})"


def possible_nodes(demand: Demand) -> list[Node]:
    """All that living nodes have, busy or not, and nodes that an autoscaler may start, as many as `demand` could use.

    An autoscaler's nodes that live already count twice: what is refused on this ground is impossible for sure.
    """
    nodes = [Node(node_name(row), row["Resources"]) for row in living_nodes()]
    config = state.get_cluster_config()
    most = demand.num_engines * (1 + demand.num_ranks) + demand.num_frontends
    for group in config.node_group_configs if config is not None else ():
        count = most if group.max_count < 0 else min(group.max_count, most)
        nodes += [Node(f"to be started ({group.name})", dict(group.resources)) for _ in range(count)]
    return nodes


def free_nodes() -> list[Node]:
    """What living nodes have that nobody uses now."""
    free = available_resources_per_node()
    return [Node(node_name(row), free.get(row["NodeID"], {})) for row in living_nodes()]

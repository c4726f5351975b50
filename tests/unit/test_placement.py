"""Why an application cannot be placed, told from what each node has; and in what order actors become ranks."""

from pathlib import Path

import pytest

from cluster.engine.rank_actors import by_node
from cluster.launch.placement import Demand, Node, demand_of, placement_problems
from cluster.settings.source import resolve
from cluster.settings.tree import GIB, Device, engine_settings

GPU = Device("cuda", 80.0)


def demand(*words: str, device: Device = GPU, model: str = "/nowhere") -> Demand:
    settings = resolve(device, None, list(words)).settings
    return demand_of(settings, engine_settings(settings, model, device))


def node(name: str, cpus: float = 64, gpus: float = 0, memory_gib: float = 64, store_gib: float = 10) -> Node:
    resources = {"CPU": cpus, "memory": memory_gib * GIB, "object_store_memory": store_gib * GIB}
    return Node(name, resources | ({"GPU": gpus} if gpus else {}))


TP4 = "parallel.tensor_parallel_size=4"
SPREAD = "parallel.placement=spread"
ON_CPU = Device()


@pytest.mark.parametrize(
    ("wanted", "nodes", "reason"),
    [
        (
            demand(TP4),
            [node("a", gpus=2), node("b")],
            "an engine asks for 4 GPUs (parallel.tensor_parallel_size=4), and all nodes together have 2 GPUs;"
            " node a has 2 GPUs; node b has 0 GPUs",
        ),
        (
            demand(TP4),
            [node("a", gpus=2), node("b", gpus=2)],
            "no single node has room for an engine (parallel.tensor_parallel_size=4, parallel.placement=pack),"
            " which takes 4 GPUs, 5 CPUs;"
            " node a has 2 GPUs, 64 CPUs; node b has 2 GPUs, 64 CPUs;"
            " parallel.placement=spread lets ranks be on several nodes",
        ),
        (
            demand(TP4, SPREAD),
            [node("a", gpus=4, cpus=2), node("b", cpus=8)],
            "the nodes have no room for an engine (parallel.tensor_parallel_size=4): a rank takes 1 GPU, 1 CPU of one"
            " node, the engine beside them 1 CPU; ranks that fit: a 2, b 0",
        ),
        (
            demand("parallel.tensor_parallel_size=2", device=ON_CPU),
            [node("a", cpus=1), node("b", cpus=1)],
            "an engine asks for 3 CPUs (parallel.tensor_parallel_size=2), and all nodes together have 2 CPUs;"
            " node a has 1 CPU; node b has 1 CPU",
        ),
        (
            demand("cache.memory_gb=200", device=ON_CPU),
            [node("a", memory_gib=32), node("b")],
            "an engine asks for 200.00 GiB of memory (parallel.tensor_parallel_size=1), and all nodes together have"
            " 116.00 GiB of memory; node a has 42.00 GiB of memory; node b has 74.00 GiB of memory",
        ),
        (
            demand("parallel.num_replicas=3"),
            [node("a", gpus=2)],
            "there is room for 2 of 3 engines (parallel.num_replicas or autoscaling.min_replicas); each takes"
            " 1 GPU, 2 CPUs; node a has 2 GPUs, 64 CPUs",
        ),
        (
            demand("server.num_frontends=3", device=ON_CPU),
            [node("a", cpus=4)],
            "beside the engines, there is room for 2 of 3 front ends (server.num_frontends), which take 1 CPU each;"
            " node a has 4 CPUs",
        ),
        (
            demand("server.max_body_mb=1024", device=ON_CPU),
            [node("a", store_gib=3.5)],
            "no node has 4.00 GiB of object store, which 4 requests of server.max_body_mb take;"
            " node a has 3.50 GiB of object store",
        ),
        (demand(), [], "the cluster has no living node"),
    ],
    ids=["gpus", "one-node", "spread", "cpus", "memory", "engines", "frontends", "object-store", "empty"],
)
def test_the_reason_is_told_in_words(wanted: Demand, nodes: list[Node], reason: str) -> None:
    assert placement_problems(wanted, nodes) == [reason]


def test_what_fits_has_no_problem() -> None:
    one_node = [node("a", cpus=6, gpus=4)]
    two_nodes = [node("a", cpus=3, gpus=2), node("b", cpus=3, gpus=2)]
    assert placement_problems(demand(TP4), one_node) == []
    assert placement_problems(demand(TP4, SPREAD), one_node) == []
    assert placement_problems(demand(TP4, SPREAD), two_nodes) == []
    assert len(placement_problems(demand(TP4), two_nodes)) == 1
    assert placement_problems(demand(device=ON_CPU), [node("a", cpus=3)]) == []
    # Only the smallest number of engines must fit.
    assert (
        placement_problems(
            demand("autoscaling.min_replicas=2", "autoscaling.max_replicas=9", device=ON_CPU), [node("a", cpus=5)]
        )
        == []
    )


def test_memory_is_that_of_the_weights_and_the_cache_over_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    model = str(tmp_path)
    words = ["parallel.tensor_parallel_size=2", "cache.memory_gb=1"]
    assert demand(*words, device=ON_CPU, model=model).rank["memory"] == (1000 + GIB) / 2
    assert demand(*words, "cache.num_blocks=9", device=ON_CPU, model=model).rank["memory"] == 500
    assert "memory" not in demand(*words, model=model).rank


@pytest.mark.parametrize(
    ("nodes", "order"), [("aa", [0, 1]), ("abab", [0, 2, 1, 3]), ("bbab", [0, 1, 3, 2]), ("cabc", [0, 3, 1, 2])]
)
def test_ranks_of_a_node_follow_each_other(nodes: str, order: list[int]) -> None:
    assert by_node(list(nodes)) == order

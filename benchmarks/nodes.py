"""A Ray cluster of several nodes on this machine: a raylet each, so that one can be killed as if its machine had."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.launch.local_ray import serve_environment

HEALTH = {
    # A node that says nothing is taken for dead after a second and a half; Ray's own default is some twenty.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@contextmanager
def two_nodes(head_cpus: int, far_cpus: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A head and one node more. Yields the cluster's address and what starts one more node like the second.

    This process gets the environment that Ray and Serve need, and must not have imported Ray before.
    """
    directory = Path(tempfile.mkdtemp(prefix="chunkserve-nodes-", dir="/tmp"))
    os.environ.update(serve_environment(directory, None) | HEALTH)
    from ray._common.utils import get_default_ray_temp_dir
    from ray.cluster_utils import Cluster

    Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)  # Where it writes its address, on a new machine too.

    cluster = Cluster(shutdown_at_exit=False)
    try:
        cluster.add_node(num_cpus=head_cpus, include_dashboard=False, temp_dir=str(directory))
        cluster.add_node(num_cpus=far_cpus)
        yield str(cluster.address), lambda: cluster.add_node(num_cpus=far_cpus)
    finally:
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)

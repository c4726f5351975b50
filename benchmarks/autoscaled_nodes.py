"""A Ray cluster whose autoscaler adds and removes nodes: raylets on this machine, by Ray's provider for tests."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from cluster.launch import processes
from cluster.launch.local_ray import free_ports, serve_environment

START_SECONDS = 60.0
END_SECONDS = 20.0
_HEAD = "ray.head.default"
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
"""Named as an external one: the defaults of the built-in name are not in Ray's wheel."""


@contextmanager
def autoscaled_nodes(head_cpus: int, node_cpus: int, max_nodes: int) -> Iterator[tuple[str, Callable[[], int]]]:
    """A head, one node more, and others up to `max_nodes` while something asks for them.

    Yields the cluster's address and what counts the nodes that live, the head left out. This process gets the
    environment that Ray and Serve need, and must not have imported Ray before. Raises CalledProcessError.
    """
    directory = Path(tempfile.mkdtemp(prefix="chunkserve-nodes-", dir="/tmp"))
    os.environ.update(serve_environment(directory, None))
    from ray._private.services import get_node_ip_address
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    address = f"{get_node_ip_address()}:{free_ports(1)[0]}"
    config = {
        "cluster_name": "autoscaled",
        "max_workers": max_nodes,
        "provider": {
            "type": "external",
            "module": _PROVIDER,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": address,
            "launch_multiple": True,
            "disable_node_updaters": True,  # nothing has to be installed on them
        },
        "head_node_type": _HEAD,
        "available_node_types": {
            _HEAD: {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0},
            "engine": {
                "resources": {"CPU": node_cpus},
                "node_config": {},
                "min_workers": 1,
                "max_workers": max_nodes,
            },
        },
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 1.0,
        # Nothing is done on a node, but all of this must be said.
        **{f"{of}setup_commands": [] for of in ("", "head_", "worker_")},
        **{f"{of}_start_ray_commands": [] for of in ("head", "worker")},
        "cluster_synced_files": [],
    }
    written = directory / "autoscaler.yaml"
    written.write_text(yaml.safe_dump(config))
    try:
        _start_head(directory, address, head_cpus, written, FAKE_HEAD_NODE_ID)
        yield address, lambda: _num_nodes(directory)
    finally:
        processes.end(directory, END_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)


def _start_head(directory: Path, address: str, num_cpus: int, config: Path, node_id: str) -> None:
    host, _, port = address.rpartition(":")
    subprocess.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--node-ip-address={host}",
            f"--port={port}", f"--num-cpus={num_cpus}", f"--temp-dir={directory}", "--include-dashboard=false",
            f"--autoscaling-config={config}",
        ],
        env=os.environ
        | {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_CLOUD_INSTANCE_ID": node_id,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id,
        },
        timeout=START_SECONDS,
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _num_nodes(directory: Path) -> int:
    return sum(process.name() == "raylet" for process in processes.find(directory)) - 1

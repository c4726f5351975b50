"""An actor that looks at its node: versions, the model's files, ports, and which other nodes it reaches."""

import platform
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ray

from cluster.errors import ConfigError
from cluster.launch.launcher import check_port

DIAL_SECONDS = 3.0
PACKAGES = ("ray", "torch", "chunkserve")

Address = tuple[str, int]


def versions() -> dict[str, str]:
    """Of Python (without its patch level) and of the packages that nodes must agree on; builds of one version (+cpu,
    +cu130) are one.
    """
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def dial(address: Address) -> float | str:
    """Seconds that a connection takes, or why there is none."""
    started = time.perf_counter()
    try:
        socket.create_connection(address, DIAL_SECONDS).close()
    except OSError as error:
        return str(error)
    return time.perf_counter() - started


class NodeProbe:
    """Placed on one node. Nothing here takes longer than a few seconds."""

    def versions(self) -> dict[str, str]:
        """As the function of that name says."""
        return versions()

    def has_model(self, directory: str) -> bool:
        """Whether the model's files are where ranks and front ends will look for them."""
        return (Path(directory) / "config.json").is_file()

    def port_problem(self, host: str, port: int) -> str:
        """Why `host`:`port` cannot be listened on, or nothing."""
        try:
            check_port(host, port)
        except ConfigError as error:
            return str(error)
        return ""

    def listen(self) -> Address:
        """Listen at a free port of the node's address, as ranks, engines and front ends do; the kernel accepts."""
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        return host, self._listener.getsockname()[1]

    def dial(self, addresses: list[Address]) -> list[float | str]:
        """One `dial` each, all at once."""
        with ThreadPoolExecutor(len(addresses)) as pool:
            return list(pool.map(dial, addresses))

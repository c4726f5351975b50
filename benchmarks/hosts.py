"""Two hosts on this machine: each has a network, a hostname and, the second, processes and files of its own.

The first is a network namespace, the second also a container in all but its image: its ranks share no memory with the
first one's and reach it over a virtual cable alone. Needs root, and iproute2 and util-linux.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.nodes import HEALTH
from cluster.launch import processes
from cluster.launch.local_ray import serve_environment

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
_COMMAND_SECONDS = 20.0
_CONTAINER = """\
hostname {name} && mount -t tmpfs none /dev/shm && mount -t tmpfs none {directory} && exec "$@"
"""


class HostsUnavailable(Exception):
    """This machine lets nobody make namespaces; the message says what was refused."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """A Ray cluster over both."""

    address: str
    prefix: Sequence[str]
    """Words before a command that is to run on the first host."""
    variables: Mapping[str, str]
    """The environment that such a command needs."""
    what: str
    """How the hosts are separated, in words."""


@contextmanager
def two_hosts(cpus: int) -> Iterator[Hosts]:
    """Both hosts with a raylet each of so many logical CPUs, the head on the first.

    Raises HostsUnavailable where namespaces cannot be had.
    """
    names = [f"chunkserve-{os.getpid()}-{letter}" for letter in "ab"]
    directory = Path(tempfile.mkdtemp(prefix="chunkserve-hosts-", dir="/tmp"))
    variables = os.environ | serve_environment(directory, None) | HEALTH
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _join(names)
        stack.callback(processes.end, directory, _COMMAND_SECONDS)
        prefix = ("ip", "netns", "exec", names[0])
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={directory}"]
        _start(stack, [*prefix], head, ADDRESSES[0], cpus, variables, directory)
        container = ["ip", "netns", "exec", names[1]]
        container += ["unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child"]
        container += ["sh", "-c", _CONTAINER.format(name=names[1], directory=directory), "container"]
        address = f"{ADDRESSES[0]}:{PORT}"
        _start(stack, container, [f"--address={address}"], ADDRESSES[1], cpus, variables, directory)
        what = "two network namespaces and a virtual cable; the second host has its own processes, /dev/shm and name"
        yield Hosts(address, prefix, variables, what)


def _join(names: Sequence[str]) -> None:
    """A cable between both, and an address at each end."""
    ends = [f"cs{os.getpid() % 10**6}{letter}" for letter in "ab"]
    _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
        for interface in (end, "lo"):
            _ip("-n", name, "link", "set", interface, "up")


def _start(
    stack: ExitStack,
    prefix: Sequence[str],
    options: Sequence[str],
    address: str,
    cpus: int,
    variables: Mapping[str, str],
    directory: Path,
) -> None:
    """A raylet, and with it what Ray starts beside one."""
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}"]
    command += [f"--num-cpus={cpus}", *options]
    log = stack.enter_context((directory.parent / f"{directory.name}-{address}.log").open("wb"))
    stack.callback(Path(log.name).unlink)
    raylet = subprocess.Popen(command, env=dict(variables), stdout=log, stderr=log, start_new_session=True)
    stack.callback(raylet.wait, _COMMAND_SECONDS)
    stack.callback(raylet.kill)  # all of a container goes with it, and what is left of the other host is found


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except FileNotFoundError as error:
        raise HostsUnavailable("there is no `ip` command (iproute2)") from error
    if done.returncode:
        raise HostsUnavailable(f"ip {' '.join(words)}: {done.stderr.strip()} (on {socket.gethostname()})")

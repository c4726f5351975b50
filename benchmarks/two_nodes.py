"""One engine over two nodes: its texts against those of one rank on one node, and what an all-reduce takes.

The nodes are hosts in network namespaces, which need root; where those cannot be had, or with --raylets, two raylets
that share this machine's network and memory. Runs `chunkserve preflight`, then serves a tiny float32 model with
TP 1 and with TP 2 spread over both nodes; half of the streams are greedy, half sampled with a seed.

    python -m benchmarks two_nodes

Exits with 1 where preflight fails or a text differs.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.counts import positive
from benchmarks.errors import BenchmarkError
from benchmarks.hosts import Hosts, HostsUnavailable, two_hosts
from benchmarks.nodes import two_nodes

NODE_CPUS = 2
"""Logical: an engine of TP 1 fits a node, one of TP 2 takes three."""
JOIN_SECONDS = 60.0
CHECK_SECONDS = 180.0
SPREAD = ("parallel.tensor_parallel_size=2", "parallel.placement=spread")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a check fails or a text differs."""
    parser = argparse.ArgumentParser("two_nodes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--raylets", action="store_true", help="two raylets on this machine instead of hosts")
    parser.add_argument("--streams", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=48, help="of each stream")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.address:
        return _on_first_node(options.address, options.streams, options.tokens)
    with _hosts(options.raylets) as hosts:
        print(f"nodes: {hosts.what}", flush=True)
        command = [*hosts.prefix, sys.executable, "-m", "benchmarks", "two_nodes", "--address", hosts.address]
        command += ["--streams", str(options.streams), "--tokens", str(options.tokens)]
        return subprocess.run(command, env=dict(hosts.variables)).returncode


@contextmanager
def _hosts(raylets: bool) -> Iterator[Hosts]:
    if not raylets:
        try:
            with two_hosts(NODE_CPUS) as hosts:
                yield hosts
            return
        except HostsUnavailable as error:
            print(f"no hosts of their own: {error}", flush=True)
    with two_nodes(NODE_CPUS, NODE_CPUS) as (address, _):
        yield Hosts(address, (), os.environ, "two raylets on this machine, which share its network and memory")


def _on_first_node(address: str, num_streams: int, num_tokens: int) -> int:
    from benchmarks.random_model import write_served_model  # torch is slow to import, and the outer process needs none

    _wait_for_nodes(address, 2)
    with tempfile.TemporaryDirectory(prefix="chunkserve-model-") as model:
        write_served_model(Path(model))
        settings = [f"model.path={model}", "model.dtype=float32", "cache.memory_gb=0.1"]
        command = [sys.executable, "-m", "cluster", "preflight", "--address", address, *settings, *SPREAD]
        checked = subprocess.run(command, timeout=CHECK_SECONDS).returncode == 0
        texts = [asyncio.run(_texts(address, [*settings, *words], num_streams, num_tokens)) for words in ((), SPREAD)]
    same = sum(one == two for one, two in zip(*texts, strict=True))
    print(
        f"TP 2 over two nodes: {same} of {num_streams} texts are those of TP 1 on one node ({num_tokens} tokens each)"
    )
    return 0 if checked and same == num_streams else 1


def _wait_for_nodes(address: str, count: int) -> None:
    """Raises BenchmarkError when so many do not live in time."""
    import ray

    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            living = sum(node["Alive"] for node in ray.nodes())
            ray.shutdown()
            if living >= count:
                return
        except (ConnectionError, RuntimeError, ValueError):
            pass  # the head is not there yet
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{count} nodes did not join {address} within {JOIN_SECONDS:g} s")
        time.sleep(1.0)


async def _texts(address: str, settings: Sequence[str], num_streams: int, num_tokens: int) -> list[str]:
    """What a service of these settings answers. Raises BenchmarkError for a stream that fails."""
    from benchmarks.loadgen import first_model, new_session
    from benchmarks.random_model import SERVED
    from benchmarks.service import running_service
    from benchmarks.stream_load import Load

    with running_service(settings, address=address) as base_url:
        async with new_session(CHECK_SECONDS) as session:
            load = Load(base_url, await first_model(session, base_url), num_streams, num_tokens, SERVED.vocab_size)
            streams = await load.run(session)
    if failed := [stream.error for stream in streams if stream.error]:
        raise BenchmarkError(f"a stream failed: {failed[0]}")
    gap = max(stream.longest_gap() for stream in streams)
    print(f"served {num_streams} streams with {' '.join(settings[3:]) or 'TP 1'}; longest gap {gap:.2f} s", flush=True)
    return [stream.text for stream in streams]


if __name__ == "__main__":
    sys.exit(main())

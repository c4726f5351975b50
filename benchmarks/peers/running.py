"""A peer's server, for the time of a benchmark."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.transformers_cb import TransformersServe
from benchmarks.peers.vllm import Vllm
from benchmarks.service import START_SECONDS, free_port, running_server

Peer = Vllm | TransformersServe

PEERS: dict[str, type[Vllm] | type[TransformersServe]] = {kind.name: kind for kind in (Vllm, TransformersServe)}


@contextmanager
def running_peer(peer: Peer, model: Path, budget: int, start_seconds: float = START_SECONDS) -> Iterator[str]:
    """Install it if need be and start it on the model in this directory; yields its base URL once it is healthy.

    Raises PeerError when it cannot be installed, and ServiceError as `running_service`.
    """
    peer.prepare()
    port = free_port()
    command = peer.command(model, budget, port)
    variables = {**os.environ, **peer.variables()}
    with running_server(command, f"http://127.0.0.1:{port}", peer.title, variables, start_seconds) as base_url:
        yield base_url

"""The scenes of `survival`: a fault, or a client unlike the others, the service that meets it, and what it may cost."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.poison import seed_of
from benchmarks.stream_load import Client

ODD_STREAM = 6
"""The one whose client is unlike the others; greedy, so that a seed changes no text."""
STALL_SECONDS = 12.0

MakeClient = Callable[[random.Random, int], Client]
"""From the trial's dice and the tokens of a stream."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is done to which service, and what it may cost."""

    fault: str | None
    """None: the client is all there is to it."""
    settings: tuple[str, ...]
    num_ranks: int
    """Of all engines together."""
    limit: float
    """Seconds that the longest gap may last, in any stream that the fault is not meant for (tiny model)."""
    nodes: bool = False
    """On two nodes, of which the head has room for all but one engine."""
    client: MakeClient | None = None
    """Of one stream, whose gaps do not count."""
    fatal: str | None = None
    """That stream must fail with an error that says this; None: it must come whole like the others."""
    hits_some: bool = False
    """Streams that get nothing as long as the fault lasts are those it is meant for."""
    same_engines: bool = False
    """All engines serve afterwards, and they are those from before."""
    module: str = "cluster"
    """`python -m MODULE serve` starts the service."""


def poison_at(rng: random.Random, num_tokens: int) -> Client:
    """Its ranks die at a token from the middle of the stream, each time."""
    position = rng.randrange(num_tokens // 5, num_tokens // 2)
    return Client(f"stream {ODD_STREAM} is poison at its token {position}", {"seed": seed_of(position)})


def stalling(rng: random.Random, num_tokens: int) -> Client:
    """It stops to read after some tokens; its events are large, so that nothing in between can hold them for it."""
    events = rng.randrange(num_tokens // 20, num_tokens // 4)
    what = f"stream {ODD_STREAM} is not read for {STALL_SECONDS:g} s after {events} events"
    return Client(what, {"logprobs": 5}, events, STALL_SECONDS)


_TP2 = ("parallel.tensor_parallel_size=2",)
_TWO = ("parallel.num_replicas=2",)
SCENES = {
    "kill-worker": Scene("kill-worker", _TP2, 2, 5.0),
    "stop-worker": Scene("stop-worker", _TP2, 2, 15.0),
    "slow-worker": Scene("slow-worker", _TP2, 2, 15.0),
    "starve-worker": Scene("starve-worker", _TP2, 2, 15.0),
    "cut-link": Scene("cut-link", _TP2, 2, 5.0),
    "garbage": Scene("garbage", _TP2, 2, 1.0),
    "full-disk": Scene("full-disk", _TP2, 2, 1.0),
    "poison": Scene(
        None, _TP2, 2, 30.0, client=poison_at, fatal="died each time", module="benchmarks.poisonable_service"
    ),
    "kill-engine": Scene("kill-engine", (), 1, 12.0),
    "kill-engine-of-two": Scene("kill-engine", _TWO, 2, 1.0),
    "stop-engine-of-two": Scene("stop-engine", _TWO, 2, 15.0),
    "resume-engine": Scene("pause-engine", _TWO, 2, 15.0, same_engines=True),
    "slow-client": Scene(None, (), 1, 1.0, client=stalling),
    "slow-frontend": Scene("pause-frontend", ("server.num_frontends=2",), 1, 1.0, hits_some=True),
    "redeploy": Scene("redeploy", (), 1, 12.0),
    "redeploy-of-two": Scene("redeploy", _TWO, 2, 5.0),
    "kill-node": Scene("kill-node", _TWO, 2, 12.0, nodes=True),
}

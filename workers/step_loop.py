"""A rank's side of the step link: plans in, results out, in order. Knows neither torch nor Ray."""

import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from scheduler.plan import StepPlan
from workers.link import Link, LinkClosed, LinkError
from workers.wire import decode_plan, encode

if TYPE_CHECKING:
    from workers.model_runner import PendingStep
    from workers.worker import Worker

logger = logging.getLogger(__name__)

PLAN = 1
"""Engine to rank: a StepPlan."""
RESULT = 2
"""Rank 0 to engine: the StepResult of the oldest plan without one."""
ERROR = 3
"""Rank to engine, before it dies: what it died of, as UTF-8 text."""

HEARTBEAT = 4
"""Rank to engine, each second, whatever the rank does: it is neither suspended nor cut off."""
HEARTBEAT_SECONDS = 1.0

_POLL_SECONDS = 1e-4
"""A small part of any step on a GPU: what a plan or a result may wait before it is noticed."""


def rank_name(rank: int) -> str:
    """What a rank calls itself on its link."""
    return f"rank {rank}"


def serve_plans(link: Link, worker: "Worker", rank: int) -> None:
    """Execute plans in order until the link ends, then end the process."""
    status = 1
    try:
        execute_plans(link, worker, rank)
    except LinkClosed:
        status = 0
    except Exception as error:
        logger.exception("rank %d ends", rank)
        _report(link, f"{type(error).__name__}: {error}")
    finally:
        # Nothing may keep a rank without an engine alive: no exit handler, no thread, no collective.
        os._exit(status)


def serve_heartbeats(link: Link) -> None:
    """Send heartbeats until the link ends, then end the process: a step that waits for a dead peer may not keep it."""
    try:
        send_heartbeats(link)
    finally:
        os._exit(1)


def send_heartbeats(link: Link) -> None:
    """Until the link ends."""
    try:
        while True:
            link.send(HEARTBEAT, b"")
            time.sleep(HEARTBEAT_SECONDS)
    except LinkError as error:
        logger.warning("the engine is gone: %s", error)


def execute_plans(link: Link, worker: "Worker", rank: int) -> NoReturn:
    """Execute plans in order. Raises LinkClosed when the engine has gone, and what the worker or the link raise.

    A plan that arrives while the device still computes is launched at once, so that the device need not
    wait for the host between two steps. On a CPU a launched step is ready, and plans wait in the socket.
    Every rank executes every plan; all of them know the result, and rank 0 sends it.
    """
    launched: deque[PendingStep] = deque()
    while True:
        if launched and not _plan_comes_first(link, launched[0]):
            result = worker.collect_step(launched.popleft())
            if rank == 0:
                link.send(RESULT, encode(result))
        else:
            launched.append(worker.launch_step(_receive_plan(link)))


def _plan_comes_first(link: Link, step: "PendingStep") -> bool:
    """Wait for the step or for the link, its end included; the step's deadline is the engine's."""
    while not step.is_ready():
        if link.has_message():
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _receive_plan(link: Link) -> StepPlan:
    kind, payload = link.receive()
    if kind != PLAN:
        raise LinkError(f"{link.peer} sent a message of kind {kind} where plans are expected")
    return decode_plan(payload)


def _report(link: Link, cause: str) -> None:
    try:
        link.send(ERROR, cause.encode())
    except LinkError as error:
        logger.warning("the engine cannot be told: %s", error)

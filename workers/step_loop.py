"""A rank's side of the step link: plans in, results out, in order. Knows neither torch nor Ray."""

import logging
import os
from typing import Protocol

from scheduler.plan import StepPlan, StepResult
from workers.link import Link, LinkClosed, LinkError
from workers.wire import decode_plan, encode

logger = logging.getLogger(__name__)

PLAN = 1
"""Engine to rank: a StepPlan."""
RESULT = 2
"""Rank 0 to engine: the StepResult of the oldest plan without one."""
ERROR = 3
"""Rank to engine, before it dies: what it died of, as UTF-8 text."""


class StepWorker(Protocol):
    """All that the loop knows of a worker."""

    def execute_step(self, plan: StepPlan) -> StepResult: ...


def rank_name(rank: int) -> str:
    """What a rank calls itself on its link."""
    return f"rank {rank}"


def serve_plans(link: Link, worker: StepWorker, rank: int) -> None:
    """Execute plans in order until the link ends, then end the process.

    Plans that arrive during a step wait in the socket, so the next one starts without the engine.
    Every rank executes every plan; all of them know the result, and rank 0 sends it.
    """
    status = 1
    try:
        while True:
            result = worker.execute_step(_receive_plan(link))
            if rank == 0:
                link.send(RESULT, encode(result))
    except LinkClosed:
        status = 0
    except Exception as error:
        logger.exception("rank %d ends", rank)
        _report(link, f"{type(error).__name__}: {error}")
    finally:
        # Nothing may keep a rank without an engine alive: no exit handler, no thread, no collective.
        os._exit(status)


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

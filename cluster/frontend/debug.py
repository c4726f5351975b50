"""A look into the engine over HTTP: its last steps. Needs no key, so it names no request."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from cluster.links.messages import StepRecord

GetSteps = Callable[[int], Awaitable[Sequence[StepRecord]]]
"""The last n steps of an engine, oldest first."""

MAX_STEPS = 4096


def debug_router(get_steps: GetSteps) -> APIRouter:
    """`GET /debug/steps?n=100`: `{"steps": [...]}`, oldest first, with the fields of StepRecord."""
    router = APIRouter()

    @router.get("/debug/steps")
    async def steps(n: Annotated[int, Query(ge=1, le=MAX_STEPS)] = 100) -> dict[str, Any]:
        return {"steps": [asdict(record) for record in await get_steps(n)]}

    return router

"""The step log over HTTP."""

from dataclasses import fields

import httpx
from fastapi import FastAPI

from cluster.frontend.debug import debug_router
from cluster.links.messages import StepRecord

RECORDS = [
    StepRecord(
        epoch=1,
        step_id=step_id,
        num_requests=2,
        num_decodes=1,
        num_decode_tokens=1,
        num_chunk_tokens=9,
        num_missed_decodes=0,
        num_preempted=0,
        sent_ahead=True,
        execute_seconds=0.25,
        wall_seconds=0.5,
        sent_at=1.0,
        received_at=1.5,
    )
    for step_id in range(3)
]


async def get(path: str) -> httpx.Response:
    async def last_steps(n: int) -> list[StepRecord]:
        return RECORDS[-n:]

    app = FastAPI()
    app.include_router(debug_router(last_steps))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        return await client.get(path)


async def test_the_last_steps() -> None:
    steps = (await get("/debug/steps?n=2")).json()["steps"]
    assert [step["step_id"] for step in steps] == [1, 2]
    assert steps[0] == {field.name: getattr(RECORDS[1], field.name) for field in fields(StepRecord)}


async def test_a_number_out_of_range_is_refused() -> None:
    for n in ("0", "-1", "4097", "many"):
        assert (await get(f"/debug/steps?n={n}")).status_code == 422

"""/v1/files and /v1/batches over a scripted engine, with the official client and by hand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_errors import check_error
from api_fakes import MODEL, FakeEngineClient, http_client, make_app
from batch_inputs import line

from cluster.batch import sender, service
from cluster.batch.store import FINAL
from cluster.frontend.batches import add_batches
from cluster.frontend.settings import FrontendSettings

ODD_CHARSET = "multipart/form-data; boundary=x; charset=undefined"
ODD_FORM = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.01)


@asynccontextmanager
async def front_end(
    folder: Path, runs: bool = True, fault: Exception | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A front end over the directory; without `runs` it has the routes only. `fault`: of its engine, each time."""
    engine = FakeEngineClient()
    if fault is not None:
        engine.fault_at, engine.fault = 1, fault
    app = make_app(engine, **settings)
    running = add_batches(app, FrontendSettings("/nowhere", MODEL, batch_directory=str(folder), max_file_mb=0.01))
    assert running is not None
    if not runs:
        running.cancel()
    async with http_client(app) as http:
        yield http
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


def request(custom_id: str, **body: Any) -> str:
    return json.dumps(line(custom_id, body={"model": MODEL, "prompt": "hi", "max_tokens": 2} | body))


async def upload(http: httpx.AsyncClient, *lines: str) -> str:
    content = "".join(f"{each}\n" for each in lines)
    response = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
    assert response.status_code == 200, response.text
    assert response.json() | {"id": "", "created_at": 0} == {
        "id": "",
        "object": "file",
        "bytes": len(content),
        "created_at": 0,
        "filename": "in.jsonl",
        "purpose": "batch",
    }
    return str(response.json()["id"])


async def create(http: httpx.AsyncClient, file_id: str, **changes: Any) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return await http.post("/v1/batches", json=body | changes)


async def ended(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            batch: dict[str, Any] = (await http.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in FINAL:
                return batch
            await asyncio.sleep(0.01)


async def content(http: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (await http.get(f"/v1/files/{file_id}/content")).text.splitlines()]


async def test_a_batch_from_upload_to_results(tmp_path: Path) -> None:
    async with front_end(tmp_path, api_key="sesame") as http:
        assert (await http.get("/v1/files")).status_code == 401
        client = openai.AsyncOpenAI(api_key="sesame", base_url="http://test/v1", http_client=http)
        lines = [request("a"), request("b", temperature=9), "{", request("c")]
        source = "\n".join(lines).encode()
        file = await client.files.create(file=("in.jsonl", source), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
        )
        http.headers["authorization"] = "Bearer sesame"
        await ended(http, batch.id)
        batch = await client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.metadata == {"a": "b"}
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
        output = [
            json.loads(each) for each in (await client.files.content(batch.output_file_id or "")).text.splitlines()
        ]
        assert [row["custom_id"] for row in output] == ["a", "c"]
        errors = await content(http, batch.error_file_id or "")
        assert [row["error"]["line"] for row in errors] == [2, 3]
        assert "temperature" in errors[0]["error"]["message"]
        assert {each.id async for each in client.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
        assert [each.id async for each in client.batches.list()] == [batch.id]


async def test_what_a_front_end_leaves_another_one_ends(tmp_path: Path) -> None:
    async with front_end(tmp_path, runs=False) as http:
        batch_id = (await create(http, await upload(http, request("a")))).json()["id"]
        assert (await http.get(f"/v1/batches/{batch_id}")).json()["status"] == "validating"
    async with front_end(tmp_path) as http, front_end(tmp_path) as second:
        batch = await ended(second, batch_id)
        assert batch["status"] == "completed"
        assert batch["error_file_id"] is None
        assert len(await content(http, batch["output_file_id"])) == 1


async def test_a_batch_that_was_done_when_its_front_end_died_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_end(tmp_path, runs=False) as http:
        batch_id = (await create(http, await upload(http, request("a"), "{"))).json()["id"]
    with monkeypatch.context() as death:
        ends = asyncio.Event()

        async def die(*_: Any) -> None:
            ends.set()
            await asyncio.Event().wait()

        death.setattr(service.BatchService, "_end", die)
        async with front_end(tmp_path), asyncio.timeout(20):
            await ends.wait()
    monkeypatch.setattr(service, "BatchRun", None)  # Whoever runs it again fails.
    async with front_end(tmp_path) as http:
        batch = await ended(http, batch_id)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert len(await content(http, batch["output_file_id"])) == 1
        assert len(await content(http, batch["error_file_id"])) == 1


async def test_a_fault_of_the_service_at_a_line_is_its_error_and_batches_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "FIRST_PAUSE_SECONDS", 0.001)
    async with front_end(tmp_path, fault=ValueError("a bug")) as http:
        for _ in range(2):
            batch_id = (await create(http, await upload(http, request("a")))).json()["id"]
            batch = await ended(http, batch_id)
            assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 1)
            errors = await content(http, batch["error_file_id"])
            assert errors[0]["response"]["status_code"] == 500


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    async with front_end(tmp_path, runs=False) as http:
        batch_id = (await create(http, await upload(http, request("a")))).json()["id"]
        assert (await http.post(f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
    async with front_end(tmp_path) as http:
        batch = await ended(http, batch_id)
        assert batch["status"] == "cancelled"
        assert (await http.post(f"/v1/batches/{batch_id}/cancel")).json() == batch


async def test_a_batch_whose_file_is_gone_fails(tmp_path: Path) -> None:
    async with front_end(tmp_path, runs=False) as http:
        file_id = await upload(http, request("a"))
        batch_id = (await create(http, file_id)).json()["id"]
        check_error(await http.delete(f"/v1/files/{file_id}"), 409, "file_id")
        (tmp_path / "files" / file_id / "file.json").unlink()
        assert (await http.delete(f"/v1/files/{file_id}")).status_code == 409
    async with front_end(tmp_path) as http:
        batch = await ended(http, batch_id)
        assert batch["status"] == "failed"
        assert "input file" in batch["errors"]["data"][0]["message"]


async def test_what_is_refused(tmp_path: Path) -> None:
    async with front_end(tmp_path) as http:
        file_id = await upload(http, request("a"))
        big = {"file": ("in.jsonl", "x" * 20_000)}
        huge = {"file": ("in.jsonl", "x" * 200_000)}
        refusals = [
            (await create(http, file_id, endpoint="/v1/embeddings"), 400, "endpoint"),
            (await create(http, file_id, endpoint=["/v1/completions"]), 400, "endpoint"),
            (await create(http, file_id, completion_window="1h"), 400, "completion_window"),
            (await create(http, file_id, metadata={"a": 1}), 400, "metadata"),
            (await create(http, "file-" + "0" * 24), 400, "input_file_id"),
            (await create(http, "../../etc"), 400, "input_file_id"),
            (await http.post("/v1/files", data={"purpose": "batch"}, files=big), 413, "file"),
            (await http.post("/v1/files", data={"purpose": "batch"}, files=huge), 413, "file"),
            (await http.post("/v1/files", data={"purpose": "x"}, files={"file": ("a", "b")}), 400, "purpose"),
            (await http.post("/v1/files", data={"purpose": "batch"}), 400, "file"),
            (await http.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), 400, None),
            (await http.post("/v1/files", content=ODD_FORM, headers={"content-type": ODD_CHARSET}), 400, None),
            (await http.get("/v1/files/..%2F..%2Fetc"), 404, None),
            (await http.get("/v1/files/file-1/content"), 404, None),
            (await http.get("/v1/batches/batch_" + "0" * 24), 404, None),
            (await http.get("/v1/files?limit=0"), 400, "limit"),
            (await http.get("/v1/files?after=file-1"), 400, "after"),
        ]
        for response, status, param in refusals:
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with front_end(tmp_path, runs=False) as http:
        ids = {await upload(http, request("a")) for _ in range(3)}
        first = (await http.get("/v1/files?limit=2")).json()
        rest = (await http.get(f"/v1/files?limit=2&after={first['last_id']}")).json()
        assert (first["has_more"], rest["has_more"]) == (True, False)
        assert {each["id"] for each in first["data"] + rest["data"]} == ids


async def test_without_a_directory_there_are_no_such_routes() -> None:
    app = make_app(FakeEngineClient())
    assert add_batches(app, FrontendSettings("/nowhere", MODEL)) is None
    async with http_client(app) as http:
        assert (await http.get("/v1/batches")).status_code == 404

"""/v1/files and /v1/batches: what clients may do with files and batches. It runs none."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.types import Message

from cluster.awake import awake_timeout
from cluster.batch.lines import ENDPOINTS
from cluster.batch.store import BatchStore, Record
from cluster.errors import RequestError
from cluster.frontend.http_body import read_json
from cluster.frontend.request_fields import RequestFields
from cluster.frontend.responses import encode_json

UPLOAD_SECONDS = 600.0
MAX_FILENAME = 255
MAX_METADATA = 16
_MAX_JSON_BYTES = 1 << 16
_FORM_BYTES = 1 << 16
"""What a form may have around its file."""
_MAX_PAGE = 100
_T = TypeVar("_T")


def batch_router(store: BatchStore, max_file_bytes: int) -> APIRouter:
    """The routes, over one store."""
    routes = _BatchRoutes(store, max_file_bytes)
    router = APIRouter()
    for method, path, handler in (
        ("POST", "/v1/files", routes.upload),
        ("GET", "/v1/files", routes.files),
        ("GET", "/v1/files/{file_id}", routes.file),
        ("DELETE", "/v1/files/{file_id}", routes.delete_file),
        ("GET", "/v1/files/{file_id}/content", routes.content),
        ("POST", "/v1/batches", routes.create),
        ("GET", "/v1/batches", routes.batches),
        ("GET", "/v1/batches/{batch_id}", routes.batch),
        ("POST", "/v1/batches/{batch_id}/cancel", routes.cancel),
    ):
        router.add_api_route(path, handler, methods=[method], response_model=None)
    return router


class _BatchRoutes:
    def __init__(self, store: BatchStore, max_file_bytes: int) -> None:
        self._store = store
        self._max_file_bytes = max_file_bytes

    async def upload(self, request: Request) -> Response:
        """POST /v1/files: a form with `purpose` and `file`."""
        limited = Request(request.scope, _limited(request, self._max_file_bytes + _FORM_BYTES))
        try:
            async with awake_timeout(UPLOAD_SECONDS), limited.form(max_files=1, max_fields=8) as form:
                file = form.get("file")
                if form.get("purpose") != "batch":
                    raise RequestError("purpose must be batch", "purpose")
                if not isinstance(file, UploadFile):
                    raise RequestError("file is missing: a multipart form with a file is needed", "file")
                name = file.filename or "file"
                if len(name) > MAX_FILENAME:
                    raise RequestError(f"file must have a name of at most {MAX_FILENAME} characters", "file")
                if (file.size or 0) > self._max_file_bytes:
                    raise _too_large(self._max_file_bytes)
                return _json(await asyncio.to_thread(self._store.add_file, name, file.file))
        except HTTPException as error:
            raise RequestError(f"the body is no multipart form: {error.detail}") from None
        except UnicodeError:
            raise RequestError("the body is a form in a charset that cannot be read") from None
        except TimeoutError:
            raise RequestError(f"the file was not complete within {UPLOAD_SECONDS:g} s", None, 408) from None

    async def files(self, request: Request) -> Response:
        """GET /v1/files."""
        return _page(request, await asyncio.to_thread(self._store.files))

    async def file(self, file_id: str) -> Response:
        """GET /v1/files/{file_id}."""
        return _json(await _found(self._store.file, file_id))

    async def delete_file(self, file_id: str) -> Response:
        """DELETE /v1/files/{file_id}."""
        if await asyncio.to_thread(self._store.is_read, file_id):
            raise RequestError("a batch reads this file; cancel the batch first", "file_id", 409)
        await _found(self._store.delete_file, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def content(self, file_id: str) -> Response:
        """GET /v1/files/{file_id}/content."""
        return FileResponse(await _found(self._store.content, file_id), media_type="application/octet-stream")

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        body = await read_json(request, _MAX_JSON_BYTES)
        fields = RequestFields(body)
        file_id = fields.text("input_file_id", 64) or ""
        endpoint = fields.get("endpoint")
        if endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint must be {' or '.join(ENDPOINTS)}", "endpoint")
        if fields.get("completion_window") != "24h":
            raise RequestError("completion_window must be 24h", "completion_window")
        metadata = _metadata(fields.get("metadata"))
        try:
            await asyncio.to_thread(self._store.file, file_id)
        except KeyError:
            raise RequestError("input_file_id is the id of no file", "input_file_id") from None
        return _json(await asyncio.to_thread(self._store.add_batch, file_id, endpoint, metadata))

    async def batches(self, request: Request) -> Response:
        """GET /v1/batches."""
        return _page(request, await asyncio.to_thread(self._store.batches))

    async def batch(self, batch_id: str) -> Response:
        """GET /v1/batches/{batch_id}."""
        return _json(await _found(self._store.batch, batch_id))

    async def cancel(self, batch_id: str) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        await _found(self._store.cancel, batch_id)
        return _json(await _found(self._store.batch, batch_id))


async def _found(ask: Callable[[str], _T], record_id: str) -> _T:
    try:
        return await asyncio.to_thread(ask, record_id)
    except (KeyError, FileNotFoundError):  # It may be deleted while it is looked for.
        raise RequestError("there is nothing with this id", None, 404, "not_found") from None


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA or not all(isinstance(v, str) for v in value.values()):
        raise RequestError(f"metadata must be an object of at most {MAX_METADATA} strings", "metadata")
    return value


def _page(request: Request, records: list[Record]) -> Response:
    text = request.query_params.get("limit", "20")
    if not (text.isdecimal() and len(text) < 6 and 0 < int(text) <= _MAX_PAGE):
        raise RequestError(f"limit must be a whole number from 1 to {_MAX_PAGE}", "limit")
    after = request.query_params.get("after")
    if after is not None:
        places = [place for place, record in enumerate(records) if record["id"] == after]
        if not places:
            raise RequestError("after is the id of nothing in this list", "after")
        records = records[places[0] + 1 :]
    shown = records[: int(text)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return _json({"object": "list", "data": shown, "has_more": len(shown) < len(records), **ends})


def _limited(request: Request, max_bytes: int) -> Callable[[], Any]:
    """The body, until it is too large: it must not fill the disk first."""
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise _too_large(max_bytes - _FORM_BYTES)
        return message

    return receive


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the file is larger than the limit of {max_bytes} bytes (batch.max_file_mb)", "file", 413)


def _json(value: dict[str, Any]) -> Response:
    return Response(encode_json(value), media_type="application/json")

"""Reading a request's body under limits of size and time."""

from typing import Any

from starlette.requests import Request

from cluster.awake import awake_timeout
from cluster.errors import RequestError
from cluster.frontend.json_body import parse_json_object

BODY_SECONDS = 60.0
"""How long a client may take to send its body: a slower one must not hold its connection for ever."""


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body's JSON object. Raises RequestError: 413 as soon as the body is known to be larger than
    `max_bytes`, 408 when it is not complete after BODY_SECONDS, 400 when it is no JSON object or is not said
    to be JSON; ClientDisconnect when the client left.
    """
    if not _is_json(request.headers.get("content-type")):
        raise RequestError("the content-type header must be application/json")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with awake_timeout(BODY_SECONDS):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise RequestError(f"the request body was not complete within {BODY_SECONDS:g} s", None, 408) from None
    return parse_json_object(body)


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _is_json(content_type: str | None) -> bool:
    if content_type is None:
        return True
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the request body is larger than the limit of {max_bytes} bytes", None, 413)

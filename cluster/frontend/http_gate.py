"""What stands before every route: the request id and the API key."""

import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontend.api_keys import ApiKeys
from cluster.frontend.http_errors import error_body, error_response

MAX_REQUEST_ID = 128
"""Length of a caller's x-request-id, in printable ASCII characters."""
REQUEST_ID_HEADER = "x-request-id"


TRUSTED = "chunkserve.trusted"
"""In a request's scope, where no client can put it: this process itself asks, and needs no key."""


class HttpGate:
    """ASGI middleware. The caller's request id goes back in a header and nowhere else; without one, one is made."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys, echo_request_id: bool) -> None:
        """`echo_request_id` False: whoever calls this app answers with the id itself."""
        self._app = app
        self._keys = api_keys
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
        refusal = self._refusal(scope, headers, request_id)
        app = self._app if refusal is None else error_response(*refusal, _headers(refusal[0]))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        echoes = self._echo_request_id and _is_request_id(request_id)
        await app(scope, receive, send_with_id if echoes else send)

    def _refusal(self, scope: Scope, headers: Headers, request_id: str) -> tuple[int, dict[str, Any]] | None:
        if not _is_request_id(request_id):
            message = f"{REQUEST_ID_HEADER} must have at most {MAX_REQUEST_ID} printable ASCII characters"
            return 400, error_body(400, message)
        needs_key = scope["path"].startswith("/v1/") and TRUSTED not in scope
        if needs_key and not self._keys.accept(headers.get("authorization", "")):
            return 401, error_body(401, "the API key is missing or wrong", None, "invalid_api_key")
        return None


def _headers(status: int) -> dict[str, str]:
    return {"www-authenticate": "Bearer"} if status == 401 else {}


def _is_request_id(value: str) -> bool:
    return len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable()

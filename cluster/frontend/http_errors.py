"""Errors as HTTP answers: always `{"error": {"message", "type", "param", "code"}}`."""

import http
import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cluster.errors import EngineError, RequestError, RequestFailed
from cluster.frontend.responses import encode_json

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
"""What a client is told to wait when the answer is "not now"."""
_NO_RETRY = {"x-should-retry": "false"}
"""Clients of the API repeat a 5xx by themselves: no help to a request that fails, nor what a deadline is set for."""


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The one shape of every error."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error. What is not the client's fault is logged here, and told without its inside."""
    if isinstance(error, RequestError):
        return error.status, error_body(error.status, error.message, error.param, error.code)
    if isinstance(error, RequestFailed):
        logger.error("request failed: %s", error)
        return 500, error_body(500, str(error), None, "request_failed")
    if isinstance(error, EngineError):
        logger.warning("request failed: %s", error)
        return 503, error_body(503, "the engine cannot serve this request now; try again later", None, "unavailable")
    if isinstance(error, ClientDisconnect):
        return 400, error_body(400, "the client left before its request was read")
    logger.error("request failed", exc_info=error)
    return 500, error_body(500, "internal error", None, "internal_error")


def _headers_of(error: Exception) -> dict[str, str]:
    if isinstance(error, RequestFailed):
        return _NO_RETRY
    if not isinstance(error, RequestError):
        return {}
    if error.retry_after is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    if error.status == 408:  # What still comes of the body is not the next request (RFC 9110, 15.5.9).
        return {"connection": "close"}
    return _NO_RETRY if error.status == 504 else {}


def error_response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """With `Retry-After` where trying again may help."""
    retry = {"retry-after": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    return Response(encode_json(body), status, {**retry, **(headers or {})}, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app its shape, those of the framework included."""

    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(*describe_error(error), _headers_of(error))

    async def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise TypeError("not an HTTPException") from error
        messages = {404: "there is no such route", 405: "this route does not take this method"}
        message = messages.get(error.status_code, http.HTTPStatus(error.status_code).phrase)
        body = error_body(error.status_code, message, None, "not_found" if error.status_code == 404 else None)
        return error_response(error.status_code, body, dict(error.headers or {}))

    async def on_validation_error(_: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            raise TypeError("not a RequestValidationError") from error
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(400, error_body(400, f"{name}: {first['msg']}", name))

    for kind in (RequestError, EngineError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)

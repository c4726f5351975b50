"""Good bodies, and the shape that every error has."""

from typing import Any

import httpx
from api_fakes import MODEL

GOOD = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
GOOD_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ROUTES = [("/v1/completions", GOOD), ("/v1/chat/completions", GOOD_CHAT)]


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    assert "Traceback" not in response.text
    assert "/secret" not in response.text
    return body["error"]

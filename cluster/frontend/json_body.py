"""The JSON body of a request, decoded strictly."""

import json
from typing import Any

from cluster.errors import RequestError


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The body's one JSON object. Raises RequestError (400) for anything else.

    NaN and infinities are no JSON. Escaped lone surrogates are JSON but no Unicode text: each becomes
    U+FFFD, as a browser would show it.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in body:
            value = _without_surrogates(value)
    except UnicodeDecodeError:
        raise RequestError("the request body is not valid UTF-8") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except ValueError:
        raise RequestError("the request body is not valid JSON") from None
    if not isinstance(value, dict):
        raise RequestError("the request body must be a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value

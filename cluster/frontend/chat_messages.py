"""The `messages` of a chat request, checked and brought to the form that chat templates read."""

from typing import Any

from cluster.errors import RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role of the API -> role of the template. `developer` is the API's newer word for `system`."""
_UNSUPPORTED = ("tool_calls", "tool_call_id", "function_call", "audio")


def read_messages(value: Any) -> list[dict[str, str]]:
    """Messages with `role`, `content` and perhaps `name`, all text.

    Text parts of one message are joined by line breaks. Raises RequestError (param "messages").
    """
    if not isinstance(value, list) or not value:
        raise _error("messages must be a list of at least one message")
    return [_read_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _read_message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _error(f"{where} must be an object")
    role = message.get("role")
    if role in ("tool", "function"):
        raise _error(f"{where}.role: tool messages are not supported by this server")
    if not isinstance(role, str) or role not in _ROLES:
        raise _error(f"{where}.role must be one of {', '.join(_ROLES)}")
    for name in _UNSUPPORTED:
        if message.get(name) is not None:
            raise _error(f"{where}.{name} is not supported by this server")
    result = {"role": _ROLES[role], "content": _read_content(f"{where}.content", message.get("content"))}
    author = message.get("name")
    if author is not None:
        if not isinstance(author, str):
            raise _error(f"{where}.name must be a string")
        result["name"] = author
    return result


def _read_content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _error(f"{where} must be a string or a list of at least one text part")
    return "\n".join(_read_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _read_part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise _error(f"{where} must be an object")
    if part.get("type") != "text":
        raise _error(f"{where}.type must be text; other parts are not supported by this server")
    text = part.get("text")
    if not isinstance(text, str):
        raise _error(f"{where}.text must be a string")
    return text


def _error(message: str) -> RequestError:
    return RequestError(message, param="messages")

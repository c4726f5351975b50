"""Fields that the API knows and this server does not support: refused by name, never ignored."""

from typing import Any

from cluster.errors import RequestError
from cluster.frontend.request_fields import RequestFields

_NEVER: tuple[Any, ...] = ()
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": _NEVER,
    "bad_words": _NEVER,
    "best_of": _NEVER,
    "chat_template": _NEVER,
    "documents": _NEVER,
    "guided_choice": _NEVER,
    "guided_grammar": _NEVER,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "itl_slo_ms": _NEVER,
    "logits_processors": _NEVER,
    "prompt_embeds": _NEVER,
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": _NEVER,
    "truncate_prompt_tokens": _NEVER,
    "use_beam_search": (False,),
}
"""Fields of both routes, and the values that ask for nothing."""

_HARMLESS_COMPLETION: dict[str, tuple[Any, ...]] = _HARMLESS | {"suffix": _NEVER}

_HARMLESS_CHAT: dict[str, tuple[Any, ...]] = _HARMLESS | {
    "tools": _NEVER,
    "tool_choice": ("none",),
    "functions": _NEVER,
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "audio": _NEVER,
    "modalities": (["text"],),
    "prediction": _NEVER,
    "reasoning_effort": ("none",),
    "verbosity": _NEVER,
    "web_search_options": _NEVER,
    "echo": (False,),
}


def refuse_unsupported_completion(fields: RequestFields) -> None:
    """Raises RequestError for the first unsupported field of /v1/completions that is set."""
    _refuse(fields, _HARMLESS_COMPLETION)


def refuse_unsupported_chat(fields: RequestFields) -> None:
    """Raises RequestError for the first unsupported field of /v1/chat/completions that is set."""
    _refuse(fields, _HARMLESS_CHAT)


def _refuse(fields: RequestFields, harmless: dict[str, tuple[Any, ...]]) -> None:
    for name, values in harmless.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(allowed) and value == allowed for allowed in values):
            raise RequestError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")

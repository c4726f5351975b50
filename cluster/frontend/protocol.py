"""The bodies of /v1/completions and /v1/chat/completions, validated."""

from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError
from cluster.frontend.chat_messages import read_messages
from cluster.frontend.generation_defaults import GenerationDefaults
from cluster.frontend.request_fields import RequestFields, is_integer
from cluster.frontend.sampling_fields import (
    MAX_LOGPROBS,
    MAX_N,
    StopRules,
    TokenLimits,
    read_sampling_params,
    read_seed,
    read_stop_rules,
    read_token_limits,
)
from cluster.frontend.settings import FrontendSettings
from cluster.frontend.tokenizer import RESERVED_TEMPLATE_KWARGS
from cluster.frontend.unsupported_fields import refuse_unsupported_chat, refuse_unsupported_completion
from scheduler.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""max_tokens of /v1/completions when it is not given, as in the API reference."""
MAX_PRIORITY = 2**31 - 1
MAX_CACHE_SALT = 256
"""Length of cache_salt, in characters."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What both routes have in common."""

    sampling: SamplingParams
    """max_tokens and seed are still to be set, by prompt and choice."""
    limits: TokenLimits
    stop: StopRules
    n: int
    seed: int | None
    """None: one is drawn for each prompt."""
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A body of /v1/completions. `prompts` holds texts or token ids; choice index = prompt * n + i."""

    options: GenerationOptions
    prompts: list[str] | list[list[int]]
    echo: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A body of /v1/chat/completions."""

    options: GenerationOptions
    messages: list[dict[str, str]]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BodyParser:
    """Turns JSON objects into requests; all methods raise RequestError naming the field and its limit."""

    settings: FrontendSettings
    defaults: GenerationDefaults

    def completion(self, body: dict[str, Any], vocab_size: int) -> CompletionRequest:
        fields = RequestFields(body)
        self._check_model(fields)
        refuse_unsupported_completion(fields)
        prompts = _read_prompts(fields.get("prompt"), vocab_size)
        echo = fields.boolean("echo", False)
        limits = read_token_limits(fields, COMPLETION_MAX_TOKENS, allow_zero=echo)
        num_logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
        options = self._options(fields, vocab_size, limits, num_logprobs, len(prompts))
        return CompletionRequest(options, prompts, echo)

    def chat(self, body: dict[str, Any], vocab_size: int) -> ChatRequest:
        fields = RequestFields(body)
        self._check_model(fields)
        refuse_unsupported_chat(fields)
        messages = read_messages(fields.get("messages"))
        limits = read_token_limits(fields, None)
        continue_final_message = fields.boolean("continue_final_message", False)
        add_generation_prompt = fields.boolean("add_generation_prompt", not continue_final_message)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        return ChatRequest(
            options=self._options(fields, vocab_size, limits, _read_chat_logprobs(fields), 1),
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=_read_template_kwargs(fields.get("chat_template_kwargs")),
        )

    def _check_model(self, fields: RequestFields) -> None:
        model = fields.get("model")
        if not isinstance(model, str):
            raise RequestError(f"model must be given as a string: {self.settings.model_name}", param="model")
        if model != self.settings.model_name:
            raise unknown_model(self.settings.model_name)

    def _options(
        self,
        fields: RequestFields,
        vocab_size: int,
        limits: TokenLimits,
        num_logprobs: int | None,
        num_prompts: int,
    ) -> GenerationOptions:
        n = fields.integer("n", 1, MAX_N, 1) or 1
        if num_prompts * n > self.settings.max_choices:
            raise RequestError(
                f"n times the number of prompts must be at most {self.settings.max_choices}",
                param="n" if n > 1 else "prompt",
            )
        stream = fields.boolean("stream", False)
        fields.text("user", 4096)
        cache_salt = fields.text("cache_salt", MAX_CACHE_SALT)
        if cache_salt == "":
            raise RequestError(f"cache_salt must have 1 to {MAX_CACHE_SALT} characters", param="cache_salt")
        return GenerationOptions(
            sampling=read_sampling_params(fields, self.defaults, vocab_size, limits, num_logprobs),
            limits=limits,
            stop=read_stop_rules(fields),
            n=n,
            seed=read_seed(fields),
            stream=stream,
            include_usage=_read_include_usage(fields.get("stream_options"), stream),
            priority=fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY, 0) or 0,
            cache_salt=cache_salt,
        )


def unknown_model(served: str) -> RequestError:
    """The 404 of a model that is not served."""
    return RequestError(f"model: this server has only {served}", param="model", status=404, code="model_not_found")


def _read_prompts(value: Any, vocab_size: int) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such lists, not empty",
            param="prompt",
        )
    if all(isinstance(item, str) for item in value):
        return value
    prompts = value if isinstance(value[0], list) else [value]
    for ids in prompts:
        if not isinstance(ids, list) or not ids or not all(is_integer(item, 0, vocab_size - 1) for item in ids):
            raise RequestError(
                f"prompt: token ids must be whole numbers from 0 to {vocab_size - 1}, at least one a prompt, "
                "and not mixed with text",
                param="prompt",
            )
    return prompts


def _read_chat_logprobs(fields: RequestFields) -> int | None:
    logprobs = fields.boolean("logprobs", False)
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS, 0) or 0
    if top_logprobs and not logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return top_logprobs if logprobs else None


def _read_include_usage(stream_options: Any, stream: bool) -> bool:
    if stream_options is None:
        return False
    if not isinstance(stream_options, dict):
        raise RequestError("stream_options must be an object", param="stream_options")
    if not stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    include_usage = stream_options.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise RequestError("stream_options.include_usage must be true or false", param="stream_options")
    return bool(include_usage)


def _read_template_kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    if not RESERVED_TEMPLATE_KWARGS.isdisjoint(value):
        raise RequestError(
            "chat_template_kwargs may not set " + ", ".join(sorted(RESERVED_TEMPLATE_KWARGS)),
            param="chat_template_kwargs",
        )
    return value

"""The fields of a request that say how to sample, and when to stop."""

import re
from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError
from cluster.frontend.generation_defaults import GenerationDefaults
from cluster.frontend.request_fields import RequestFields, is_integer, is_number
from scheduler.sampling_params import SamplingParams

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Of one stop string, in characters."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
"""Entries of logit_bias."""
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Temperatures below are taken as 0: dividing float32 logits by less may overflow."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StopRules:
    """What the front end itself looks at to end a text."""

    strings: tuple[str, ...] = ()
    include_in_output: bool = False
    """Stop strings, and the text of a stop token, stay in the output."""
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """How many tokens the client asks for, before clipping. `max_tokens` None: the room that is left."""

    max_tokens: int | None
    min_tokens: int


def read_token_limits(fields: RequestFields, default: int | None, *, allow_zero: bool = False) -> TokenLimits:
    """max_tokens, max_completion_tokens and min_tokens. Raises RequestError, also when they contradict."""
    low = 0 if allow_zero else 1
    older = fields.integer("max_tokens", low, MAX_TOKENS)
    newer = fields.integer("max_completion_tokens", low, MAX_TOKENS)
    if older is not None and newer is not None and older != newer:
        raise RequestError("max_completion_tokens must equal max_tokens when both are given", "max_completion_tokens")
    max_tokens = next((value for value in (newer, older) if value is not None), default)
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS, 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"min_tokens must be at most max_tokens, which is {max_tokens}", param="min_tokens")
    return TokenLimits(max_tokens, min_tokens)


def read_sampling_params(
    fields: RequestFields, defaults: GenerationDefaults, vocab_size: int, limits: TokenLimits, num_logprobs: int | None
) -> SamplingParams:
    """All that the engine needs but the final max_tokens and seed, which depend on the prompt and the choice.

    Raises RequestError naming the field and its limit.
    """
    temperature = fields.number("temperature", 0.0, 2.0, defaults.temperature)
    top_k = fields.integer("top_k", -1, 2**31 - 1, defaults.top_k) or 0
    return SamplingParams(
        max_tokens=max(1, limits.max_tokens or 1),
        min_tokens=limits.min_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=min(max(top_k, 0), vocab_size),
        top_p=fields.number("top_p", 0.0, 1.0, defaults.top_p, above_low=True),
        min_p=fields.number("min_p", 0.0, 1.0, defaults.min_p),
        repetition_penalty=_repetition_penalty(fields, defaults.repetition_penalty),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, 0.0),
        stop_token_ids=_stop_token_ids(fields, defaults, vocab_size),
        logit_bias=_logit_bias(fields, vocab_size),
        num_logprobs=num_logprobs,
    )


def read_seed(fields: RequestFields) -> int | None:
    """The seed as an unsigned 64-bit number; negative ones count from 2^64 down."""
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    return None if seed is None else seed % 2**64


def read_stop_rules(fields: RequestFields) -> StopRules:
    """Raises RequestError when `stop` is no string or list of a few non-empty strings."""
    return StopRules(
        strings=_stop_strings(fields.get("stop")),
        include_in_output=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )


def _repetition_penalty(fields: RequestFields, default: float) -> float:
    # Any positive number means something, but beyond these float32 logits overflow.
    return fields.number("repetition_penalty", 0.001, 1000.0, default)


def _stop_strings(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings", param="stop")
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise RequestError(f"stop: every stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(fields: RequestFields, defaults: GenerationDefaults, vocab_size: int) -> tuple[int, ...]:
    value = fields.get("stop_token_ids")
    ids = [] if value is None else value
    if not isinstance(ids, list) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} token ids", param="stop_token_ids"
        )
    if not all(is_integer(item, 0, vocab_size - 1) for item in ids):
        raise RequestError(
            f"stop_token_ids: every token id must be a whole number from 0 to {vocab_size - 1}", param="stop_token_ids"
        )
    eos = () if fields.boolean("ignore_eos", False) else defaults.eos_token_ids
    return tuple(sorted({*ids, *eos}))


def _logit_bias(fields: RequestFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    value = fields.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias must be an object with at most {MAX_LOGIT_BIAS} token ids as its keys", param="logit_bias"
        )
    if not all(_TOKEN_ID.fullmatch(key) and int(key) < vocab_size for key in value):
        raise RequestError(
            f"logit_bias: every key must be a token id, a whole number from 0 to {vocab_size - 1}", param="logit_bias"
        )
    if not all(is_number(bias, -100, 100) for bias in value.values()):
        raise RequestError("logit_bias: every bias must be a number from -100 to 100", param="logit_bias")
    return tuple((int(key), float(bias)) for key, bias in value.items())

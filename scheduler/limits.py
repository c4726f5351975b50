"""How many tokens a request may compute in a step, and where it ends: all limits, applied by `min`."""

from scheduler.config import SchedulerConfig
from scheduler.request import Request, RequestRefused, RequestStatus


def num_new_tokens(
    config: SchedulerConfig, request: Request, num_computed: int, budget: int, num_drafts: int = 0
) -> int:
    """Tokens to compute of a request, running or waiting, of which `num_computed` are done.

    The least of what it owes (known tokens, outputs in flight and drafts), the long-prefill threshold,
    what is left of the budget, and its length: the last token is sampled and never computed. Without
    chunking a prompt is computed whole or not at all. Zero or less: nothing to do now.
    """
    owed = request.num_tokens + request.num_output_placeholders + num_drafts - num_computed
    num_tokens = min(owed, budget, request.max_num_tokens - 1 - num_computed)
    if owed > 1:
        if not config.enable_chunked_prefill:
            return num_tokens if owed <= budget else 0
        if 0 < config.long_prefill_token_threshold < num_tokens:
            return config.long_prefill_token_threshold
    return num_tokens


def is_long_prefill(config: SchedulerConfig, request: Request, num_computed: int) -> bool:
    """Whether it owes more than the threshold when admitted; with threshold 0 every prompt does."""
    return request.num_tokens - num_computed > config.long_prefill_token_threshold


def clip_max_tokens(config: SchedulerConfig, request: Request) -> None:
    """Clip max_tokens to the room that the model length leaves. Raises RequestRefused if that leaves nothing."""
    limit = config.max_model_len
    if request.num_prompt_tokens == 0:
        raise RequestRefused("the prompt is empty; it must have at least 1 token", "prompt")
    if request.num_prompt_tokens >= limit:
        raise RequestRefused(
            f"the prompt has {request.num_prompt_tokens} tokens; the model length of {limit} tokens"
            f" leaves room for at most {limit - 1}",
            "prompt",
        )
    if request.max_tokens < 1:
        raise RequestRefused(f"max_tokens is {request.max_tokens}; it must be at least 1", "max_tokens")
    request.max_tokens = min(request.max_tokens, limit - request.num_prompt_tokens)
    if request.num_tokens >= request.max_num_tokens:
        raise RequestRefused(
            f"the request has {len(request.output_token_ids)} output tokens already;"
            f" it is complete at {request.max_tokens}",
            "max_tokens",
        )


def cut_at_stop(request: Request, token_ids: list[int]) -> tuple[list[int], RequestStatus | None]:
    """The tokens up to the one that ends the request, and how it ends (None: it goes on).

    Stop ids are masked in the sampler until min_tokens is met; the length is never gated.
    """
    room = request.max_num_tokens - request.num_tokens
    if len(token_ids) > room:
        token_ids = token_ids[:room]
    if not request.stop_token_ids.isdisjoint(token_ids):
        first = next(index for index, token_id in enumerate(token_ids) if token_id in request.stop_token_ids)
        return token_ids[: first + 1], RequestStatus.FINISHED_STOPPED
    return token_ids, RequestStatus.FINISHED_LENGTH if len(token_ids) == room else None

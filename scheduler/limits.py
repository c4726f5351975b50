"""How many tokens a request may compute in a step: all limits, applied by `min`."""

from scheduler.config import SchedulerConfig
from scheduler.request import Request


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

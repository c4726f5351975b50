"""Made-up requests that run a step before any real one: to measure its memory, and to warm a rank up."""

from collections.abc import Sequence

from scheduler.plan import NewRequest, StepLoad, StepPlan
from scheduler.sampling_params import SamplingParams

COSTLY = SamplingParams(
    max_tokens=1, temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=20, num_prompt_logprobs=20
)
"""Needs every part of the sampler."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def spread(num_tokens: int, num_requests: int, longest: int) -> list[int]:
    """At most `num_tokens` over at most `num_requests` requests, evenly, at least 1 and at most `longest` each."""
    num_requests = min(num_requests, num_tokens)
    share, extra = divmod(num_tokens, num_requests)
    return [min(longest, share + (index < extra)) for index in range(num_requests)]


def blocks_for(lengths: Sequence[int], block_size: int) -> int:
    """KV blocks that requests of these lengths take."""
    return sum(-(-length // block_size) for length in lengths)


def full_step(lengths: Sequence[int], block_size: int) -> StepPlan:
    """A first plan: a whole prompt of each length at once, each of which samples at full cost.

    It takes the blocks from 0 on.
    """
    new_requests: list[NewRequest] = []
    next_block = 0
    for index, length in enumerate(lengths):
        num_blocks = blocks_for([length], block_size)
        block_ids = list(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        new_requests.append(NewRequest(f"rehearsal-{index}", [0] * length, length, COSTLY, block_ids, 0))
    return StepPlan(0, 0, {new.request_id: len(new.token_ids) for new in new_requests}, new_requests=new_requests)


def small_steps(
    num_blocks: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> list[StepPlan]:
    """Plans within small limits: a prompt, and where the limits allow it then its decode beside a chunk."""
    if max_model_len < 2:  # not even a prompt of one token leaves room for its output
        return []
    longest = min(block_size, max_model_len - 1, max_num_batched_tokens)
    first = NewRequest("rehearsal-first", [0] * max(1, longest - 1), max(1, longest - 1), GREEDY, [0], 0)
    plans = [StepPlan(0, 0, {first.request_id: len(first.token_ids)}, new_requests=[first])]
    if longest >= 2 and min(num_blocks, max_num_seqs) >= 2:
        chunk = NewRequest("rehearsal-second", [0] * longest, longest, COSTLY, [1], 0)
        plans.append(StepPlan(0, 1, {first.request_id: 1, chunk.request_id: longest - 1}, new_requests=[chunk]))
    return plans


def profile_steps(
    num_blocks: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> list[tuple[StepPlan, StepLoad]]:
    """Plans within these limits, and what each computes: a chunk as large as can be, its decode, a chunk behind it.

    They differ in every number that a step's time depends on.
    """
    num_tokens = min(max_num_batched_tokens, (max_model_len - 4) // 2, num_blocks * block_size // 3 - 2)
    long, short = 2 * num_tokens, num_tokens // 4
    num_long = blocks_for([long + 2], block_size)
    if short < 1 or max_num_seqs < 2 or blocks_for([long + 2, short + 2], block_size) > num_blocks:
        return []
    first = NewRequest("profile-first", [0] * long, long, GREEDY, list(range(num_long)), 0)
    block_ids = list(range(num_long, num_long + blocks_for([short + 2], block_size)))
    second = NewRequest("profile-second", [0] * short, short, GREEDY, block_ids, 0)
    one, other = first.request_id, second.request_id
    return [
        (StepPlan(0, 0, {one: num_tokens}, new_requests=[first]), StepLoad(0, num_tokens, 0, _pairs(0, num_tokens))),
        (StepPlan(0, 1, {one: num_tokens}), StepLoad(0, num_tokens, 0, _pairs(num_tokens, num_tokens))),
        (StepPlan(0, 2, {one: 1}), StepLoad(1, 0, long + 1, 0)),
        (StepPlan(0, 3, {other: short}, new_requests=[second]), StepLoad(0, short, 0, _pairs(0, short))),
        (StepPlan(0, 4, {one: 1, other: 1}), StepLoad(2, 0, long + short + 3, 0)),
    ]


def _pairs(context: int, num_tokens: int) -> int:
    """Of a chunk's token and a token that it attends to, itself included."""
    return num_tokens * (2 * context + num_tokens + 1) // 2

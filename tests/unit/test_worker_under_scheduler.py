"""The real scheduler's plans, over random arrivals and aborts, run through the mirror to the right tokens."""

import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from counting_model import VOCAB_SIZE, CountingModel, continuation
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request, RequestStatus
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from workers.model_runner import ModelRunner, PendingStep
from workers.request_state import RequestState
from workers.tensor_parallel import TensorParallel
from workers.vocab import VocabShards

BLOCK_SIZE, MAX_MODEL_LEN = 4, 48


def propose(chance: random.Random, tokens: list[int]) -> list[int]:
    """What a drafter might say: right at first, wrong from some place on."""
    right = continuation(tokens, chance.randint(0, 4))
    num_right = chance.randint(0, len(right))
    return right[:num_right] + [(token + 1) % VOCAB_SIZE for token in right[num_right:]]


@pytest.mark.parametrize("uses_drafter", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**9), budget=st.sampled_from([4, 7, 40]), num_blocks=st.sampled_from([14, 20, 60]))
def test_tokens_are_right(depth: int, uses_drafter: bool, seed: int, budget: int, num_blocks: int) -> None:
    chance = random.Random(seed)
    max_num_seqs = chance.randint(1, 4)
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        block_size=BLOCK_SIZE,
        policy=chance.choice(["fcfs", "priority"]),
        overlap_depth=depth,
        uses_drafter=uses_drafter,
    )
    scheduler = Scheduler(config, num_blocks)
    state = RequestState(max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cpu"))
    cache = torch.full((num_blocks * BLOCK_SIZE,), -1, dtype=torch.int64)
    runner = ModelRunner(CountingModel(BLOCK_SIZE), [cache], state, VocabShards(TensorParallel(), [VOCAB_SIZE]))
    shared = [chance.randrange(VOCAB_SIZE) for _ in range(12)]
    requests = []
    for index in range(8):
        prompt = shared[: chance.choice([0, 9, 12])] + [chance.randrange(3) for _ in range(chance.randint(1, 14))]
        params = SamplingParams(max_tokens=chance.randint(1, 12), temperature=0.0)
        requests.append(Request(f"r{index}", prompt, params, index, priority=chance.randrange(3)))
    arriving, in_flight = deque(requests), deque[tuple[StepPlan, PendingStep]]()
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    aborted: set[str] = set()
    while arriving or in_flight or scheduler.has_unfinished_requests():
        if arriving and chance.random() < 0.5:
            scheduler.add_request(arriving.popleft())
        if chance.random() < 0.03 and scheduler.requests:
            victim = chance.choice(sorted(scheduler.requests))
            scheduler.finish_request(victim, RequestStatus.FINISHED_ABORTED)
            aborted.add(victim)
        while len(in_flight) < depth and (plan := scheduler.schedule()) is not None:
            in_flight.append((plan, runner.launch(plan)))
        if in_flight:
            plan, pending = in_flight.popleft()
            result = runner.collect(pending)
            if uses_drafter:
                result = with_drafts(result, outputs, requests, chance)
            for output in scheduler.update_from_result(plan, result):
                outputs[output.request_id] += output.new_token_ids
    for request in requests:
        expected = continuation(list(request.prompt_token_ids), request.sampling_params.max_tokens)
        got = outputs[request.request_id]
        assert got == (expected[: len(got)] if request.request_id in aborted else expected)


def with_drafts(
    result: StepResult, outputs: dict[str, list[int]], requests: list[Request], chance: random.Random
) -> StepResult:
    prompts = {request.request_id: list(request.prompt_token_ids) for request in requests}
    drafts = {
        request_id: propose(chance, prompts[request_id] + outputs[request_id] + sampled)
        for request_id, sampled in result.sampled_token_ids.items()
    }
    return replace(result, draft_token_ids={request_id: tokens for request_id, tokens in drafts.items() if tokens})

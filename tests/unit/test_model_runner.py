"""One path from plan to result, over a model whose next token is a hash of its context."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from counting_model import VOCAB_SIZE, CountingModel, continuation
from hypothesis import given
from hypothesis import strategies as st

from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers import model_runner
from workers.model_runner import ModelRunner, count_accepted
from workers.request_state import PlanError, RequestState
from workers.tensor_parallel import TensorParallel
from workers.vocab import VocabShards

BLOCK_SIZE = 4


class Bench:
    """A runner with its mirror, and plans with blocks to spare."""

    def __init__(self, broken_tokens: frozenset[int] = frozenset()) -> None:
        self.model = CountingModel(BLOCK_SIZE, broken_tokens)
        self.state = RequestState(4, 64, BLOCK_SIZE, torch.device("cpu"))
        cache = torch.full((4 * 64,), -1, dtype=torch.int64)
        self.runner = ModelRunner(self.model, [cache], self.state, VocabShards(TensorParallel(), [VOCAB_SIZE]))

    @staticmethod
    def request(index: int, tokens: list[int], **params: float) -> NewRequest:
        sampling = SamplingParams(max_tokens=50, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
        return NewRequest(f"r{index}", tokens, len(tokens), sampling, list(range(index * 16, index * 16 + 16)), 0)


def test_a_step_without_samples_gives_an_empty_result() -> None:
    bench = Bench()
    plan = StepPlan(3, 8, {"r0": 3}, new_requests=[bench.request(0, [1, 2, 3, 4])])
    result = bench.runner.collect(bench.runner.launch(plan))
    assert (result.epoch, result.step_id) == (3, 8)
    assert (result.sampled_token_ids, result.logprobs, result.prompt_logprobs, result.errors) == ({}, {}, {}, {})
    assert result.execute_seconds > 0


def test_a_step_is_launched_before_the_one_before_it_is_collected() -> None:
    bench = Bench()
    prompt = [5, 6, 7]
    first = bench.runner.launch(StepPlan(0, 0, {"r0": 3}, new_requests=[bench.request(0, prompt)]))
    second = bench.runner.launch(StepPlan(0, 1, {"r0": 1}))
    third = bench.runner.launch(StepPlan(0, 2, {"r0": 1}))
    results = [bench.runner.collect(pending) for pending in (first, second, third)]
    assert [result.sampled_token_ids["r0"] for result in results] == [[t] for t in continuation(prompt, 3)]
    assert bench.model.num_forwards == 3


def test_a_step_is_ready_when_its_values_are_here_or_it_verifies_drafts() -> None:
    bench = Bench()
    plain = bench.runner.launch(StepPlan(0, 0, {"r0": 3}, new_requests=[bench.request(0, [5, 6, 7])]))
    assert plain.is_ready()  # a CPU is done when it returns
    on_the_way = SimpleNamespace(done=lambda: False)
    assert not replace(plain, copies=on_the_way).is_ready()
    bench.runner.collect(plain)
    drafting = bench.runner.launch(StepPlan(0, 1, {"r0": 2}, spec_token_ids={"r0": [1]}))
    assert replace(drafting, copies=on_the_way).is_ready()


def test_the_time_of_a_step_launched_early_starts_where_the_one_before_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=iter([10.0, 11.0, 15.0, 18.0]).__next__)
    monkeypatch.setattr(model_runner, "time", clock)
    bench = Bench()
    first = bench.runner.launch(StepPlan(0, 0, {"r0": 3}, new_requests=[bench.request(0, [5, 6, 7])]))
    second = bench.runner.launch(StepPlan(0, 1, {"r0": 1}))
    assert [bench.runner.collect(step).execute_seconds for step in (first, second)] == [5.0, 3.0]


@pytest.mark.parametrize("num_right", range(5))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_up_to_the_first_wrong_one(num_right: int, temperature: float) -> None:
    plain = Bench()
    params = {"temperature": temperature, "seed": 9, "frequency_penalty": 0.3, "num_logprobs": 2}
    plan = StepPlan(0, 0, {"r0": 3}, new_requests=[plain.request(0, [5, 6, 7], **params)])
    expected: list[int] = []
    logprobs = []
    for step in range(8):
        result = plain.runner.collect(plain.runner.launch(plan))
        expected += result.sampled_token_ids["r0"]
        logprobs += result.logprobs["r0"]
        plan = StepPlan(0, step + 1, {"r0": 1})

    bench = Bench()
    plan = StepPlan(0, 0, {"r0": 3}, new_requests=[bench.request(0, [5, 6, 7], **params)])
    assert bench.runner.collect(bench.runner.launch(plan)).sampled_token_ids == {"r0": expected[:1]}
    drafts = expected[1 : 1 + num_right] + [(token + 1) % VOCAB_SIZE for token in expected[1 + num_right : 5]]
    result = bench.runner.collect(bench.runner.launch(StepPlan(0, 1, {"r0": 5}, spec_token_ids={"r0": drafts})))
    assert result.sampled_token_ids == {"r0": expected[1 : num_right + 2]}
    assert result.logprobs == {"r0": logprobs[1 : num_right + 2]}
    # The rejected ones left no trace: the next step goes on where the last accepted token ended.
    result = bench.runner.collect(bench.runner.launch(StepPlan(0, 2, {"r0": 1})))
    assert result.sampled_token_ids == {"r0": [expected[num_right + 2]]}


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_accepted_drafts_are_the_common_prefix(drafts: list[int], sampled: list[int]) -> None:
    length = min(len(drafts), len(sampled))
    drafts, sampled = drafts[:length], sampled[:length]
    count = count_accepted(drafts, sampled)
    assert drafts[:count] == sampled[:count]
    assert count == length or drafts[count] != sampled[count]


def test_a_request_cannot_run_on_while_its_drafts_are_unverified() -> None:
    bench = Bench()
    plan = StepPlan(0, 0, {"r0": 4}, new_requests=[bench.request(0, [5, 6, 7])], spec_token_ids={"r0": [1]})
    bench.runner.launch(plan)
    with pytest.raises(PlanError, match="verified"):
        bench.runner.launch(StepPlan(0, 1, {"r0": 1}))


@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_prompt_logprobs_join_across_chunks(chunk: int) -> None:
    bench = Bench()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    new = bench.request(0, prompt, num_prompt_logprobs=2)
    starts, entries = [], []
    for step, start in enumerate(range(0, len(prompt), chunk)):
        scheduled = {"r0": min(chunk, len(prompt) - start)}
        plan = StepPlan(0, step, scheduled, new_requests=[new] if step == 0 else [])
        result = bench.runner.collect(bench.runner.launch(plan))
        if "r0" in result.prompt_logprobs:
            starts.append(result.prompt_logprobs["r0"].start)
            entries += result.prompt_logprobs["r0"].tokens
    assert result.sampled_token_ids == {"r0": continuation(prompt, 1)}
    assert starts == [start + 1 for start in range(0, len(prompt) - 1, chunk)]
    assert [entry.token_id for entry in entries] == prompt[1:]
    logits = torch.zeros(VOCAB_SIZE)
    logits[0] = 1.0
    high, low = logits.log_softmax(0)[:2].tolist()
    for position, entry in enumerate(entries):
        best = continuation(prompt[: position + 1], 1)[0]
        assert entry.logprob == pytest.approx(high if prompt[position + 1] == best else low)
        assert entry.top == [(best, pytest.approx(high)), (0 if best else 1, pytest.approx(low))]


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    bench = Bench(broken_tokens=frozenset([13]))
    good, bad, sampled_bad = [1, 2, 3], [4, 13], [5, 13]
    plan = StepPlan(
        0,
        0,
        {"r0": 3, "r1": 2, "r2": 2},
        new_requests=[
            bench.request(0, good),
            bench.request(1, bad, num_logprobs=1),
            bench.request(2, sampled_bad, temperature=1.0),
        ],
    )
    result = bench.runner.collect(bench.runner.launch(plan))
    assert result.sampled_token_ids == {"r0": continuation(good, 1)}
    assert set(result.errors) == {"r1", "r2"}
    assert result.logprobs == {}
    assert bench.runner.collect(bench.runner.launch(StepPlan(0, 1, {"r0": 1}, finished_request_ids=["r1", "r2"])))


def test_a_fault_behind_a_rejected_draft_is_none() -> None:
    bench = Bench(broken_tokens=frozenset([13]))
    prompt = next(p for p in ([5, 6, first] for first in range(90)) if continuation(p, 1)[0] not in (13, p[-1]))
    plan = StepPlan(0, 0, {"r0": 4}, new_requests=[bench.request(0, prompt)], spec_token_ids={"r0": [13]})
    result = bench.runner.collect(bench.runner.launch(plan))
    assert (result.sampled_token_ids, result.errors) == ({"r0": continuation(prompt, 1)}, {})


def test_a_fault_in_a_chunk_that_is_read_for_its_prompt_is_an_error() -> None:
    bench = Bench(broken_tokens=frozenset([13]))
    plan = StepPlan(0, 0, {"r0": 2}, new_requests=[bench.request(0, [13, 2, 3], num_prompt_logprobs=0)])
    result = bench.runner.collect(bench.runner.launch(plan))
    assert set(result.errors) == {"r0"}
    assert result.prompt_logprobs == {}

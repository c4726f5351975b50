"""The sampler, in torch and in C++, against one row at a time; the distributions it draws from; its independence."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import kept_ids, log_softmax, process, ranked_ids, sample_row

from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers import draws, sampler
from workers.batch import RowSet
from workers.kernels.sampling import SamplingKernels
from workers.penalties import adjust_logits
from workers.request_state import RequestState
from workers.sampler import SampledTokens, sample
from workers.tensor_parallel import TensorParallel
from workers.vocab import VocabShards

VOCAB_SIZE = 60
CPU = torch.device("cpu")

params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.0, 1e-7, 0.3, 1.0, 1.9]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 30, 200]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.85, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1, -0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.45, -0.9]),
    seed=st.integers(0, (1 << 64) - 1),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3).map(tuple),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100)), max_size=2).map(tuple),
    num_logprobs=st.sampled_from([None, None, 0, 3, 20]),
)


@dataclass
class Case:
    """One row: what the request has so far, and the logits it gets next."""

    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    logits: torch.Tensor
    """[vocab] float32"""


def make_case(params: SamplingParams, random_seed: int, coarse: bool = False) -> Case:
    """Coarse logits have many exact ties."""
    generator = np.random.default_rng(random_seed)
    num_prompt, num_output = int(generator.integers(1, 8)), int(generator.integers(0, 9))
    tokens = generator.integers(0, VOCAB_SIZE, num_prompt + num_output).tolist()
    logits = generator.normal(0, 2.5, VOCAB_SIZE).astype(np.float32)
    if coarse:
        logits = np.round(logits)
    return Case(params, tokens, num_prompt, torch.from_numpy(logits))


def mirror(cases: list[Case]) -> tuple[torch.Tensor, RowSet, RequestState]:
    """Logits [rows, vocab], rows and state of one request a case."""
    state = RequestState(len(cases), 64, 64, CPU)
    plan = StepPlan(0, 0, {})
    for index, case in enumerate(cases):
        plan.new_requests.append(NewRequest(str(index), case.tokens, case.num_prompt, case.params, [0], 0))
    state.apply_plan(plan)
    numbers = np.arange(len(cases))
    rows = RowSet(
        numbers,
        state.slots_of([str(index) for index in numbers]),
        numbers,
        np.array([len(case.tokens) for case in cases]),
    )
    return torch.stack([case.logits for case in cases]), rows, state


class GatheredShards(VocabShards):
    """A group of one that takes the way of larger groups."""

    is_whole = False


@dataclass(frozen=True, slots=True)
class Way:
    """How rows get their tokens."""

    native: bool
    shards: type[VocabShards] = VocabShards
    candidates: int = 1024
    group_rows: int = 1000

    def sample(self, logits: torch.Tensor, rows: RowSet, state: RequestState) -> SampledTokens:
        vocab_size = logits.shape[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draws, "CPU_CANDIDATES", self.candidates)
            patch.setattr(sampler, "GROUP_ELEMENTS", self.group_rows * vocab_size)
            shards = self.shards(TensorParallel(), [vocab_size])
            return sample(logits, rows, state, shards, SamplingKernels() if self.native else None)


WAYS = {
    "torch": Way(native=False),
    "torch, few candidates, small groups": Way(native=False, candidates=4, group_rows=3),
    "native": Way(native=True),
    "native, gathered in small groups": Way(native=True, shards=GatheredShards, group_rows=3),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
torch_and_native = pytest.mark.parametrize("way", [WAYS["torch"], WAYS["native"]], ids=["torch", "native"])


def run(cases: list[Case], way: Way) -> SampledTokens:
    return way.sample(*mirror(cases))


def expected_token(case: Case) -> int:
    return sample_row(case.logits.double().numpy(), case.tokens, case.num_prompt, case.params)


@every_way
@settings(max_examples=80)
@given(many=st.lists(params_strategy, min_size=1, max_size=8), random_seed=st.integers(0, 10**6), coarse=st.booleans())
def test_tokens_are_those_of_one_row_at_a_time(
    way: Way, many: list[SamplingParams], random_seed: int, coarse: bool
) -> None:
    cases = [make_case(params, random_seed + index, coarse) for index, params in enumerate(many)]
    sampled = run(cases, way)
    assert sampled.token_ids.tolist() == [expected_token(case) for case in cases]
    assert sampled.finite.all()


@settings(max_examples=60)
@given(many=st.lists(params_strategy, min_size=1, max_size=8), random_seed=st.integers(0, 10**6))
def test_adjusted_logits_are_those_of_one_row_at_a_time(many: list[SamplingParams], random_seed: int) -> None:
    cases = [make_case(params, random_seed + index) for index, params in enumerate(many)]
    logits, rows, state = mirror(cases)
    adjust_logits(logits, rows, state)
    for row, case in zip(logits, cases, strict=True):
        expected = process(case.logits.double().numpy(), case.tokens, case.num_prompt, case.params)
        assert np.allclose(row.numpy(), expected, atol=1e-4)


@torch_and_native
def test_stop_tokens_are_masked_until_min_tokens_were_generated(way: Way) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[4, 9]] = torch.tensor([3.0, 2.0])
    for temperature in (0.0, 1e-3):
        params = SamplingParams(max_tokens=9, temperature=temperature, min_tokens=2, stop_token_ids=(4,))
        cases = [Case(params, [1, *output], 1, logits) for output in ([], [9], [9, 9], [9, 9, 9])]
        assert run(cases, way).token_ids.tolist() == [9, 9, 4, 4]


@every_way
@settings(max_examples=40)
@given(many=st.lists(params_strategy, min_size=2, max_size=9), random_seed=st.integers(0, 10**6), data=st.data())
def test_neighbours_do_not_matter(way: Way, many: list[SamplingParams], random_seed: int, data: st.DataObject) -> None:
    cases = [make_case(params, random_seed + index) for index, params in enumerate(many)]
    alone = [run([case], way) for case in cases]
    chosen = data.draw(st.permutations(range(len(cases))))[: data.draw(st.integers(1, len(cases)))]
    together = run([cases[index] for index in chosen], way)
    assert together.token_ids.tolist() == [alone[index].token_ids.item() for index in chosen]
    with_logprobs = [index for index in chosen if cases[index].params.num_logprobs is not None]
    assert [chosen[row] for row in together.logprob_rows] == with_logprobs
    if with_logprobs:
        wanted = [cases[index].params.num_logprobs or 0 for index in with_logprobs]
        entries = together.logprobs.to_list(wanted) if together.logprobs is not None else []
        for index, entry, num_top in zip(with_logprobs, entries, wanted, strict=True):
            theirs = alone[index].logprobs
            assert theirs is not None
            assert [entry] == theirs.to_list([num_top])


@torch_and_native
@settings(max_examples=40)
@given(params=params_strategy, random_seed=st.integers(0, 10**6), coarse=st.booleans())
def test_logprobs_are_of_the_raw_distribution(way: Way, params: SamplingParams, random_seed: int, coarse: bool) -> None:
    case = make_case(params, random_seed, coarse)
    sampled = run([case], way)
    if params.num_logprobs is None:
        assert sampled.logprobs is None
        return
    assert sampled.logprobs is not None
    [entry] = sampled.logprobs.to_list([params.num_logprobs])
    expected = log_softmax(case.logits.double().numpy())
    assert entry.token_id == sampled.token_ids.item()
    assert math.isclose(entry.logprob, expected[entry.token_id], abs_tol=1e-5)
    assert [token for token, _ in entry.top] == ranked_ids(case.logits.double().numpy())[: params.num_logprobs]
    for token, logprob in entry.top:
        assert math.isclose(logprob, expected[token], abs_tol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, temperature=0.5),
        SamplingParams(max_tokens=1, temperature=1.5, top_k=5),
        SamplingParams(max_tokens=1, top_p=0.7),
        SamplingParams(max_tokens=1, min_p=0.1),
        SamplingParams(max_tokens=1, temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, logit_bias=((3, 2.0),)),
    ],
    ids=["plain", "cool", "top_k", "top_p", "min_p", "all"],
)
@pytest.mark.parametrize("along", ["positions", "seeds"])
@torch_and_native
def test_draws_follow_the_truncated_softmax(way: Way, params: SamplingParams, along: str) -> None:
    vocab_size, count = 12, 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 1.5
    if along == "positions":
        state = RequestState(1, count + 2, 64, CPU)
        state.apply_plan(StepPlan(0, 0, {}, new_requests=[NewRequest("a", [1], 1, params, [0], 0)]))
        slots, context_lens = np.zeros(count, np.int64), np.arange(1, count + 1)
    else:
        state = RequestState(count, 4, 64, CPU)
        slots, context_lens = np.arange(count), np.full(count, 1)
        for slot in range(count):
            state.sampling.set(slot, params)
        state.sampling.seed[:] = slots
        state.num_prompt[:] = 1
    rows = RowSet(slots, slots, slots, context_lens)
    sampled = way.sample(logits.expand(count, -1), rows, state)
    scaled = process(logits.double().numpy(), [1], 1, params) / params.temperature
    kept = kept_ids(scaled, params)
    weights = np.exp(scaled[kept] - scaled.max())
    expected = weights / weights.sum() * count
    counts = np.bincount(sampled.token_ids.numpy(), minlength=vocab_size)
    assert counts[kept].sum() == count
    freedom = max(1, len(kept) - 1)
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    assert (statistic - freedom) / math.sqrt(2 * freedom) < 4


@settings(max_examples=40)
@given(random_seed=st.integers(0, 10**6), params=params_strategy)
def test_the_plain_reference_agrees_with_transformers(random_seed: int, params: SamplingParams) -> None:
    case = make_case(params, random_seed)
    scores = case.logits.double().unsqueeze(0)
    context = torch.tensor([case.tokens])
    penalty = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    plain = SamplingParams(max_tokens=1, repetition_penalty=params.repetition_penalty)
    ours = process(scores[0].numpy(), case.tokens, case.num_prompt, plain)
    assert np.allclose(penalty(context, scores)[0].numpy(), ours)
    if params.top_k:
        scores = transformers.TopKLogitsWarper(params.top_k)(context, scores)
    if params.top_p < 1:
        scores = transformers.TopPLogitsWarper(params.top_p)(context, scores)
    if params.min_p:
        scores = transformers.MinPLogitsWarper(params.min_p)(context, scores)
    kept = kept_ids(case.logits.double().numpy(), params)
    assert sorted(kept) == scores[0].isfinite().nonzero().flatten().tolist()


@torch_and_native
def test_penalties_count_up_to_the_row_and_no_further(way: Way) -> None:
    # Two rows of one request, as when a draft is verified: only the second row has seen token 5 twice.
    params = SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=1.0)
    state = RequestState(1, 64, 64, CPU)
    state.apply_plan(StepPlan(0, 0, {}, new_requests=[NewRequest("a", [5, 5, 5], 1, params, [0], 0)]))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 5], logits[:, 9] = 3.5, 2.0
    rows = RowSet(np.zeros(2, np.int64), np.zeros(2, np.int64), np.arange(2), np.array([2, 3]))
    assert way.sample(logits, rows, state).token_ids.tolist() == [5, 9]


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("place", [7, VOCAB_SIZE - 1])
@torch_and_native
def test_a_faulty_row_leaves_the_others_alone(way: Way, place: int, fault: float) -> None:
    params = [
        SamplingParams(max_tokens=1, temperature=temperature, num_logprobs=wanted, seed=seed)
        for seed, (temperature, wanted) in enumerate([(0.0, None), (0.0, None), (1.0, 2), (1.0, 2), (1.0, None)])
    ]
    cases = [make_case(each, index) for index, each in enumerate(params)]
    for index in (1, 3):
        cases[index].logits[place] = fault
    sampled = run(cases, way)
    assert sampled.finite.tolist() == [True, False, True, False, True]
    for index in (0, 2, 4):
        assert sampled.token_ids[index] == expected_token(cases[index])
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < VOCAB_SIZE)).all()
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprobs.isnan().tolist() == [False, True]
    assert ((sampled.logprobs.top_ids >= 0) & (sampled.logprobs.top_ids < VOCAB_SIZE)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch_and_native
def test_a_row_of_nothing_but_minus_infinity_is_faulty(way: Way, temperature: float) -> None:
    case = make_case(SamplingParams(max_tokens=1, temperature=temperature), 1)
    case.logits[:-1] = -math.inf
    sampled = run([case], way)
    assert (sampled.finite.item(), sampled.token_ids.item()) == (True, VOCAB_SIZE - 1)
    case.logits[:] = -math.inf
    assert not run([case], way).finite.item()


@torch_and_native
def test_candidates_are_enough_for_a_vocabulary_larger_than_their_number(way: Way) -> None:
    vocab_size, count = 5000, 24
    generator = np.random.default_rng(0)
    cases = []
    for index in range(count):
        # From peaked, where few candidates hold the mass, to flat, where every token is needed.
        logits = torch.from_numpy(generator.normal(0, 0.02 + 3 * index / count, vocab_size).astype(np.float32))
        params = SamplingParams(
            max_tokens=1, top_k=[0, 0, 2000][index % 3], top_p=[0.9, 0.99, 0.8][index % 3], seed=index
        )
        cases.append(Case(params, [1], 1, logits))
    assert run(cases, way).token_ids.tolist() == [expected_token(case) for case in cases]


@every_way
def test_greedy_ties_go_to_the_lowest_id(way: Way) -> None:
    case = make_case(SamplingParams(max_tokens=1, temperature=0.0), 0)
    case.logits[:] = 0.0
    case.logits[[40, 11, 33]] = 5.0
    assert run([case], way).token_ids.item() == 11
    biased = Case(SamplingParams(max_tokens=1, temperature=0.0, logit_bias=((50, 5.0),)), [1], 1, case.logits)
    assert run([biased], way).token_ids.item() == 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch_and_native
def test_half_precision_logits_give_the_token_of_their_float32_values(way: Way, dtype: torch.dtype) -> None:
    for params in (SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, top_p=0.9)):
        case = make_case(params, 5)
        half = Case(params, case.tokens, case.num_prompt, case.logits.to(dtype))
        whole = Case(params, case.tokens, case.num_prompt, case.logits.to(dtype).float())
        assert run([half], way).token_ids.item() == run([whole], way).token_ids.item() == expected_token(whole)

"""Sampling in C++ against torch's over whole vocabularies, and at the ends of what noise and sizes can be."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_noise import GAMMA, MASK, mix, unmix

from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers.batch import RowSet
from workers.kernels.library import library
from workers.kernels.sampling import PARAMETERS, SamplingKernels
from workers.logprobs import compute_logprobs
from workers.request_state import RequestState
from workers.sampler import SampledTokens, sample
from workers.tensor_parallel import TensorParallel
from workers.vocab import VocabShards

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    library().set_num_threads(request.param)
    yield
    library().set_num_threads(1)


def mirror(many: list[SamplingParams], vocab_size: int, random_seed: int) -> tuple[RowSet, RequestState]:
    """A row of each request, which has some random tokens."""
    generator = np.random.default_rng(random_seed)
    state = RequestState(len(many), 128, 128, torch.device("cpu"))
    plan = StepPlan(0, 0, {})
    lengths = generator.integers(2, 100, len(many))
    for index, (params, length) in enumerate(zip(many, lengths.tolist(), strict=True)):
        tokens = generator.integers(0, vocab_size, length).tolist()
        plan.new_requests.append(NewRequest(str(index), tokens, length // 2, params, [0], 0))
    state.apply_plan(plan)
    numbers = np.arange(len(many))
    return RowSet(numbers, state.slots_of([str(index) for index in numbers]), numbers, lengths), state


def sample_both(logits: torch.Tensor, many: list[SamplingParams], random_seed: int) -> tuple[SampledTokens, ...]:
    """By torch and by the kernels."""
    vocab_size = logits.shape[1]
    rows, state = mirror(many, vocab_size, random_seed)
    shards = VocabShards(TensorParallel(), [vocab_size])
    return tuple(sample(logits, rows, state, shards, kernels) for kernels in (None, SamplingKernels()))


def random_logits(rows: int, vocab_size: int, random_seed: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random_seed)
    return (spread * torch.randn(rows, vocab_size, generator=generator)).to(dtype)


KINDS = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 0.05, "temperature": 1.5},
    "top_k": {"top_k": 50},
    "large top_k": {"top_k": 3000, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": -0.3, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_vocabularies_give_the_tokens_of_torch(dtype: torch.dtype, kind: dict[str, float]) -> None:
    for round_number, spread in enumerate((0.02, 1.0, 3.0, 9.0)):
        seeds = range(100 * round_number, 100 * round_number + 6)
        many = [SamplingParams(max_tokens=200, seed=seed, **kind) for seed in seeds]  # type: ignore[arg-type]
        logits = random_logits(len(many), 49152, round_number, spread, dtype)
        torchs, natives = sample_both(logits, many, round_number)
        assert natives.token_ids.tolist() == torchs.token_ids.tolist()


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.sampled_from([0, 60]),
    temperature=st.sampled_from([0.0, 1e-7, 0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 7, 40, 900]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.4, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.1]),
    frequency_penalty=st.sampled_from([0.0, -0.9]),
    seed=st.integers(0, MASK),
    stop_token_ids=st.sampled_from([(), (0,)]),
    logit_bias=st.sampled_from([(), ((0, 2.5),)]),
    num_logprobs=st.sampled_from([None, 0, 5]),
)


@settings(max_examples=150)
@given(
    many=st.lists(params_strategy, min_size=1, max_size=9),
    vocab_size=st.sampled_from([1, 2, 15, 16, 17, 33, 256, 1000, 3001]),
    spread=st.sampled_from([0.0, 0.5, 4.0]),
    dtype=st.sampled_from(DTYPES),
    random_seed=st.integers(0, 10**6),
)
def test_any_parameters_and_sizes_give_what_torch_gives(
    many: list[SamplingParams], vocab_size: int, spread: float, dtype: torch.dtype, random_seed: int
) -> None:
    logits = random_logits(len(many), vocab_size, random_seed, spread, dtype)
    torchs, natives = sample_both(logits, many, random_seed)
    assert natives.token_ids.tolist() == torchs.token_ids.tolist()
    assert natives.finite.all()
    assert natives.logprob_rows.tolist() == torchs.logprob_rows.tolist()
    if torchs.logprobs is not None:
        assert natives.logprobs is not None
        assert natives.logprobs.top_ids.equal(torchs.logprobs.top_ids)
        torch.testing.assert_close(natives.logprobs.logprobs, torchs.logprobs.logprobs, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(natives.logprobs.top_logprobs, torchs.logprobs.top_logprobs, rtol=1e-6, atol=2e-6)


@settings(max_examples=60)
@given(
    picked=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    vocab_size=st.sampled_from([1, 5, 16, 100, 4099]),
    num_top=st.sampled_from([0, 1, 4, 20]),
    coarse=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    random_seed=st.integers(0, 10**6),
)
def test_logprobs_of_any_rows(
    picked: list[int], vocab_size: int, num_top: int, coarse: bool, dtype: torch.dtype, random_seed: int
) -> None:
    logits = random_logits(6, vocab_size, random_seed, 3.0, dtype)
    if coarse:
        logits = logits.round()
    token_ids = torch.from_numpy(np.random.default_rng(random_seed).integers(0, vocab_size, len(picked)))
    ours = compute_logprobs(logits, np.array(picked), token_ids, num_top, SamplingKernels())
    expected = logits[picked].double().log_softmax(dim=1)
    ranked = logits[picked].double().sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    assert ours.top_ids.equal(ranked)
    torch.testing.assert_close(ours.top_logprobs.double(), expected.gather(1, ranked), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        ours.logprobs.double(), expected.gather(1, token_ids[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )


def seed_with(hash_of_token: int, token_id: int) -> int:
    """The seed that gives a token at output position 0 this hash."""
    key = (unmix(hash_of_token) - (token_id + 1) * GAMMA) & MASK
    return (unmix(unmix(key)) - GAMMA) & MASK


@pytest.mark.parametrize("token_id", [0, 13, 47])
@pytest.mark.parametrize("depth", [1.0, 20.0, 30.0, 35.0, 36.0, 38.0, 41.0, 60.0])
def test_the_largest_noise_lifts_a_token_as_far_as_it_reaches(depth: float, token_id: int) -> None:
    params = SamplingParams(max_tokens=9, seed=seed_with(MASK, token_id))
    logits = torch.full((1, 48), -500.0)
    logits[0, 21], logits[0, token_id] = 0.0, -depth
    rows, state = mirror([params], 48, 0)
    rows = RowSet(rows.requests, rows.slots, rows.rows, state.num_prompt[rows.slots])
    key = mix(mix((params.seed + GAMMA) & MASK))
    rival = -math.log(-math.log(((mix((key + 22 * GAMMA) & MASK) >> 12) + 0.5) / 2**52))
    reach = -math.log(-math.log1p(-(2.0**-53))) - rival
    for kernels in (None, SamplingKernels()):
        sampled = sample(logits, rows, state, VocabShards(TensorParallel(), [48]), kernels)
        assert sampled.token_ids.item() == (token_id if depth < reach else 21)


def test_the_smallest_noise_holds_the_best_token_back() -> None:
    rows, state = mirror([SamplingParams(max_tokens=9, seed=seed_with(0, 5))], 48, 0)
    rows = RowSet(rows.requests, rows.slots, rows.rows, state.num_prompt[rows.slots])
    logits = torch.zeros(1, 48)
    logits[0, 5] = 2.0
    shards = VocabShards(TensorParallel(), [48])
    torchs, natives = (sample(logits, rows, state, shards, kernels) for kernels in (None, SamplingKernels()))
    assert natives.token_ids.item() == torchs.token_ids.item() != 5


def test_the_parameters_are_laid_out_as_in_c() -> None:
    assert PARAMETERS.itemsize == library().function("parameters_bytes")()


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("poisoned", [0, 7, 17, 39])
def test_what_stops_being_a_number_after_it_was_read_gives_a_token_and_spoils_no_other_row(
    top_k: int, poisoned: int
) -> None:
    """Such a row has no ranking: to search it by ranks may have no end."""
    parameters = np.array([(0.9, 0.0, 1, top_k, 1.0, 1.0, 0.0, 0.0)], PARAMETERS)
    logits = random_logits(2, 40, 3, 1.0, torch.float32)
    additions = (np.array([0, 1, 1]), np.array([poisoned]), np.array([math.nan], np.float32))
    numbers = np.zeros(2, np.int64)
    context = torch.zeros(1, 8, dtype=torch.int32)
    sampled = [
        SamplingKernels().sample(logits, parameters.ctypes.data, numbers, context, numbers, numbers, added)
        for added in (additions, None)
    ]
    assert 0 <= sampled[0][0][0] < 40
    assert sampled[0][0][1] == sampled[1][0][1]
    assert all(finite.all() for _, finite in sampled)  # what the model gave


def test_ids_outside_the_vocabulary_touch_nothing() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=1.0, logit_bias=((90, 5.0),))
    rows, state = mirror([params], 40, 0)
    state.token_ids[:, :4] = torch.tensor([40, 99, -1, 2**31 - 1])
    logits = torch.zeros(1, 40)
    logits[0, 3] = 50.0
    assert sample(logits, rows, state, VocabShards(TensorParallel(), [40]), SamplingKernels()).token_ids.item() == 3
    outside = compute_logprobs(logits, np.zeros(2, np.int64), torch.tensor([40, -1]), 0, SamplingKernels())
    assert outside.logprobs.isnan().all()

"""Noise without state: known values, uniformity, independence of its neighbours, and the softmax it samples."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.noise import gumbel_noise

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    """The inverse of `mix`."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        mixed = x
        for _ in range(64 // shift):
            x = mixed ^ (x >> shift)
        x = x * pow(factor, -1, 1 << 64) & MASK
    return x


def expected_noise(seed: int, position: int, token_id: int) -> float:
    """The documented formula in Python's unbounded integers."""
    key = mix((mix((seed + GAMMA) & MASK) + position * GAMMA) & MASK)
    uniform = ((mix((key + (token_id + 1) * GAMMA) & MASK) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def noise(seeds: list[int], positions: list[int], token_ids: torch.Tensor) -> torch.Tensor:
    signed = [seed - (1 << 64) if seed >= 1 << 63 else seed for seed in seeds]
    return gumbel_noise(torch.tensor(signed), torch.tensor(positions), token_ids)


def test_the_hash_is_splitmix64() -> None:
    assert mix(GAMMA) == 0xE220A8397B1DCDAF  # the first output of the published generator seeded with 0


@given(seed=st.integers(0, MASK), position=st.integers(0, 1 << 20), token_id=st.integers(0, 1 << 20))
def test_noise_is_the_documented_function(seed: int, position: int, token_id: int) -> None:
    value = noise([seed], [position], torch.tensor([[token_id]]))
    assert math.isclose(value.item(), expected_noise(seed, position, token_id), rel_tol=1e-9, abs_tol=1e-12)


@given(
    seeds=st.lists(st.integers(0, MASK), min_size=1, max_size=5),
    first=st.integers(0, 1000),
    count=st.integers(1, 70),
)
def test_neither_rows_nor_tokens_beside_matter(seeds: list[int], first: int, count: int) -> None:
    positions = list(range(len(seeds)))
    together = noise(seeds, positions, torch.arange(2000).unsqueeze(0))
    for row, seed in enumerate(seeds):
        alone = noise([seed], [row], torch.arange(first, first + count).unsqueeze(0))
        assert torch.equal(alone[0], together[row, first : first + count])


def test_noise_is_finite_even_at_the_ends_of_the_hash() -> None:
    key = mix(mix(GAMMA))  # of seed 0 at position 0
    ids = [((unmix(end) - key) * pow(GAMMA, -1, 1 << 64) - 1) & MASK for end in (0, MASK)]
    signed = [token_id - (1 << 64) if token_id >= 1 << 63 else token_id for token_id in ids]
    values = noise([0], [0], torch.tensor([signed]))[0]
    assert [round(value, 2) for value in values.tolist()] == [-3.6, 36.74]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Standard deviations that the statistic lies above its mean."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-gumbel_noise(seeds, positions, token_ids))).flatten()


def test_hashes_are_uniform_along_every_argument() -> None:
    count, bins = 100_000, 64
    sequence = torch.arange(count)
    for values in (
        uniforms(torch.tensor([5]), torch.tensor([3]), sequence.unsqueeze(0)),
        uniforms(sequence, torch.full_like(sequence, 3), torch.tensor([[7]])),
        uniforms(torch.full_like(sequence, 5), sequence, torch.tensor([[7]])),
    ):
        counts = torch.bincount((values * bins).long().clamp(max=bins - 1), minlength=bins)
        assert abs(chi_square(counts, torch.full((bins,), 1 / bins))) < 4
        pairs = torch.bincount((values[:-1] * 8).long() * 8 + (values[1:] * 8).long(), minlength=64)
        assert abs(chi_square(pairs, torch.full((64,), 1 / 64))) < 5  # no correlation with the next one


def test_argmax_with_noise_samples_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0], dtype=torch.float64)
    count = 50_000
    for seeds, positions in (
        (torch.arange(count), torch.zeros(count, dtype=torch.int64)),
        (torch.full((count,), 11), torch.arange(count)),
    ):
        noisy = logits + gumbel_noise(seeds, positions, torch.arange(6).unsqueeze(0))
        counts = torch.bincount(noisy.argmax(dim=1), minlength=6)
        assert abs(chi_square(counts, logits.softmax(0))) < 4

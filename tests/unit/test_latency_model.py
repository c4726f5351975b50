"""The latency model learns what steps cost, whatever noise, drift and pauses do."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import latency_model
from scheduler.latency_model import LatencyModel
from scheduler.plan import StepLoad

COSTS = (4e-3, 1e-4, 2e-4, 1e-7, 5e-8)
"""Seconds: fixed, per decode token, per chunk token, per decode's context token, per chunk pair."""


def true_seconds(load: StepLoad) -> float:
    features = (1, load.num_decode_tokens, load.num_chunk_tokens, load.decode_context, load.chunk_pairs)
    return sum(cost * feature for cost, feature in zip(COSTS, features, strict=True))


def random_load(rng: random.Random) -> StepLoad:
    decodes = rng.randint(0, 64)
    chunk = rng.choice((0, rng.randint(2, 512)))
    return StepLoad(decodes, chunk, decodes * rng.randint(1, 4000), chunk * rng.randint(chunk, 4000))


def trained(rng: random.Random, num_steps: int = 2000, noise: float = 0.05) -> LatencyModel:
    model = LatencyModel(256)
    for _ in range(num_steps):
        load = random_load(rng)
        model.observe(load, true_seconds(load) * rng.uniform(1 - noise, 1 + noise))
    return model


def worst_error(model: LatencyModel, factor: float = 1.0) -> float:
    rng = random.Random(99)
    loads = [random_load(rng) for _ in range(200)]
    return max(abs(model.predict(load) / (factor * true_seconds(load)) - 1) for load in loads)


def test_recovers_the_costs_from_noisy_steps() -> None:
    model = trained(random.Random(1))
    assert worst_error(model) < 0.05


def test_follows_a_drift() -> None:
    for factor in (0.3, 3.0):
        rng = random.Random(2)
        model = trained(rng)
        for _ in range(2500):
            load = random_load(rng)
            model.observe(load, factor * true_seconds(load))
        assert worst_error(model, factor) < 0.1


def test_survives_pauses() -> None:
    rng = random.Random(3)
    model = trained(rng)
    for step in range(1000):
        load = random_load(rng)
        model.observe(load, true_seconds(load) + (5.0 if step % 50 == 7 else 0.0))
    assert worst_error(model) < 0.15


def test_a_long_time_of_decodes_does_not_forget_what_chunks_cost() -> None:
    rng = random.Random(4)
    model = trained(rng)
    rate = model.prefill_rate()
    for _ in range(10_000):
        load = StepLoad(16, 0, 16 * rng.randint(100, 2000), 0)
        model.observe(load, true_seconds(load) * rng.uniform(0.95, 1.05))
    assert abs(model.prefill_rate() / rate - 1) < 0.2


def test_what_is_long_forgotten_keeps_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(random.Random(5))
    monkeypatch.setattr(latency_model, "_FORGETTING", 0.5)  # so that products underflow after 1100 steps
    load = StepLoad(16, 0, 16_000, 0)
    for _ in range(800):
        model.observe(load, true_seconds(load))
    rate = model.prefill_rate()
    for _ in range(1000):
        model.observe(load, true_seconds(load))
        assert abs(model.prefill_rate() / rate - 1) < 0.01
    assert abs(rate * true_seconds(StepLoad(0, 256, 0, 256 * 257 // 2)) / 256 - 1) < 0.2


def test_tells_how_far_off_it_was() -> None:
    model = LatencyModel(256)
    load = StepLoad(1, 0, 1, 0)
    model.seed([(load, 0.1)])
    assert model.observe(load, 0.4) == pytest.approx(0.75, abs=0.01)
    assert model.observe(load, 0.0) is None


def test_a_short_profile_is_enough_to_start() -> None:
    loads = [StepLoad(0, n, 0, n * (n + 1) // 2) for n in (1, 32, 256)]
    loads += [StepLoad(n, 0, n * context, 0) for n in (1, 32) for context in (16, 1024)]
    model = LatencyModel(256)
    model.seed([(load, true_seconds(load)) for load in loads])
    for load in loads:
        assert abs(model.predict(load) / true_seconds(load) - 1) < 0.1
    expected = 256 / true_seconds(loads[2])
    assert abs(model.prefill_rate() / expected - 1) < 0.1


def test_knows_nothing_at_first() -> None:
    model = LatencyModel(256)
    model.seed([])
    model.observe(StepLoad(1, 0, 1, 0), 0.0)
    assert model.predict(StepLoad(1, 2, 3, 4)) == 0
    assert model.prefill_rate() == math.inf
    assert model.observe(StepLoad(1, 0, 1, 0), 1.0) is None


counts = st.integers(0, 10**6)
loads = st.builds(StepLoad, counts, counts, counts, counts)


@given(st.lists(st.tuples(loads, st.floats(0, 1e3)), max_size=40), loads)
def test_predictions_are_finite_and_never_below_0(steps: list[tuple[StepLoad, float]], load: StepLoad) -> None:
    model = LatencyModel(256)
    model.seed(steps[:5])
    for step, seconds in steps[5:]:
        error = model.observe(step, seconds)
        assert error is None or 0 <= error <= 1
    assert 0 <= model.predict(load) < math.inf

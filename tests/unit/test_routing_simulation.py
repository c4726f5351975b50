"""Routers on replicas with the real scheduler, in virtual time: skewed prefixes that no replica can hold all."""

import random

import pytest
from replica_simulation import BLOCK, Outcome, Simulation, zipf_arrivals

NUM_BLOCKS = int(5.6 * (1024 + 64) / BLOCK)
"""KV for five of twelve prefixes, and some requests that run."""


def outcomes(rate: float, exponent: float) -> dict[str, Outcome]:
    arrivals = zipf_arrivals(1, 1000, rate, exponent)
    found = {}
    for name in ("predicted", "power_of_two", "affinity"):
        simulation = Simulation(3, NUM_BLOCKS)
        rng = random.Random(0)
        routers = {
            "predicted": lambda simulation: simulation.predicted,
            "power_of_two": lambda simulation, rng=rng: simulation.power_of_two(rng),
            "affinity": lambda simulation, rng=rng: simulation.affinity(rng),
        }
        found[name] = simulation.run(arrivals, routers[name](simulation))
        assert len(found[name].first_token_seconds) == len(arrivals)
    return found


@pytest.mark.parametrize("rate", [60.0, 200.0])
def test_hits_as_many_as_affinity_and_loads_evenly(rate: float) -> None:
    found = outcomes(rate, exponent=1.4)
    assert found["predicted"].hit_rate > found["affinity"].hit_rate - 0.02
    assert max(found["predicted"].shares) < 1.3
    assert found["predicted"].p95() < 0.9 * found["power_of_two"].p95()


def test_a_hot_replica_is_not_piled_onto() -> None:
    """Affinity sends more to the holder of the hottest prefix than it can compute."""
    found = outcomes(200.0, exponent=2.0)
    assert max(found["affinity"].shares) > 1.5
    assert found["predicted"].p95() < 0.5 * found["affinity"].p95()
    assert found["predicted"].hit_rate > found["affinity"].hit_rate - 0.02

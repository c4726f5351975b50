"""How long a step may take."""

import pytest

from cluster.engine.settings import EngineDeadlines
from cluster.engine.step_times import StepTimes
from scheduler.plan import StepLoad

DECODE = StepLoad(4, 0, 400, 0)


def step_times(seconds: float) -> StepTimes:
    times = StepTimes(256, EngineDeadlines(step=60.0, step_floor=5.0))
    times.seed([(DECODE, seconds)])
    return times


def test_first_step_of_a_shape_may_compile() -> None:
    times = step_times(0.1)
    assert times.deadline(DECODE) == 60.0
    times.observe(DECODE, 0.1)
    assert 5.9 < times.deadline(DECODE) < 6.1
    times.start_over()
    assert times.deadline(DECODE) == 60.0


def test_a_step_that_is_known_to_take_long_may() -> None:
    times = step_times(20.0)
    assert 200 < times.deadline(DECODE) < 210
    times.observe(DECODE, 20.0)
    assert 200 < times.deadline(DECODE) < 210


def test_the_share_of_time_with_prompts_is_since_the_last_question() -> None:
    times = step_times(0.1)
    prompt = StepLoad(4, 100, 400, 5000)
    times.observe(prompt, 0.3)
    assert times.prefill_share(1000.0) == 0.0  # since when nobody knows
    times.observe(prompt, 0.3)
    times.observe(DECODE, 5.0)
    times.observe(prompt, 0.2)
    assert times.prefill_share(1002.0) == pytest.approx(0.25)
    assert times.prefill_share(1003.0) == 0.0
    times.observe(prompt, 9.0)
    assert times.prefill_share(1004.0) == 1.0

"""How long a step may take."""

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

"""Time by stage: timers around calls, put there from outside, so that what is not measured pays nothing."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class StageClock:
    """Seconds spent in each stage since the last `take`; for one thread.

    A stage inside another one counts for itself alone: the outer one gets what is left, so stages add up
    to the time between two takes, less what no timer saw.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` gives seconds."""
        self._now = now
        self._seconds: dict[str, float] = {}
        self._inside = 0.0
        """Seconds of stages that have ended inside the one that runs."""

    def timed(self, stage: str, function: Callable[P, T]) -> Callable[P, T]:
        """`function` with its time counted for `stage`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            outside, self._inside = self._inside, 0.0
            began = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self._now() - began
                self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds - self._inside
                self._inside = outside + seconds

        return call

    def wrap(self, owner: object, name: str, stage: str) -> None:
        """Time every call of an object's method, or of a module's function, from now on."""
        setattr(owner, name, self.timed(stage, getattr(owner, name)))

    def take(self) -> dict[str, float]:
        """Seconds by stage, of calls that have ended; counts anew from here."""
        taken, self._seconds = self._seconds, {}
        return taken

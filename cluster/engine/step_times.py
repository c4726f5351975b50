"""What steps take, as far as it is known: how long one may take before it counts as hung, how long a queue will."""

import math
from collections.abc import Iterable

from cluster.engine.settings import EngineDeadlines
from scheduler.first_token import QueueState, first_token_seconds
from scheduler.latency_model import LatencyModel
from scheduler.plan import StepLoad

_MULTIPLE = 10.0
_CLOCK = 1e-6
"""Seconds; no time between two questions is shorter."""


class StepTimes:
    """Learns from each step. Times are the ranks' own measure, in seconds."""

    def __init__(self, max_num_batched_tokens: int, deadlines: EngineDeadlines) -> None:
        self._model = LatencyModel(max_num_batched_tokens)
        self._first_seconds = deadlines.step
        self._floor_seconds = deadlines.step_floor
        self._seen: set[tuple[int, int]] = set()
        self._prefill_seconds = 0.0
        self._share_asked_at = -math.inf

    def seed(self, profile: Iterable[tuple[StepLoad, float]]) -> None:
        """Begin with what start-up measured."""
        self._model.seed(profile)

    def deadline(self, load: StepLoad) -> float:
        """What a step may take: the floor and a multiple of what is predicted.

        The first step of a shape (its tokens of each kind, to the power of two) may compile: it has its own floor.
        """
        seconds = self._floor_seconds + _MULTIPLE * self._model.predict(load)
        return seconds if _shape(load) in self._seen else max(self._first_seconds, seconds)

    def observe(self, load: StepLoad, seconds: float) -> float | None:
        """A step has ended. Returns by how much the prediction was off, 0 to 1, if there was one."""
        self._seen.add(_shape(load))
        if load.num_chunk_tokens:
            self._prefill_seconds += seconds
        return self._model.observe(load, seconds)

    def first_token_seconds(self, queue: QueueState, recovery_seconds: float) -> float:
        """What a request that comes now waits for its first token, its own prompt aside.

        `recovery_seconds`: until the ranks are back.
        """
        return first_token_seconds(queue, self._model, recovery_seconds)

    def prefill_share(self, now: float) -> float:
        """Share of the time since the last question that steps with prompts in them took, 0 to 1; at first 0.

        `now` in seconds, by a clock that never goes back.
        """
        share = min(1.0, self._prefill_seconds / max(now - self._share_asked_at, _CLOCK))
        self._prefill_seconds, self._share_asked_at = 0.0, now
        return share

    def prefill_rate(self, num_decodes: int, decode_context: int) -> float:
        """Tokens a second of a chunk that takes what decodes leave of the budget; infinite when nothing is known."""
        return self._model.prefill_rate(num_decodes, decode_context)

    def start_over(self) -> None:
        """The ranks are new: every shape is. What steps take has not changed."""
        self._seen.clear()


def _shape(load: StepLoad) -> tuple[int, int]:
    return load.num_decode_tokens.bit_length(), load.num_chunk_tokens.bit_length()

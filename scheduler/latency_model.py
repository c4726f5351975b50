"""How long a step takes, learnt from the steps that ran."""

import math
from collections.abc import Iterable

from scheduler.plan import StepLoad

_FORGETTING = 0.998
"""Weight of a step against the next one: the model stands on about the last 500 steps."""
_FORGOTTEN = 1e-200
_SEED_SWEEPS = 500
_ERROR_WEIGHT = 0.05
_CLOCK = 1e-6
"""Seconds; no step is shorter."""
_LEAST_TOLERANCE = 0.2
"""Relative. A step further off than this, and than four times the recent error, counts as just so far off."""


class LatencyModel:
    """Step time as a sum of non-negative costs: fixed, and per unit of each field of StepLoad.

    Least squares of the relative error, with forgetting. A cost about which nothing new is heard keeps
    its value. A lone step that takes far longer (a pause of the machine) moves little; when all do, the
    error grows, and with it what counts in full.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        """`max_num_batched_tokens`: the step budget, in tokens, that `prefill_rate` speaks of."""
        self._budget = max_num_batched_tokens
        self._costs = [0.0] * 5  # seconds
        self._products = [[0.0] * 5 for _ in range(5)]  # of features, over all steps, forgetting
        self._targets = [0.0] * 5  # of features and seconds
        self._error = 1.0  # recent mean

    def predict(self, load: StepLoad) -> float:
        """Seconds; 0 when nothing is known."""
        return sum(cost * feature for cost, feature in zip(self._costs, _features(load), strict=True))

    def prefill_rate(self, num_decodes: int = 0, decode_context: int = 0) -> float:
        """Tokens a second of a chunk that takes what so many decodes leave of the budget, at least one token.

        Infinite when nothing is known. `decode_context` as in StepLoad.
        """
        tokens = max(1, self._budget - num_decodes)
        # Each token attends to as many as in a whole budget's chunk: a prompt's pairs are the same however it is cut.
        seconds = self.predict(StepLoad(num_decodes, tokens, decode_context, tokens * (self._budget + 1) // 2))
        return tokens / seconds if seconds > 0 else math.inf

    def seed(self, steps: Iterable[tuple[StepLoad, float]]) -> None:
        """Learn from a profile (what a step computed, seconds), each measurement taken as it is."""
        profile = [(load, seconds) for load, seconds in steps if seconds > 0]
        for load, seconds in profile:
            self._learn(_features(load), seconds, seconds)
        for _ in range(_SEED_SWEEPS):
            self._fit()
        if profile:
            self._error = sum(_error(seconds, self.predict(load)) for load, seconds in profile) / len(profile)

    def observe(self, load: StepLoad, seconds: float) -> float | None:
        """A step has taken `seconds`; none (0 or less) is no measurement.

        Returns |measured - predicted| over the larger of them, 0 to 1, where anything was predicted.
        """
        if seconds <= 0:
            return None
        predicted = self.predict(load)
        error = None
        if predicted > 0:
            error = _error(seconds, predicted)
            tolerance = max(_LEAST_TOLERANCE, 4 * self._error)
            self._error += _ERROR_WEIGHT * (error - self._error)
            learnt = min(max(seconds, predicted * (1 - tolerance)), predicted * (1 + tolerance))
        else:
            predicted = learnt = seconds
        self._learn(_features(load), learnt, max(learnt, predicted))
        self._fit()
        return error

    def _learn(self, features: tuple[float, ...], seconds: float, scale: float) -> None:
        for row, feature in enumerate(features):
            weighted = feature / max(scale, _CLOCK) ** 2
            self._targets[row] = _FORGETTING * self._targets[row] + weighted * seconds
            products = self._products[row]
            for column, other in enumerate(features):
                products[column] = _FORGETTING * products[column] + weighted * other

    def _fit(self) -> None:
        """One round of coordinate descent from where the last one ended: each cost at its best, the others fixed."""
        costs = self._costs
        for row, products in enumerate(self._products):
            own = products[row]
            if own < _FORGOTTEN:
                continue  # never heard of, or so long ago that the products have lost their digits
            rest = self._targets[row] + own * costs[row]
            for product, cost in zip(products, costs, strict=True):
                rest -= product * cost
            costs[row] = max(0.0, rest / own)


def _features(load: StepLoad) -> tuple[float, ...]:
    return (1.0, load.num_decode_tokens, load.num_chunk_tokens, load.decode_context, load.chunk_pairs)


def _error(seconds: float, predicted: float) -> float:
    return abs(seconds - predicted) / max(seconds, predicted)

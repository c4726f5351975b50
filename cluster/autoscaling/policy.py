"""How many replicas there should be, as pure functions of loads and time. Knows neither Ray nor engines.

First what is wanted at a moment (`replicas_wanted`), then what is done about it (`decide`): more replicas only when
more were wanted throughout the last `up_seconds`, fewer only when no more were wanted at any time of the last
`down_seconds`. It is the stabilisation of Kubernetes' HorizontalPodAutoscaler, with a window for each direction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.autoscaling.load import ReplicaLoad

_ROUNDING = 1e-6
"""Of sums: what exceeds a whole number by less asks for no replica more."""


@dataclass(frozen=True, slots=True)
class AutoscalingOptions:
    """Bounds and targets; checked by the settings tree."""

    min_replicas: int
    """0: the last one may go when nothing is open."""
    max_replicas: int
    target_queue_seconds: float
    """Prompts that wait shall be computed within this time, beside those that keep coming."""
    target_kv_usage: float
    """Of the KV blocks of all replicas, 0 to 1."""
    up_seconds: float
    down_seconds: float


@dataclass(frozen=True, slots=True)
class History:
    """What `decide` remembers from one call to the next."""

    samples: tuple[tuple[float, int], ...] = ()
    """(time, number wanted from then on), oldest first."""
    decided: int | None = None


def load_in_replicas(loads: Sequence[ReplicaLoad], options: AutoscalingOptions) -> float:
    """The work of all replicas, as a number of replicas that are loaded just as the targets say.

    Each signal is a sum over replicas, however the work lies among them, in units of one replica at its target; the
    largest counts. n replicas compute a queue of q seconds, and the share p of a replica that new prompts take, within
    the time T when n T >= q + p T. A further signal is a further term of the maximum.
    """
    prefill = sum(load.queue_seconds / options.target_queue_seconds + load.prefill_share for load in loads)
    kv = sum(load.kv_usage for load in loads) / options.target_kv_usage
    return max(prefill, kv)


def replicas_wanted(
    loads: Sequence[ReplicaLoad], num_silent: int, is_busy: bool, current: int, options: AutoscalingOptions
) -> int:
    """What this moment calls for, within the bounds.

    `num_silent` replicas have not told their load: each may have work for itself, which is no reason for more than the
    `current` number. `is_busy`: some request is open or waits, so that one replica at least is needed.
    """
    needed = math.ceil(load_in_replicas(loads, options) - _ROUNDING)
    wanted = max(needed, min(current, needed + num_silent), int(is_busy))
    return max(options.min_replicas, min(wanted, options.max_replicas))


def decide(wanted: int, current: int, now: float, history: History, options: AutoscalingOptions) -> tuple[int, History]:
    """The number to go to, and what to remember. `now` in seconds, by a clock that is the same at each call.

    Whatever made `current` other than it was decided (the first deployment, a wake-up from zero, an operator) counts
    as wanted at this moment.
    """
    samples = list(history.samples)
    if current != history.decided:
        samples.append((now, current))
    samples.append((now, wanted))
    lowest = min(_wanted_since(now - options.up_seconds, samples))
    highest = max(_wanted_since(now - options.down_seconds, samples))
    decided = max(lowest, min(current, highest))  # lowest <= wanted <= highest
    kept = _still_of_use(now - max(options.up_seconds, options.down_seconds), samples)
    return decided, History(kept, decided)


def _wanted_since(start: float, samples: Sequence[tuple[float, int]]) -> list[int]:
    """The numbers that were wanted at some time after `start`; each holds until the next one."""
    return [wanted for _, wanted in _still_of_use(start, samples)]


def _still_of_use(start: float, samples: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    ends = [time for time, _ in samples[1:]] + [math.inf]
    return tuple(sample for sample, end in zip(samples, ends, strict=True) if end > start)

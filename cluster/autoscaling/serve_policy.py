"""The policy as Ray Serve's controller calls it: the one place that knows Serve's autoscaling interface.

Engines tell their load through `record_autoscaling_stats`; Serve brings it to the controller each second, and the
controller asks the policy at each turn of its loop. Serve's own delays are off: the policy has its own. Two things
remain Serve's: a request that waits while no replica runs starts the first one, and the last replica goes in a step of
its own.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from cluster.autoscaling.load import ReplicaLoad
from cluster.autoscaling.policy import AutoscalingOptions, History, decide, replicas_wanted

REPORT_SECONDS = 1.0
MEAN_SECONDS = 5.0
"""Loads and open requests are means over so long."""
_HISTORY = "history"
_SIGNALS = tuple(item.name for item in fields(ReplicaLoad))


class ServePolicy:
    """Built in the controller, from keyword arguments that are plain JSON."""

    def __init__(self, **options: Any) -> None:
        self._options = AutoscalingOptions(**options)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: an AutoscalingContext. The number of replicas, and the state for the next call."""
        told = context.aggregated_metrics or {}
        loads = [load for each in context.running_replicas if (load := load_of(each, told)) is not None]
        current = context.target_num_replicas
        # Where none runs yet, the first one may load for as long as it takes, whoever asked for it.
        num_silent = max(len(context.running_replicas), min(current, 1)) - len(loads)
        wanted = replicas_wanted(loads, num_silent, context.total_num_requests > 0, current, self._options)
        history = context.policy_state.get(_HISTORY, History())
        decided, history = decide(wanted, current, context.current_time, history, self._options)
        return decided, {_HISTORY: history}


def load_of(replica: Any, told: Mapping[str, Mapping[Any, float]]) -> ReplicaLoad | None:
    """What a replica told, out of Serve's table (signal -> replica -> value); None when it has told nothing yet."""
    values = {name: told[name][replica] for name in _SIGNALS if replica in told.get(name, {})}
    return ReplicaLoad(**values) if len(values) == len(_SIGNALS) else None


def autoscaling_config(options: AutoscalingOptions) -> dict[str, Any]:
    """For a deployment's `autoscaling_config`.

    Where none may run, one is started all the same: only then does a service know that it can serve.
    """
    return {
        "min_replicas": options.min_replicas,
        "initial_replicas": None if options.min_replicas else 1,
        "max_replicas": options.max_replicas,
        "metrics_interval_s": REPORT_SECONDS,
        "look_back_period_s": MEAN_SECONDS,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "policy": {"policy_function": f"{__name__}:{ServePolicy.__name__}", "policy_kwargs": asdict(options)},
    }

"""The policy as Serve's controller gets it: shipped by value, asked with a context."""

from dataclasses import asdict
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.autoscaling.load import ReplicaLoad
from cluster.autoscaling.policy import AutoscalingOptions
from cluster.autoscaling.serve_policy import autoscaling_config, load_of

OPTIONS = AutoscalingOptions(
    min_replicas=0, max_replicas=4, target_queue_seconds=2.0, target_kv_usage=0.8, up_seconds=10.0, down_seconds=60.0
)
NAMES = [ReplicaID(f"r{number}", DeploymentID("engine", "chunkserve")) for number in range(3)]


def table(loads: dict[ReplicaID, ReplicaLoad]) -> dict[str, dict[ReplicaID, float]]:
    """As Serve keeps it: by signal, then by replica."""
    told: dict[str, dict[ReplicaID, float]] = {}
    for replica, load in loads.items():
        for name, value in asdict(load).items():
            told.setdefault(name, {})[replica] = value
    return told


def context(now: float, running: int, told: Any, state: dict[str, Any], **more: Any) -> AutoscalingContext:
    fields = {"target_num_replicas": running, "total_num_requests": 0.0} | more
    return AutoscalingContext(
        deployment_id=NAMES[0].deployment_id,
        deployment_name="engine",
        app_name="chunkserve",
        current_num_replicas=running,
        running_replicas=NAMES[:running],
        total_queued_requests=0.0,
        aggregated_metrics=told,
        raw_metrics=None,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=4,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=None,
        **fields,
    )


@pytest.fixture
def policy() -> Any:
    shipped = AutoscalingConfig(**autoscaling_config(OPTIONS)).policy
    return shipped.get_policy()(**shipped.policy_kwargs)


def test_serve_is_told_the_bounds_and_keeps_its_own_delays_out() -> None:
    config = AutoscalingConfig(**autoscaling_config(OPTIONS))
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 4)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0, 0)
    # A service that always has an engine starts with as many as it had when it is deployed again.
    fixed = AutoscalingOptions(2, 4, 2.0, 0.8, 10.0, 60.0)
    assert AutoscalingConfig(**autoscaling_config(fixed)).initial_replicas is None


def test_it_scales_by_what_replicas_tell(policy: Any) -> None:
    told = table({NAMES[0]: ReplicaLoad(3.0, 1.0, 0.1)})
    decided, state = policy(context(0.0, 1, told, {}))
    assert decided == 1
    decided, state = policy(context(10.0, 1, told, state))
    assert decided == 3
    told = table({name: ReplicaLoad(0.0, 0.0, 0.0) for name in NAMES})
    for now in (11.0, 69.0):
        decided, state = policy(context(now, 3, told, state, total_num_requests=0.5))
        assert decided == 3
    decided, state = policy(context(71.0, 3, told, state, total_num_requests=0.5))
    assert decided == 1


def test_a_replica_that_has_not_told_its_load_stays(policy: Any) -> None:
    told = table({NAMES[0]: ReplicaLoad(0.0, 0.0, 0.0)})
    _, state = policy(context(0.0, 2, told, {}))
    assert policy(context(100.0, 2, told, state))[0] == 1
    assert policy(context(100.0, 2, None, state))[0] == 2


def test_the_first_one_may_load_for_as_long_as_it_takes(policy: Any) -> None:
    state: dict[str, Any] = {}
    for now in (0.0, 1000.0):
        decided, state = policy(context(now, 0, None, state, target_num_replicas=1))
        assert decided == 1
    idle = table({NAMES[0]: ReplicaLoad(0.0, 0.0, 0.0)})
    _, state = policy(context(1001.0, 1, idle, state))
    assert policy(context(1060.0, 1, idle, state))[0] == 1
    assert policy(context(1061.0, 1, idle, state))[0] == 0


def test_half_of_a_report_is_none() -> None:
    told = table({NAMES[0]: ReplicaLoad(1.0, 0.5, 0.25)})
    assert load_of(NAMES[0], told) == ReplicaLoad(1.0, 0.5, 0.25)
    assert load_of(NAMES[1], told) is None
    del told["kv_usage"]
    assert load_of(NAMES[0], told) is None

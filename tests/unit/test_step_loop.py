"""A rank's loop: plans that come while the device computes are launched, and results go out in order."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from scheduler.plan import StepPlan, StepResult
from workers.link import Link, LinkClosed, LinkError
from workers.step_loop import PLAN, RESULT, execute_plans
from workers.wire import decode_result, encode

DEADLINE = 20.0
NEVER = 1 << 30


@dataclass
class Device:
    """A worker whose steps are ready once so many plans were launched after them."""

    busy_for: int
    events: list[str] = field(default_factory=list)
    num_launched: int = 0

    def launch_step(self, plan: StepPlan) -> "Step":
        self.events.append(f"launch {plan.step_id}")
        self.num_launched += 1
        return Step(self, plan, self.num_launched + self.busy_for)

    def collect_step(self, step: "Step") -> StepResult:
        self.events.append(f"collect {step.plan.step_id}")
        return StepResult(step.plan.epoch, step.plan.step_id, {"a": [step.plan.step_id]})


@dataclass
class Step:
    device: Device
    plan: StepPlan
    ready_at: int

    def is_ready(self) -> bool:
        last = self.plan.step_id == 2  # nothing can be launched after it
        return self.device.num_launched >= self.ready_at or (last and self.device.busy_for < NEVER)


@dataclass
class Ends:
    engine: Link
    rank: Link
    engine_socket: socket.socket

    def send_plans(self) -> None:
        """Three plans, all that the engine ever sends."""
        for step_id in range(3):
            self.engine.send(PLAN, encode(StepPlan(0, step_id, {"a": 1})))
        self.engine_socket.shutdown(socket.SHUT_WR)


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair()
    for end in (left, right):
        end.settimeout(DEADLINE)
    ends = Ends(Link(left, "rank 0"), Link(right, "the engine"), left)
    yield ends
    ends.engine.close()
    ends.rank.close()


def test_a_plan_that_waits_is_launched_while_the_device_computes(ends: Ends) -> None:
    ends.send_plans()
    device = Device(busy_for=1)
    with pytest.raises(LinkClosed):
        execute_plans(ends.rank, device, 0)
    assert device.events == ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"]
    for step_id in range(3):
        kind, payload = ends.engine.receive()
        assert (kind, decode_result(payload).sampled_token_ids) == (RESULT, {"a": [step_id]})


def test_a_step_that_is_ready_is_collected_before_a_plan_that_waits(ends: Ends) -> None:
    ends.send_plans()
    device = Device(busy_for=0)
    with pytest.raises(LinkClosed):
        execute_plans(ends.rank, device, 0)
    assert device.events == ["launch 0", "collect 0", "launch 1", "collect 1", "launch 2", "collect 2"]


def test_only_rank_0_answers(ends: Ends) -> None:
    ends.send_plans()
    device = Device(busy_for=0)
    with pytest.raises(LinkClosed):
        execute_plans(ends.rank, device, 1)
    assert device.events[-1] == "collect 2"
    ends.rank.close()
    with pytest.raises(LinkClosed):
        ends.engine.receive()


def test_the_engines_end_is_seen_while_the_device_hangs(ends: Ends) -> None:
    ends.send_plans()
    device = Device(busy_for=NEVER)
    with pytest.raises(LinkClosed):
        execute_plans(ends.rank, device, 0)
    assert device.events == ["launch 0", "launch 1", "launch 2"]


def test_anything_but_a_plan_ends_the_loop(ends: Ends) -> None:
    ends.engine.send(RESULT, b"")
    with pytest.raises(LinkError, match="the engine sent a message of kind 2 where plans are expected"):
        execute_plans(ends.rank, Device(busy_for=0), 0)

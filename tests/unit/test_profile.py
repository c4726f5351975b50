"""A profiled rank gives the same tokens, and says where its time went."""

import itertools
import socket
import time
from dataclasses import replace

import pytest
from plan_driver import PlanDriver
from test_worker import GREEDY, PROMPTS, config_for, expected, outputs

from scheduler.plan import NewRequest, StepPlan, StepResult
from workers import step_loop
from workers.link import Link, LinkClosed
from workers.profile import profile_link
from workers.step_loop import PLAN, execute_plans
from workers.wire import decode_result, encode
from workers.worker import Worker

MODEL_STAGES = {"batch", "linears", "attention", "norms", "other", "head", "sample", "report"}


def started(**changes: object) -> tuple[Worker, PlanDriver, list[StepResult]]:
    worker = Worker(config_for("llama", **changes))
    worker.load()
    limits = worker.measure()
    worker.allocate(limits)
    results: list[StepResult] = []

    def execute(plan: StepPlan) -> StepResult:
        results.append(worker.collect_step(worker.launch_step(plan)))
        return results[-1]

    return worker, PlanDriver(execute, limits, 7), results


def test_stages_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(readings)))  # each reading takes a second
    _, driver, results = started(profile_steps=True)
    assert outputs(driver.run([(prompt, GREEDY) for prompt in PROMPTS])) == expected("llama")
    for result in results:
        sampled = {"head", "sample"} if result.sampled_token_ids else set()
        assert set(result.stage_seconds) == MODEL_STAGES - {"head", "sample"} | sampled
        assert min(result.stage_seconds.values()) > 0
        # A step begins within its first stage: the stages have one reading more, and share all others.
        assert sum(result.stage_seconds.values()) == result.execute_seconds + 1


def test_without_profiling_nothing_is_said_and_nothing_is_wrapped() -> None:
    worker, driver, results = started()
    driver.run([([5, 6, 7], replace(GREEDY, max_tokens=2))])
    assert worker.clock is None
    assert all(result.stage_seconds == {} for result in results)
    assert "forward" not in vars(worker._model)


def test_stages_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("encode", "decode_plan"):
        monkeypatch.setattr(step_loop, name, getattr(step_loop, name))  # put back after the test
    worker, _, _ = started(profile_steps=True)
    assert worker.clock is not None
    engine_socket, rank_socket = socket.socketpair()
    engine, rank = Link(engine_socket, "rank"), Link(rank_socket, "engine")
    profile_link(rank, worker.clock)
    new = NewRequest("a", [5, 6, 7], 3, GREEDY, [0, 1], 0)
    engine.send(PLAN, encode(StepPlan(1, 0, {"a": 3}, new_requests=[new])))
    for step_id in (1, 2):
        engine.send(PLAN, encode(StepPlan(1, step_id, {"a": 1})))
    engine_socket.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosed):
        execute_plans(rank, worker, 0)
    results = [decode_result(engine.receive()[1]) for _ in range(3)]
    assert set(results[0].stage_seconds) == MODEL_STAGES | {"wait", "decode plan"}
    for result in results[1:]:
        assert set(result.stage_seconds) == MODEL_STAGES | {"wait", "decode plan", "encode result", "send"}
    rank.close()
    engine.close()

"""What one spawned rank of a worker group does in test_worker_ranks: a fixed day's work, by plans of its own.

All ranks make the same plans, because plans follow from results and every rank has the same results.
"""

from dataclasses import dataclass, replace

from plan_driver import PlanDriver

from scheduler.plan import NewRequest, StepPlan, TokenLogprobs
from scheduler.sampling_params import SamplingParams
from workers.config import ModelLimits, WorkerConfig
from workers.request_state import PlanError
from workers.worker import Worker


@dataclass(frozen=True)
class RankReport:
    limits: ModelLimits
    outputs: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    error: str
    """What a plan gave that contradicts the mirror."""
    saw_collectives: bool
    """A step spent time in collectives, and not more than it took."""


def run_rank(
    config: WorkerConfig, rank: int, rendezvous: str, requests: list[tuple[list[int], SamplingParams]]
) -> RankReport:
    worker = Worker(config, rank, rendezvous)
    worker.load()
    try:
        limits = worker.measure()
        worker.allocate(limits)
        driven = PlanDriver(worker.execute_step, limits, chunk=9).run(requests, preempt_every=8)
        again = NewRequest("a", [5, 6], 2, SamplingParams(max_tokens=1, temperature=0.0), [0], 0)
        result = worker.execute_step(StepPlan(1, 0, {"a": 2}, new_requests=[again]))
        try:
            worker.execute_step(StepPlan(0, 1, {"a": 1}))
            error = "none"
        except PlanError as raised:
            error = str(raised)
    finally:
        worker.shutdown()
        worker.shutdown()  # does nothing
    saw_collectives = 0 < result.collective_seconds < result.execute_seconds
    return RankReport(limits, [r.output for r in driven], [r.logprobs for r in driven], error, saw_collectives)


def load_rank(config: WorkerConfig, rank: int, rendezvous: str) -> str:
    """How loading fails."""
    try:
        Worker(replace(config, rendezvous_seconds=3.0), rank, rendezvous).load()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"

"""Where an engine's time goes: timers around its parts, which do not know of them."""

from cluster.engine import step_link
from cluster.engine.executor import Executor
from cluster.links.token_sender import TokenSender
from cluster.metrics.engine import EngineMetrics
from scheduler.scheduler import Scheduler
from workers.stage_clock import StageClock


def profile_engine(
    scheduler: Scheduler, executor: Executor, sender: TokenSender, metrics: EngineMetrics, clock: StageClock
) -> None:
    """Times what the engine does for a step: "schedule", "encode plan", "send plan", "decode result", "update",
    "publish" and "metrics".
    """
    clock.wrap(scheduler, "schedule", "schedule")
    clock.wrap(executor, "execute_step", "send plan")
    clock.wrap(step_link, "encode", "encode plan")
    clock.wrap(step_link, "decode_result", "decode result")
    clock.wrap(scheduler, "update_from_result", "update")
    clock.wrap(sender, "_flush", "publish")
    clock.wrap(metrics, "observe", "metrics")

"""An engine whose ranks die whenever they compute a poisonous token (see `benchmarks.poison`); else they are the real
ones.

Processes find these classes by their module, so this one is never the main one.
"""

import logging
import os
from typing import TYPE_CHECKING

import ray

import cluster.engine.actor
import workers.actor
from benchmarks.poison import PoisonWatch
from cluster.engine import rank_actors
from cluster.engine.settings import EngineSettings
from scheduler.plan import StepPlan

if TYPE_CHECKING:
    from workers.model_runner import PendingStep

logger = logging.getLogger(__name__)

EXIT_STATUS = 86


class WorkerActor(workers.actor.WorkerActor):
    """A rank that can be poisoned. Ray shows it under its name, by which faults find it: the real one's."""

    def load(self, rank: int, rendezvous: str) -> None:
        from workers.worker import Worker

        class PoisonableWorker(Worker):
            watch = PoisonWatch()

            def launch_step(self, plan: StepPlan) -> "PendingStep":
                if self.watch.is_deadly(plan):
                    logger.error("step %d is poison", plan.step_id)
                    os._exit(EXIT_STATUS)
                return super().launch_step(plan)

        self._rank = rank
        self._worker = PoisonableWorker(self._config, rank, rendezvous, self._listener)
        self._worker.load()


class EngineReplica(cluster.engine.actor.EngineReplica):
    """An engine of such ranks."""

    def __init__(self, settings: EngineSettings) -> None:
        rank_actors._WORKER_ACTOR = ray.remote(WorkerActor)
        super().__init__(settings)

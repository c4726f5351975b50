"""Ranks as Ray actors: Ray places, starts and kills them; plans and results travel on the step link."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from cluster.awake import awake_timeout
from cluster.engine.executor import NoRoom
from cluster.engine.rank_actors import RankActors, by_node, off_loop
from cluster.engine.settings import EngineSettings
from cluster.engine.step_link import StepLink
from cluster.errors import ExecutorError, root_cause
from scheduler.plan import StepPlan, StepResult
from workers.config import ModelLimits

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 0.05
"""Between two looks at whether a rank is gone."""

OnPhase = Callable[[str, float | None], None]
"""A start-up phase begins (None) or has ended (after so many seconds)."""


def ignore_phase(name: str, seconds: float | None) -> None:
    """For callers that do not show start-up."""


def smallest(limits: Sequence[ModelLimits]) -> ModelLimits:
    """What every rank can hold. Raises ExecutorError when ranks disagree on more than their memory."""
    least = min(limits, key=lambda each: each.num_blocks)
    for rank, each in enumerate(limits):
        if (each.block_size, each.vocab_size) != (least.block_size, least.vocab_size):
            raise ExecutorError(f"rank {rank} measured {each}, which does not fit {least}")
    return replace(least, max_model_len=min(each.max_model_len for each in limits))


class RayExecutor:
    """One worker actor a rank, placed as `RankActors` says. Built where that must be, used on one loop."""

    def __init__(self, settings: EngineSettings, on_phase: OnPhase = ignore_phase) -> None:
        self._settings = settings
        self._deadlines = settings.deadlines
        self._on_phase = on_phase
        self._actors = RankActors(settings)
        self._limits: ModelLimits | None = None
        """What the first start measured."""
        self._phase_seconds: dict[str, float] = {}
        """What each phase took the first time."""
        self._ranks: list[Any] = []
        self._process_ids: list[int] = []
        self._link: StepLink | None = None

    # Start-up

    async def start(self) -> ModelLimits:
        """Raises ExecutorError naming the rank and the phase that failed; nothing is left running then."""
        try:
            self._limits = await self._start()
        except BaseException:
            await self.shutdown()
            raise
        return self._limits

    async def restart(self) -> None:
        """Kill what is left of the group and start it in the same placement group, with the first start's limits.

        Spares take over where there are any.
        Ray brings back bundles whose node has died, elsewhere if it can. Raises ExecutorError naming the rank and
        the phase that failed.
        """
        async with self._phase("kill"):
            await self._kill_ranks()
        await self._start()

    async def _start(self) -> ModelLimits:
        deadlines = self._deadlines
        async with self._phase("place"):
            await self._place()
        async with self._phase("load"):
            (rendezvous,) = await self._wait([self._ranks[0].rendezvous.remote()], "load", deadlines.place)
            loads = [actor.load.remote(rank, rendezvous) for rank, actor in enumerate(self._ranks)]
            await self._wait(loads, "load", deadlines.load)
        if (limits := self._limits) is None:
            async with self._phase("measure"):
                measured = [rank.measure.remote() for rank in self._ranks]
                limits = smallest(await self._wait(measured, "measure", deadlines.measure))
        async with self._phase("allocate"):
            await self._wait([rank.allocate.remote(limits) for rank in self._ranks], "allocate", deadlines.allocate)
        if self._limits is None:
            async with self._phase("profile"):
                profiles = [rank.profile.remote(limits) for rank in self._ranks]
                profile, *_ = await self._wait(profiles, "profile", deadlines.measure)
            limits = replace(limits, profile=tuple(profile))
        async with self._phase("link"):
            await self._connect()
        try:
            await self._actors.make_spares()
        except Exception as error:
            logger.warning("no spare ranks were started: %s", root_cause(error))
        return limits

    @asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[None]:
        """Raises ExecutorError for whatever else goes wrong in it: Ray and the link have errors of their own."""
        began = time.perf_counter()
        self._on_phase(name, None)
        try:
            yield
            seconds = time.perf_counter() - began
            logger.info("start-up phase %s took %.2f s", name, seconds)
            self._phase_seconds.setdefault(name, seconds)
        except ExecutorError:
            raise
        except Exception as error:
            raise ExecutorError(f"start-up phase {name!r} failed: {root_cause(error)}", "startup") from error
        finally:
            self._on_phase(name, time.perf_counter() - began)

    def _patience(self, phase: str, seconds: float) -> float:
        """How long a phase may take: what was done once in a few seconds has no right to the longest deadline."""
        first = self._phase_seconds.get(phase)
        if first is None:
            return seconds
        return min(seconds, self._deadlines.bundles + 5 * first)

    async def _place(self) -> None:
        """Take one actor process a rank, in the order of their nodes."""
        self._ranks = await self._actors.take()
        started = [actor.process_id.remote() for actor in self._ranks]
        process_ids = await self._wait(started, "place", self._deadlines.place, NoRoom)
        asked = [actor.node_id.remote() for actor in self._ranks]
        nodes = await self._wait(asked, "place", self._deadlines.place)
        order = by_node(nodes)
        self._ranks = [self._ranks[index] for index in order]
        self._process_ids = [process_ids[index] for index in order]
        if len(set(nodes)) > 1:
            logger.info("ranks are on nodes %s", ", ".join(nodes[index][:8] for index in order))

    async def _connect(self) -> None:
        num_ranks = len(self._ranks)
        self._link = StepLink(num_ranks, self._deadlines.heartbeat)
        address = await self._link.listen(ray.util.get_node_ip_address())
        dials = [rank.connect_link.remote(*address) for rank in self._ranks]
        await self._wait(dials, "link", self._deadlines.link)
        await self._link.wait_for_ranks(self._deadlines.link)

    async def _wait(
        self, calls: Sequence[Any], phase: str, seconds: float, too_late: type[ExecutorError] = ExecutorError
    ) -> list[Any]:
        """Results of one call a rank, in the order of the ranks.

        Raises ExecutorError for the first that fails, `too_late` naming those that do not answer in time.
        """
        seconds = self._patience(phase, seconds)
        tasks = [asyncio.ensure_future(_resolve(call)) for call in calls]
        try:
            with suppress(TimeoutError):
                async with awake_timeout(seconds):
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for rank, task in enumerate(tasks):
                if task.done() and (error := task.exception()) is not None:
                    raise ExecutorError(
                        f"rank {rank} failed in start-up phase {phase!r}: {root_cause(error)}", "startup"
                    ) from error
            if late := ", ".join(f"rank {rank}" for rank, task in enumerate(tasks) if not task.done()):
                raise too_late(f"{late} did not finish start-up phase {phase!r} within {seconds:g} s", "startup")
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    # Steps

    def execute_step(self, plan: StepPlan, seconds: float) -> Awaitable[StepResult]:
        """Send to all ranks at once, without waiting. Raises ExecutorError, from the awaitable."""
        return self._started_link().execute(plan, seconds)

    def check_health(self) -> None:
        """Raises ExecutorError if a rank is known to be dead, or none was started."""
        self._started_link().check_health()

    def process_ids(self) -> list[int]:
        """Of the ranks, in order."""
        return list(self._process_ids)

    def _started_link(self) -> StepLink:
        if self._link is None:
            raise ExecutorError("the ranks were not started")
        return self._link

    # End

    async def shutdown(self) -> None:
        """Kill every rank and wait, for the deadline's seconds, until they are gone. Never raises for a dead rank."""
        self._ranks += self._actors.give_up_spares()
        try:
            await self._kill_ranks()
        finally:
            await self._actors.remove_group()

    async def _kill_ranks(self) -> None:
        if self._link is not None:
            self._link.close()
        ranks, self._ranks = self._ranks, []
        if not ranks:
            return
        await off_loop(self._deadlines.shutdown, _kill, ranks)
        await self._wait_for_deaths(ranks)

    async def _wait_for_deaths(self, ranks: Sequence[Any]) -> None:
        probes = [asyncio.ensure_future(_death(rank)) for rank in ranks]
        _, alive = await asyncio.wait(probes, timeout=self._deadlines.shutdown)
        for rank, probe in enumerate(probes):
            if probe in alive:
                probe.cancel()
                logger.error("rank %d is not gone after %g s", rank, self._deadlines.shutdown)


def _kill(ranks: Sequence[Any]) -> None:
    for rank in ranks:
        ray.kill(rank, no_restart=True)


async def _death(rank: Any) -> None:
    """A call to a dead actor fails: that is how Ray says it is gone. Until a kill is done, it may still answer."""
    while True:
        try:
            await rank.process_id.remote()
        except ActorUnavailableError:
            pass  # or only cut off
        except Exception:
            return
        await asyncio.sleep(_PROBE_SECONDS)


async def _resolve(call: Any) -> Any:
    return await call

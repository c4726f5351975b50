"""From a scheduler's cache over the link into a front end's views: links that break, and reports that are lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from link_peers import DEADLINE, HOST, until

from cluster.engine import reporter
from cluster.engine.reporter import Reporter
from cluster.links.engine_views import EngineViews
from cluster.links.messages import GenerateRequest, LinkAddress
from cluster.links.token_receiver import TokenReceiver
from cluster.links.token_sender import TokenSender
from scheduler.backlog import Backlog
from scheduler.config import SchedulerConfig
from scheduler.plan import RequestOutput, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

PROMPT = list(range(100))


@dataclass
class Side:
    """An engine and a front end, linked."""

    scheduler: Scheduler
    sender: TokenSender
    receiver: TokenReceiver
    views: EngineViews
    rate: float = 1000.0

    def compute(self, name: str, prompt: list[int]) -> None:
        """A request from its arrival to its end."""
        self.scheduler.add_request(Request(name, prompt, SamplingParams(max_tokens=1)))
        while (plan := self.scheduler.schedule()) is not None:
            done = {each for each in plan.num_scheduled_tokens if not self.scheduler.requests[each].is_partial
                    or self.scheduler.requests[each].num_output_placeholders}  # fmt: skip
            self.scheduler.update_from_result(plan, StepResult(plan.epoch, plan.step_id, {each: [1] for each in done}))

    def seconds_and_hit(self, prompt: list[int]) -> tuple[float, int]:
        """What the front end expects of the engine; nothing is sent."""
        asked = GenerateRequest("asked", prompt, SamplingParams(max_tokens=1), 0.0, LinkAddress("", 0, ""))
        route = self.views.route(asked, ["engine-1"])
        self.views.settled("asked")
        return route.seconds, route.num_hit_tokens

    def mirror(self) -> set[bytes]:
        return self.views._table._view("engine-1").block_hashes


@asynccontextmanager
async def linked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Side]:
    monkeypatch.setattr(reporter, "_PERIOD_SECONDS", 0.005)
    views = EngineViews()
    receiver = TokenReceiver(views=views)
    await receiver.start(HOST)
    sender = TokenSender("engine-1", lambda request_id, reason: None, DEADLINE)
    side = Side(Scheduler(SchedulerConfig(256, 64, 8, 16), 24), sender, receiver, views)
    reporting = asyncio.ensure_future(Reporter(side.scheduler, lambda num, context: side.rate, sender).run())
    receiver.register("open")
    sender.open("open", receiver.address, lambda summary: None)
    sender.admit("open")
    yield side
    await receiver.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert reporting.cancelled()


async def test_the_view_follows_the_cache_whatever_happens_to_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(monkeypatch) as side:
        side.compute("before", PROMPT)
        await until(lambda: side.seconds_and_hit(PROMPT) == (4 / 1000, 96))
        for index in range(20):  # 24 blocks do not hold them all: some are evicted
            side.compute(f"r{index}", [index] * (40 + 7 * index))
            if index % 5 == 2:
                for link in list(side.receiver._listener.links):
                    link.abort()
            if index == 11:
                side.scheduler.end_epoch()
            await until(lambda: side.mirror() == set(side.scheduler.cached_hashes()))
            assert len(side.mirror()) == (0 if index == 11 else len(side.scheduler.cached_hashes()))
        assert side.seconds_and_hit([999] * 50) == (50 / 1000, 0)


async def test_a_lost_report_is_mended_by_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(monkeypatch) as side:
        side.compute("a", PROMPT)
        await until(lambda: side.seconds_and_hit(PROMPT)[1] == 96)
        side.views._table._view("engine-1").sequence -= 1  # as if one had not come
        side.compute("b", [5] * 100)
        await until(lambda: side.seconds_and_hit([5] * 100)[1] == 96)
        assert side.seconds_and_hit(PROMPT)[1] == 96


async def test_an_idle_engine_reports_with_its_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "HEARTBEAT_SECONDS", 0.05)
    async with linked(monkeypatch) as side:
        await until(lambda: side.mirror() is not None and side.seconds_and_hit(PROMPT)[0] == 0.1)
        side.rate = 500.0
        await until(lambda: side.seconds_and_hit(PROMPT)[0] == 0.2)


async def test_first_tokens_end_what_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(monkeypatch) as side:
        await until(lambda: side.seconds_and_hit(PROMPT)[0] == 0.1)
        sent = GenerateRequest("open", [7] * 64, SamplingParams(max_tokens=5), 0.0, side.receiver.address)
        side.views.route(sent, ["engine-1"])
        assert side.seconds_and_hit([7] * 65) == ((64 + 1) / 1000, 64)
        side.sender.publish([RequestOutput("open", [1])])
        await until(lambda: side.seconds_and_hit([7] * 65) == (65 / 1000, 0))


async def test_front_ends_without_views_are_sent_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = TokenSender("engine-1", lambda request_id, reason: None, DEADLINE)
    receiver = TokenReceiver()
    await receiver.start(HOST)
    channel = receiver.register("a")
    sender.open("a", receiver.address, lambda summary: None)
    sender.admit("a")
    await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
    assert sender.wants_report() == "no"
    await receiver.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_queue_that_takes_long_to_measure_is_measured_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = 0
    really_measure = reporter.measure

    def slowly(scheduler: Scheduler) -> Backlog:
        nonlocal measured
        measured += 1
        time.sleep(0.01)
        return really_measure(scheduler)

    monkeypatch.setattr(reporter, "measure", slowly)
    async with linked(monkeypatch) as side:
        await until(lambda: measured == 1)
        await asyncio.sleep(0.25)
        assert measured == 1  # 50 without a rest
        await until(lambda: measured >= 2)
        side.compute("one", PROMPT)
        await until(lambda: side.seconds_and_hit(PROMPT)[1] == 96)

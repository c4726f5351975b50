"""What the executor over Ray does where Ray or a link fail, with actors that are none."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_executor import LIMITS
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from cluster.engine import ray_executor
from cluster.engine.executor import NoRoom
from cluster.engine.ray_executor import RayExecutor
from cluster.engine.settings import EngineDeadlines, EngineSettings
from cluster.engine.step_link import StepLink
from cluster.errors import ExecutorError
from workers.config import WorkerConfig
from workers.link import LinkError

DEADLINE = 20.0


class Method:
    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def remote(self, *_: Any) -> Awaitable[Any]:
        async def answer() -> Any:
            return self._call()

        return answer()


class Rank:
    """Answers all that it is asked; `answers` come first from `process_id`, errors are raised."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.rendezvous = Method(lambda: "tcp://x:1")
        self.node_id = Method(lambda: "node")
        self.measure = Method(lambda: LIMITS)
        self.load = self.allocate = self.connect_link = Method(lambda: None)
        self.profile = Method(list)
        self.process_id = Method(self._process_id)

    def _process_id(self) -> int:
        answer = self.answers.pop(0) if self.answers else ActorDiedError()
        if isinstance(answer, Exception):
            raise answer
        return int(answer)


class Actors:
    """Stands for `RankActors`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.ranks: list[Rank] = []
        self.num_spares = 0

    async def take(self) -> list[Rank]:
        self.ranks.append(Rank([7]))
        return self.ranks[-1:]

    async def make_spares(self) -> None:
        raise RayError("no spares today")

    def give_up_spares(self) -> list[Any]:
        return []

    async def remove_group(self) -> None: ...


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    monkeypatch.setattr(ray_executor, "RankActors", Actors)
    monkeypatch.setattr(ray_executor.ray, "kill", lambda rank, no_restart: None)
    monkeypatch.setattr(ray_executor.ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    async def nothing(*_: Any) -> None: ...

    monkeypatch.setattr(StepLink, "wait_for_ranks", nothing)
    return []


def executor(phases: list[tuple[str, bool]], **deadlines: float) -> RayExecutor:
    settings = EngineSettings(
        WorkerConfig("/models/x", max_num_seqs=1, max_num_batched_tokens=8), deadlines=EngineDeadlines(**deadlines)
    )
    return RayExecutor(settings, lambda name, seconds: phases.append((name, seconds is not None)))


async def test_start_needs_no_spares(phases: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture) -> None:
    group = executor(phases)
    assert (await group.start()).num_blocks == LIMITS.num_blocks
    assert "no spare ranks were started: RayError: no spares today" in caplog.text
    await group.shutdown()


@pytest.mark.parametrize("error", [LinkError("no port"), RayError("GCS is gone"), OSError("no sockets")])
async def test_failure_of_any_kind_may_be_tried_again(
    error: Exception, phases: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = executor(phases)
    await group.start()
    phases.clear()

    async def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(StepLink, "listen", fail)
        with pytest.raises(ExecutorError, match="start-up phase 'link' failed: ") as failure:
            await group.restart()
    assert failure.value.kind == "startup"
    assert str(error) in str(failure.value)
    assert phases[-2:] == [("link", False), ("link", True)]
    await group.restart()
    await group.shutdown()


async def test_ranks_that_are_not_placed_have_no_room(
    phases: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def take(self: Actors) -> list[Rank]:
        rank = Rank([])
        rank.process_id.remote = lambda *_: asyncio.get_running_loop().create_future()  # type: ignore[method-assign]
        return [rank]

    monkeypatch.setattr(Actors, "take", take)
    with pytest.raises(NoRoom, match=r"rank 0 did not finish start-up phase 'place' within 0\.1 s"):
        await executor(phases, place=0.1, shutdown=0.1).start()
    assert phases == [("place", False), ("place", True)]


async def test_a_rank_that_answers_is_not_gone(phases: list[tuple[str, bool]]) -> None:
    rank = Rank([7, ActorUnavailableError("not now", None), 7, ActorDiedError()])
    await asyncio.wait_for(executor(phases)._wait_for_deaths([rank]), DEADLINE)
    assert rank.answers == []


async def test_a_rank_that_does_not_die_is_waited_for_no_longer_than_the_deadline(
    phases: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank([7] * 10_000)
    await asyncio.wait_for(executor(phases, shutdown=0.2)._wait_for_deaths([rank]), DEADLINE)
    assert "rank 0 is not gone after 0.2 s" in caplog.text

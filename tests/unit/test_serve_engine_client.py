"""What a front end knows of the limits of its engines, which may be replaced by others."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster.errors import EngineError
from cluster.links.serve_engine_client import ServeEngineClient
from cluster.links.serve_request_stream import ClientDeadlines
from workers.config import ModelLimits

LIMITS = ModelLimits(max_model_len=100, num_blocks=10, block_size=16, vocab_size=50)


@dataclass
class Engines:
    """A handle: its only method is `limits`."""

    answer: ModelLimits | Exception
    asked: int = 0

    @property
    def limits(self) -> Any:
        return self

    def remote(self) -> Awaitable[ModelLimits]:
        return self._limits()

    async def _limits(self) -> ModelLimits:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def client_of(engines: Engines, age: float) -> ServeEngineClient:
    receiver: Any = None  # only requests need one
    return ServeEngineClient(engines, receiver, ClientDeadlines(limits_age=age))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a task that nobody holds changes it
            await asyncio.sleep(0)


async def test_limits_are_asked_for_once_while_they_are_young() -> None:
    engines = Engines(LIMITS)
    client = client_of(engines, age=1e6)
    assert [await client.limits() for _ in range(3)] == [LIMITS] * 3
    assert engines.asked == 1


async def test_engines_with_other_limits_are_noticed_without_waiting() -> None:
    engines = Engines(LIMITS)
    client = client_of(engines, age=-1)
    assert await client.limits() == LIMITS
    engines.answer = longer = replace(LIMITS, max_model_len=200)
    assert await client.limits() == LIMITS
    await until(lambda: engines.asked == 2)
    assert await client.limits() == longer


async def test_old_limits_do_where_a_question_would_start_an_engine() -> None:
    engines = Engines(LIMITS)
    client = client_of(engines, age=-1)
    assert [await client.limits(renew=False) for _ in range(3)] == [LIMITS] * 3
    await asyncio.sleep(0)
    assert engines.asked == 1


async def test_while_no_engine_is_ready_the_last_limits_hold() -> None:
    engines = Engines(RayActorError())
    client = client_of(engines, age=-1)
    with pytest.raises(EngineError, match="no engine is ready"):
        await client.limits()
    engines.answer = LIMITS
    assert await client.limits() == LIMITS
    engines.answer = RayActorError()
    for asked in (3, 4):
        assert await client.limits() == LIMITS
        await until(lambda asked=asked: engines.asked == asked)  # type: ignore[misc]

"""An engine's event loop and thread, so that steps share neither with anything slow."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from cluster.engine.engine import Engine
from cluster.errors import EngineError
from workers.config import ModelLimits

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """An engine on an event loop and a thread of its own; every method may be called from any other thread."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        """`make_engine` runs on the engine's thread."""
        self._make_engine = make_engine
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: Future[ModelLimits] = Future()
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self, seconds: float) -> ModelLimits:
        """Blocks until the engine serves. Raises what its start raised, EngineError after `seconds`."""
        self._thread.start()
        try:
            return self._started.result(seconds)
        except TimeoutError:
            raise EngineError(f"the engine did not start within {seconds:g} s") from None

    def post(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run it on the engine's loop, soon, between steps. Raises EngineError when the thread has ended."""
        try:
            self._loop.call_soon_threadsafe(lambda: function(*args, **kwargs))
        except RuntimeError as error:
            raise EngineError(f"the engine's thread has ended: {error}") from error

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """The same, with what it returns or raises."""
        answer: Future[T] = Future()
        self.post(_answer, answer, lambda: function(*args, **kwargs))
        return answer

    @property
    def engine(self) -> Engine:
        """To be touched by `post` and `call` only. Raises EngineError before the thread has built it."""
        if self._engine is None:
            raise EngineError("the engine has not started")
        return self._engine

    def stop(self, seconds: float) -> None:
        """Shut the engine down, if it is up or still starting, and end the thread.

        Raises EngineError when that takes longer than `seconds`.
        """
        if not self._thread.is_alive():
            return
        self.post(self._stop.set)
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise EngineError(f"the engine did not stop within {seconds:g} s")

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        """Start, run until told to stop, and stop. A failed engine stays, to say why it does not serve."""
        stopping = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(self._start())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.cancel():
            await asyncio.wait((starting,))
        try:
            limits = starting.result()
        except BaseException as error:
            stopping.cancel()
            self._started.set_exception(error)
            return
        self._started.set_result(limits)
        running = asyncio.ensure_future(self.engine.run())
        await stopping
        await self.engine.shutdown()
        await running

    async def _start(self) -> ModelLimits:
        self._engine = self._make_engine()
        return await self._engine.start()


def _answer(answer: "Future[T]", function: Callable[[], T]) -> None:
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)

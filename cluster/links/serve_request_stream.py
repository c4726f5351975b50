"""One request from its submission to its end, whatever happens to the engines that hold it.

The one place that knows of attempts: when an engine is lost, the request is sent again as its prompt and the tokens
that its reader has got, and the reader sees no more of it than a pause.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from cluster.awake import awake_timeout
from cluster.errors import EngineError, EngineLost, RequestError
from cluster.links.attempt import Attempt
from cluster.links.delivered import Delivered
from cluster.links.messages import GenerateRequest
from cluster.links.token_receiver import TokenReceiver
from scheduler.plan import RequestOutput

logger = logging.getLogger(__name__)

_MOST_LOSSES = 8
"""So many engines lost without a token between: the request itself may be what ends them."""


@dataclass(frozen=True, slots=True)
class ClientDeadlines:
    """How long a front end waits for what, in seconds."""

    limits: float = 10.0
    limits_age: float = 5.0
    """Limits that are older are asked for again."""
    admission: float = 60.0
    """From a new request to an engine's answer, attempts and the queue of Serve's router included."""
    failover: float = 300.0
    """The same for a request that an engine had taken and lost: the last engine may try to recover for two minutes, and
    then have to be started anew."""
    attempt: float = 2.0
    """Until the first attempt is given up that no engine answers: it may lie in one that hangs. Each later one gets
    twice as long, for none may be there yet.
    """
    tokens: float = 2.0
    """From the end of a call to the last tokens on the link."""
    first_pause: float = 0.05
    """Between two attempts that failed at once; doubled each time."""
    longest_pause: float = 1.0

    def with_waking(self, seconds: float) -> "ClientDeadlines":
        """The same where there may be no engine, and one starts for a request: for so long it may load."""
        return replace(self, limits=seconds, admission=seconds, failover=max(seconds, self.failover))


class ServeRequestStream:
    """Call `open` first; one reader."""

    def __init__(self, request: GenerateRequest, handle: Any, receiver: TokenReceiver, deadlines: ClientDeadlines):
        self.request_id = request.request_id
        self._handle = handle
        self._receiver = receiver
        self._deadlines = deadlines
        self._delivered = Delivered(request)
        self._attempt = self._send(request)
        self._ended = asyncio.Event()
        """It was ended from this side."""
        self._was_admitted = False
        self._lost_at = -1
        """Tokens delivered when an engine was last lost, and how often in a row that was just there."""
        self._losses_here = 0

    async def open(self) -> None:
        """Until an engine has accepted it. Raises RequestError when one refuses it, EngineError in the end."""
        await self._wait_admitted(self._deadlines.admission)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Raises EngineError when no engine can go on with it. Left early, or cancelled, the request is aborted."""
        output: RequestOutput | None = None
        try:
            while output is None or output.finish_reason is None:
                output = await self._read()
                yield output
        finally:
            if output is None or output.finish_reason is None:
                self.finish("abort")

    def finish(self, reason: str) -> None:
        """End it for "stop" or "abort"; the stream ends with that reason at once. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            self._attempt.finish(reason)

    async def _read(self) -> RequestOutput:
        while True:
            try:
                return self._delivered.take(await self._attempt.read())
            except EngineLost as loss:
                reason = self._delivered.finish_reason()
                if reason is not None:
                    return self._delivered.take(RequestOutput(self.request_id, [], reason))
                await self._go_on(loss)

    async def _go_on(self, loss: EngineLost) -> None:
        """Until another engine has it. Raises EngineError in the end."""
        held = self._delivered.num_tokens
        self._losses_here = self._losses_here + 1 if held == self._lost_at else 1
        self._lost_at = held
        if self._losses_here > _MOST_LOSSES:
            raise EngineError(f"engines lost the request {self._losses_here} times after {held} tokens; last: {loss}")
        logger.warning("request %s is sent again after %d tokens: %s", self.request_id, held, loss)
        self._send_again()
        try:
            await self._wait_admitted(self._deadlines.failover)
        except RequestError as error:
            raise EngineError(f"an engine refused the request that another had lost ({loss}): {error}") from error

    async def _wait_admitted(self, seconds: float) -> None:
        """Send it again and again until an engine takes it, or it was ended from this side."""
        patience, pause = self._deadlines.attempt, self._deadlines.first_pause
        loss: EngineLost | None = None
        try:
            async with awake_timeout(seconds):
                while (loss := await self._loss_before_admission(patience)) is not None:
                    if await self._ended_within(pause):
                        return
                    self._send_again()
                    patience, pause = 2 * patience, min(2 * pause, self._deadlines.longest_pause)
        except TimeoutError:
            self._attempt.abandon()
            raise EngineError(f"no engine took the request within {seconds:g} s; last: {loss}") from None
        self._was_admitted = True

    async def _loss_before_admission(self, patience: float) -> EngineLost | None:
        """None when the attempt was admitted, or ended from this side. Raises RequestError when it is refused."""
        try:
            async with awake_timeout(patience):
                await self._attempt.wait_admitted()
        except TimeoutError:
            return EngineLost(f"no engine answered within {patience:g} s")
        except EngineLost as loss:
            return loss
        except RequestError as refusal:
            # What has been accepted once is not turned away for a queue: another engine, or a little later.
            if self._was_admitted and refusal.retry_after is not None:
                return EngineLost(str(refusal))
            raise
        return None

    async def _ended_within(self, seconds: float) -> bool:
        try:
            async with awake_timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            pass  # It may have ended in the same turn.
        return self._ended.is_set()

    def _send_again(self) -> None:
        self._attempt.abandon()
        self._attempt = self._send(self._delivered.next_request(was_admitted=self._was_admitted))

    def _send(self, request: GenerateRequest) -> Attempt:
        return Attempt(request, self._handle, self._receiver, self._deadlines.tokens)

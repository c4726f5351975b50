"""The engine client of a front end: requests go through a Serve handle, tokens come on the token link.

A request is one handle call that resolves when the request ends, so Serve sees load, routes and
drains. The call is also how a front end learns at once that an engine died.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.errors import EngineError, root_cause
from cluster.links.messages import GenerateRequest, GenerateSummary
from cluster.links.token_receiver import TokenChannel, TokenReceiver
from scheduler.plan import RequestOutput
from scheduler.sampling_params import SamplingParams
from workers.config import ModelLimits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientDeadlines:
    """How long a front end waits for what, in seconds."""

    limits: float = 10.0
    admission: float = 60.0
    """From the call to an engine's answer: the queue of Serve's router included."""
    tokens: float = 10.0
    """From the end of the call to the last tokens on the link."""


class ServeEngineClient:
    """An `EngineClient` over a handle with `generate` and `limits`: a Serve deployment's, or a plain actor's."""

    def __init__(self, handle: Any, receiver: TokenReceiver, deadlines: ClientDeadlines | None = None) -> None:
        """`receiver` must have been started, on the loop that uses this client:

        receiver = TokenReceiver()
        await receiver.start(ray.util.get_node_ip_address())
        client = ServeEngineClient(handle, receiver)
        """
        self._handle = handle
        self._receiver = receiver
        self._deadlines = deadlines or ClientDeadlines()
        self._limits: ModelLimits | None = None

    async def limits(self) -> ModelLimits:
        """Raises EngineError while no engine is ready."""
        if self._limits is None:
            try:
                async with asyncio.timeout(self._deadlines.limits):
                    self._limits = await self._handle.limits.remote()
            except TimeoutError:
                raise EngineError(f"no engine told its limits within {self._deadlines.limits:g} s") from None
            except (RayError, RayServeException) as error:
                raise EngineError(f"no engine is ready: {root_cause(error)}") from error
        return self._limits

    async def open(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> "ServeRequestStream":
        """Returns once an engine has accepted it. Raises RequestError, EngineError."""
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=list(prompt_token_ids),
            sampling_params=sampling_params,
            arrival_time=time.time(),
            reply_to=self._receiver.address,
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = ServeRequestStream(request, self._handle, self._receiver, self._deadlines.tokens)
        try:
            async with asyncio.timeout(self._deadlines.admission):
                await stream.wait_admitted()
        except TimeoutError:
            stream.finish("abort")
            raise EngineError(f"no engine took the request within {self._deadlines.admission:g} s") from None
        except asyncio.CancelledError:
            stream.finish("abort")
            raise
        return stream


class ServeRequestStream:
    """One request on its way: its handle call, and its channel on the token link.

    A task waits for the call and frees the channel when it has ended, however that comes about.
    """

    def __init__(self, request: GenerateRequest, handle: Any, receiver: TokenReceiver, token_seconds: float) -> None:
        self.request_id = request.request_id
        self._receiver = receiver
        self._token_seconds = token_seconds
        self._channel: TokenChannel = receiver.register(request.request_id)
        try:
            self._call = handle.generate.remote(request)
        except Exception:
            receiver.release(request.request_id)
            raise
        self._watch = asyncio.ensure_future(self._watch_call())

    async def wait_admitted(self) -> None:
        """Raises RequestError when it was refused, EngineError when the engine was lost first."""
        await self._channel.wait_admitted()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Raises EngineError when the engine is lost. Left early, or cancelled, the request is aborted."""
        output: RequestOutput | None = None
        try:
            while output is None or output.finish_reason is None:
                output = await self._channel.read()
                yield output
        finally:
            if output is None or output.finish_reason is None:
                self.finish("abort")

    def finish(self, reason: str) -> None:
        """End it for "stop" or "abort"; the stream ends with that reason at once. Idempotent."""
        if self._channel.finish_reason is not None:
            return
        if self._watch.done():
            self._channel.end(reason)
        elif not self._receiver.finish(self._channel, reason):
            self._cancel_call()

    async def _watch_call(self) -> None:
        try:
            summary: GenerateSummary = await self._call
            await self._wait_for_tokens(summary)
        except (RayError, RayServeException, asyncio.CancelledError) as error:
            self._channel.fail(EngineError(f"the engine was lost: {root_cause(error)}"))
        except Exception as error:
            logger.exception("the call of request %s failed", self.request_id)
            self._channel.fail(EngineError(f"the call to the engine failed: {type(error).__name__}: {error}"))
        finally:
            self._receiver.release(self.request_id)

    async def _wait_for_tokens(self, summary: GenerateSummary) -> None:
        """The call and the link are two ways: the link may be a little behind."""
        try:
            async with asyncio.timeout(self._token_seconds):
                await self._channel.wait_complete()
        except TimeoutError:
            self._channel.fail(
                EngineError(
                    f"of {summary.num_tokens} tokens {self._channel.num_tokens} came within {self._token_seconds:g} s"
                    f" of the request's end ({summary.finish_reason})"
                )
            )

    def _cancel_call(self) -> None:
        """Serve's responses know how to cancel themselves; a plain actor's call is Ray's to cancel."""
        if isinstance(self._call, ray.ObjectRef):
            ray.cancel(self._call)
        else:
            self._call.cancel()

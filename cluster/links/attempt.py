"""One attempt at a request: one call to one engine, and its channel on the token link."""

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.awake import awake_timeout
from cluster.errors import EngineError, EngineLost, RequestFailed, root_cause
from cluster.links.messages import GenerateRequest, GenerateSummary
from cluster.links.token_receiver import TokenChannel, TokenReceiver
from scheduler.plan import RequestOutput

logger = logging.getLogger(__name__)

_NOT_SERVING = (EngineError, RayError, RayServeException, asyncio.CancelledError)


class Attempt:
    """A task waits for the call and frees the channel when it has ended, however that comes about."""

    def __init__(self, request: GenerateRequest, handle: Any, receiver: TokenReceiver, token_seconds: float) -> None:
        """Sends the request. `token_seconds`: from the end of the call to the last tokens on the link."""
        self._request_id = request.request_id
        self._receiver = receiver
        self._token_seconds = token_seconds
        self._call: Any = None
        self._channel: TokenChannel = receiver.register(request.request_id)
        self._watch = asyncio.ensure_future(self._watch_call(handle, request))

    async def wait_admitted(self) -> None:
        """Until an engine has accepted it, or `finish`.

        Raises RequestError when it was refused, EngineLost when the engine was lost first.
        """
        await self._channel.wait_admitted()

    async def read(self) -> RequestOutput:
        """The next output. Raises EngineLost, after all that had come; EngineError when another would do no better."""
        return await self._channel.read()

    def finish(self, reason: str) -> None:
        """End it for "stop" or "abort"; its reader gets a last output with that reason at once."""
        if self._watch.done():
            self._channel.end(reason)
        elif not self._receiver.finish(self._channel, reason):
            self._cancel_call()

    def abandon(self) -> None:
        """Nobody reads it any more; an engine that still works at it is told to stop."""
        self._receiver.release(self._request_id)
        if not self._watch.done():
            self._cancel_call()

    async def _watch_call(self, handle: Any, request: GenerateRequest) -> None:
        try:
            self._call = handle.generate.remote(request)
            summary: GenerateSummary = await self._call
            await self._wait_for_tokens(summary)
        except RayTaskError as error:
            # What the replica itself raised: that it does not serve, as others may, or a fault of its code.
            kind = EngineLost if isinstance(error.cause, _NOT_SERVING) else EngineError
            self._channel.fail(kind(f"the engine failed the request: {root_cause(error)}"))
        except (RayError, RayServeException, asyncio.CancelledError) as error:
            self._channel.fail(EngineLost(f"the engine was lost: {root_cause(error)}"))
        except Exception as error:
            logger.exception("the call of request %s failed", self._request_id)
            self._channel.fail(EngineError(f"the call to the engine failed: {type(error).__name__}: {error}"))
        finally:
            self._receiver.release(self._request_id)

    async def _wait_for_tokens(self, summary: GenerateSummary) -> None:
        """The call and the link are two ways: the link may be a little behind."""
        try:
            async with awake_timeout(self._token_seconds):
                await self._channel.wait_complete()
        except TimeoutError:
            # An error is the last word on a request: another engine would come to the same.
            kind = RequestFailed if summary.finish_reason == "error" else EngineLost
            self._channel.fail(
                kind(
                    f"of {summary.num_tokens} tokens {self._channel.num_tokens} came within {self._token_seconds:g} s"
                    f" of the request's end ({summary.finish_reason})"
                )
            )

    def _cancel_call(self) -> None:
        """Serve's responses know how to cancel themselves; a plain actor's call is Ray's to cancel."""
        if self._call is None:  # The task has not begun, so that there is nothing to be cancelled but itself.
            self._watch.cancel()
            self._receiver.release(self._request_id)
        elif isinstance(self._call, ray.ObjectRef):
            ray.cancel(self._call)
        else:
            self._call.cancel()

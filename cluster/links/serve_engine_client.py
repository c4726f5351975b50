"""The engine client of a front end: requests go through a Serve handle, tokens come on the token link.

A request is one handle call that resolves when the request ends, so Serve sees load, routes and
drains. The call is also how a front end learns at once that an engine died.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.awake import awake_timeout
from cluster.errors import EngineError, root_cause
from cluster.links.messages import GenerateRequest
from cluster.links.serve_request_stream import ClientDeadlines, ServeRequestStream
from cluster.links.token_receiver import TokenReceiver
from scheduler.sampling_params import SamplingParams
from workers.config import ModelLimits


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
        self._asked_at = 0.0
        self._renewal: asyncio.Future[None] | None = None

    async def limits(self, *, renew: bool = True) -> ModelLimits:
        """Raises EngineError while no engine has been ready yet.

        Engines may be replaced by others with other limits: who asks learns it from the second question on, and never
        waits for it. Where all engines are gone for want of work, the question starts one: `renew` False does not ask.
        """
        if self._limits is None:
            await self._ask_limits()
        elif renew and self._renewal is None and time.monotonic() - self._asked_at > self._deadlines.limits_age:
            self._renewal = asyncio.ensure_future(self._renew_limits())
        assert self._limits is not None
        return self._limits

    async def _renew_limits(self) -> None:
        with contextlib.suppress(EngineError):  # No engine is ready just now: its successor is asked later.
            await self._ask_limits()
        self._renewal = None

    async def _ask_limits(self) -> None:
        self._asked_at = time.monotonic()
        try:
            async with awake_timeout(self._deadlines.limits):
                self._limits = await self._handle.limits.remote()
        except TimeoutError:
            raise EngineError(f"no engine told its limits within {self._deadlines.limits:g} s") from None
        except (RayError, RayServeException) as error:
            raise EngineError(f"no engine is ready: {root_cause(error)}") from error

    async def open(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ServeRequestStream:
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
        stream = ServeRequestStream(request, self._handle, self._receiver, self._deadlines)
        try:
            await stream.open()
        except asyncio.CancelledError:
            stream.finish("abort")
            raise
        return stream

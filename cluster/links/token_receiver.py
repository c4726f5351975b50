"""The front end's end of the token links: where engines dial in, and who waits for which tokens.

One listener serves a front end. Lives on one event loop.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace

from cluster.errors import ChunkserveError, EngineError, EngineLost, RequestError
from cluster.links.engine_views import EngineViews
from cluster.links.messages import Admission, Finish, LinkAddress, Resume, Watch
from cluster.links.token_link import HEARTBEAT, HEARTBEAT_SECONDS, decode_from_engine, encode_message
from scheduler.plan import ReplicaReport, RequestOutput
from workers.link import AsyncLink, LinkError, LinkListener

logger = logging.getLogger(__name__)


class TokenChannel:
    """What has come of one request and was not read yet; one reader."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.engine_id: str | None = None
        """Who took it, once that is known."""
        self.num_tokens = -1
        """Tokens received; -1 before the admission."""
        self.finish_reason: str | None = None
        """Why it was ended from this side, if it was."""
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outputs: deque[RequestOutput] = deque()
        self._arrived = asyncio.Event()
        self._error: ChunkserveError | None = None
        self._complete = asyncio.Event()
        """The last output has come, or `fail` has ended it."""

    async def wait_admitted(self) -> None:
        """Until an engine has accepted it, or it was ended from this side.

        Raises RequestError when refused, EngineError when failed.
        """
        await asyncio.shield(self._admitted)

    async def wait_complete(self) -> None:
        """Until the last output has come, whether it was read or not."""
        await self._complete.wait()

    async def read(self) -> RequestOutput:
        """The next output. Raises EngineLost when its engine has lost it, after all that had come."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return self._outputs.popleft()

    def admit(self, admission: Admission) -> None:
        self.num_tokens = max(self.num_tokens, 0)
        if admission.retry_after is not None:
            self.fail(RequestError(admission.error or "", None, 429, "queue_full", admission.retry_after))
        elif admission.error is not None:
            self.fail(RequestError(admission.error, admission.param))
        elif not self._admitted.done():
            self._admitted.set_result(None)

    def put(self, output: RequestOutput) -> None:
        """Take an output from the link; after the last one, and after `end`, nothing counts."""
        if self._complete.is_set():
            return
        if output.finish_reason == "lost" or (output.finish_reason == "abort" and self.finish_reason is None):
            self.put(replace(output, finish_reason=None))
            self.fail(EngineLost(f"the engine gave it up ({output.finish_reason}): {output.error}"))
            return
        self.num_tokens += len(output.new_token_ids)
        self._outputs.append(output)
        self._arrived.set()
        if output.finish_reason is not None:
            self._complete.set()

    def end(self, reason: str) -> None:
        """End it from this side: what was not read is dropped, and the reader gets a last output."""
        self._outputs.clear()
        self.finish_reason = reason
        self._error = None
        self._complete.clear()
        self.put(RequestOutput(self.request_id, [], finish_reason=reason))
        if not self._admitted.done():
            self._admitted.set_result(None)

    def fail(self, error: ChunkserveError) -> None:
        """The reader gets what has come, then this. Does nothing once the last output has come."""
        if self._complete.is_set():
            return
        self._error = error
        self._complete.set()
        self._arrived.set()
        if not self._admitted.done():
            self._admitted.set_exception(error)
            self._admitted.exception()  # looked at: not everybody who fails was being waited for


@dataclass(slots=True)
class _Engine:
    """One engine that has dialled in."""

    link: AsyncLink
    heard_at: float
    channels: dict[str, TokenChannel] = field(default_factory=dict)


class TokenReceiver:
    """Listens for engines and hands what they send to the channels that wait for it."""

    def __init__(self, silence_seconds: float = 5.0, views: EngineViews | None = None) -> None:
        """An engine of which nothing, not even a heartbeat, was heard for so long is taken for lost.

        With `views` engines are asked for reports, which go there with what requests show.
        """
        self._views = views
        self._silence_seconds = silence_seconds
        self._listener = LinkListener(self._opened, self._received, self._closed)
        self._channels: dict[str, TokenChannel] = {}
        self._engines: dict[str, _Engine] = {}
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str) -> LinkAddress:
        """Listen at `host`, this node's address, on a free port. Raises LinkError."""
        await self._listener.start(host)
        self._watch = asyncio.ensure_future(self._watch_silence())
        return self.address

    @property
    def address(self) -> LinkAddress:
        return LinkAddress(self._listener.host, self._listener.port, self._listener.token)

    async def close(self) -> None:
        """End every link and fail whoever still waits."""
        if self._watch is not None:
            self._watch.cancel()
        self._listener.close()
        for channel in self._channels.values():
            channel.fail(EngineError("the front end is closing"))

    def register(self, request_id: str) -> TokenChannel:
        """Before the request is sent anywhere. `release` it when its call has ended."""
        channel = TokenChannel(request_id)
        self._channels[request_id] = channel
        return channel

    def release(self, request_id: str) -> None:
        """Whatever still comes for it is answered with an abort."""
        channel = self._channels.pop(request_id, None)
        if self._views is not None:
            self._views.settled(request_id)
        if channel is not None and channel.engine_id in self._engines:
            self._engines[channel.engine_id].channels.pop(request_id, None)

    def finish(self, channel: TokenChannel, reason: str) -> bool:
        """End it on both sides. False when its engine is not known, or lost: then the call must be cancelled.

        An engine without a link just now is told when it has redialled.
        """
        channel.end(reason)
        engine = self._engines.get(channel.engine_id or "")
        if engine is None:
            return False
        engine.link.send(*encode_message(Finish(channel.request_id, reason)))
        return True

    # What the listener calls

    def _opened(self, link: AsyncLink) -> None:
        engine = self._engines.get(link.name)
        if engine is None:
            engine = self._engines[link.name] = _Engine(link, time.monotonic())
        else:
            engine.link.abort()
            engine.link, engine.heard_at = link, time.monotonic()
        waiting = [each for each in self._channels.values() if each.engine_id in (None, link.name)]
        link.send(*encode_message(Resume({each.request_id: each.num_tokens for each in waiting})))
        for channel in waiting:
            if channel.finish_reason is not None:
                link.send(*encode_message(Finish(channel.request_id, channel.finish_reason)))
        if self._views is not None:
            link.send(*encode_message(Watch()))

    def _received(self, link: AsyncLink, kind: int, payload: bytes) -> None:
        engine = self._engines.get(link.name)
        if engine is None or engine.link is not link:
            return  # It was replaced or given up, and what it still says was or will be said again.
        engine.heard_at = time.monotonic()
        if kind == HEARTBEAT:
            return
        message = decode_from_engine(kind, payload)
        if isinstance(message, Admission):
            channel = self._channel(engine, message.request_id)
            if channel is not None:
                channel.engine_id = link.name
                engine.channels[message.request_id] = channel
                channel.admit(message)
                if self._views is not None:
                    self._views.admitted(message.request_id)
                if channel.finish_reason is not None:
                    link.send(*encode_message(Finish(channel.request_id, channel.finish_reason)))
            return
        if isinstance(message, ReplicaReport):
            if self._views is not None and not self._views.update(link.name, message):
                link.send(*encode_message(Watch()))
            return
        for output in message.outputs:
            channel = self._channel(engine, output.request_id)
            if channel is not None:
                if self._views is not None and channel.num_tokens == 0:
                    self._views.settled(output.request_id)
                channel.put(output)

    def _channel(self, engine: _Engine, request_id: str) -> TokenChannel | None:
        """Who waits for it. If nobody does, the engine is told to stop."""
        channel = self._channels.get(request_id)
        if channel is None:
            engine.link.send(*encode_message(Finish(request_id, "abort")))
        return channel

    def _closed(self, link: AsyncLink, cause: LinkError | None) -> None:
        engine = self._engines.get(link.name)
        if engine is not None and engine.link is link and engine.channels:
            logger.warning("token link lost, its engine should redial: %s", cause)

    # Silence

    async def _watch_silence(self) -> None:
        """A suspended engine closes no socket: only its silence tells."""
        while True:
            slept_from = time.monotonic()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            if now - slept_from > 2 * HEARTBEAT_SECONDS:
                continue  # This process itself stood still: what engines said meanwhile is not read yet.
            for engine_id, engine in list(self._engines.items()):
                if now - engine.heard_at > self._silence_seconds:
                    self._give_up(engine_id, engine)

    def _give_up(self, engine_id: str, engine: _Engine) -> None:
        del self._engines[engine_id]
        engine.link.abort()
        if self._views is not None:
            self._views.lost(engine_id)
        cause = f"nothing was heard of {engine_id} for {self._silence_seconds:g} s"
        if engine.channels:
            logger.error("%s: %d requests are lost", cause, len(engine.channels))
        for channel in engine.channels.values():
            channel.fail(EngineLost(cause))

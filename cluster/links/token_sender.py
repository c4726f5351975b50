"""The engine's end of the token links: keeps what each front end may still ask for, and sends it.

Lives on the engine's loop and never waits for a socket: one slow or dead front end delays nobody.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from cluster.links.messages import Admission, LinkAddress, Resume, TokenBatch, Watch
from cluster.links.request_tokens import OnEnd, RequestTokens
from cluster.links.token_link import HEARTBEAT, HEARTBEAT_SECONDS, decode_from_frontend, encode_message
from scheduler.plan import ReplicaReport, RequestOutput
from workers.link import GREETING_SECONDS, MAX_BUFFERED_BYTES, AsyncLink, LinkError, connect

logger = logging.getLogger(__name__)

FinishRequest = Callable[[str, str], None]
"""(request id, reason): the engine's `finish_request`."""

_REDIAL_SECONDS = 0.2


class _Frontend:
    """One front end: its link, when there is one, and the requests it sent."""

    def __init__(
        self,
        address: LinkAddress,
        engine_id: str,
        finish_request: FinishRequest,
        orphan_seconds: float,
        max_buffered: int,
    ) -> None:
        self._address = address
        self._engine_id = engine_id
        self._finish_request = finish_request
        self._orphan_seconds = orphan_seconds
        self._max_buffered = max_buffered
        self.requests: dict[str, RequestTokens] = {}
        self._link: AsyncLink | None = None
        self._resumed = False
        self.watches = False
        """It wants reports; and has the snapshot on which they stand."""
        self.has_snapshot = False
        self._changed = asyncio.Event()
        """The link has resumed, or is lost."""

    async def serve(self) -> None:
        """Keep a link while there is anything to say; return when the front end is gone for good."""
        seen_at = time.monotonic()
        while time.monotonic() - seen_at < self._orphan_seconds:
            if await self._dial():
                while self._resumed:
                    await self._change()
                seen_at = time.monotonic()
                if not self.requests:
                    return
            await asyncio.sleep(_REDIAL_SECONDS)

    async def _dial(self) -> bool:
        """Connect, and wait until the front end has said what it holds."""
        address, self._link = self._address, None
        try:
            self._link = await connect(
                address.host, address.port, address.token, self._engine_id,
                self._received, self._closed, min(GREETING_SECONDS, self._orphan_seconds), self._max_buffered,
            )  # fmt: skip
            async with asyncio.timeout(GREETING_SECONDS):
                await self._change()
        except LinkError as error:
            logger.warning("no token link: %s", error)
        except TimeoutError:
            logger.warning("front end %s:%d does not say what it holds", address.host, address.port)
            self.close()
        return self._resumed

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def give_up(self) -> None:
        """End every request that is still open, for nobody can be told of its tokens."""
        self.close()
        orphans = [each for each in self.requests.values() if each.finish_reason is None]
        if orphans:
            logger.warning(
                "front end %s:%d cannot be reached: its %d requests are aborted",
                self._address.host, self._address.port, len(orphans),
            )  # fmt: skip
        for tokens in orphans:
            self._finish_request(tokens.request_id, "abort")
            tokens.end("abort")

    def say(self, message: Admission | TokenBatch | ReplicaReport) -> None:
        """Send now, or let the next `Resume` ask for it."""
        if self._link is not None and self._resumed:
            self._link.send(*encode_message(message))

    def beat(self) -> None:
        if self._link is not None:
            self._link.send(HEARTBEAT, b"")

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _received(self, link: AsyncLink, kind: int, payload: bytes) -> None:
        message = decode_from_frontend(kind, payload)
        if isinstance(message, Resume):
            self._resumed = True
            self._changed.set()
            self._resume(message)
        elif isinstance(message, Watch):
            self.watches, self.has_snapshot = True, False
        elif message.request_id in self.requests:
            self._finish_request(message.request_id, message.reason)

    def _resume(self, resume: Resume) -> None:
        outputs: list[RequestOutput] = []
        for tokens in self.requests.values():
            held = resume.num_tokens.get(tokens.request_id, -1)
            if held < 0 and tokens.admission is not None:
                self.say(tokens.admission)
            outputs += tokens.since(max(held, 0))
        if outputs:
            self.say(TokenBatch(outputs))

    def _closed(self, link: AsyncLink, cause: LinkError | None) -> None:
        if link is not self._link:
            return
        if cause is not None and self.requests:
            logger.warning("token link lost: %s", cause)
        self._resumed = self.watches = False
        self._changed.set()


class TokenSender:
    """All front ends of one engine. Every method belongs to the engine's loop."""

    def __init__(
        self,
        engine_id: str,
        finish_request: FinishRequest,
        orphan_seconds: float,
        max_buffered: int = MAX_BUFFERED_BYTES,
    ) -> None:
        """`orphan_seconds`: how long an unreachable front end's requests live, and ended requests are kept for it.

        `max_buffered`: bytes that may wait for a front end before its link is dropped.
        """
        self._engine_id = engine_id
        self._finish_request = finish_request
        self._orphan_seconds = orphan_seconds
        self._max_buffered = max_buffered
        self._frontends: dict[LinkAddress, _Frontend] = {}
        self._of_request: dict[str, _Frontend] = {}
        self._pending: list[RequestOutput] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to send heartbeats. Call it on the loop."""
        self._keep(self._send_heartbeats())

    def open(self, request_id: str, reply_to: LinkAddress, on_end: OnEnd) -> None:
        """A request has come. Follow with `admit` or `refuse`."""
        frontend = self._frontends.get(reply_to)
        if frontend is None:
            frontend = _Frontend(
                reply_to, self._engine_id, self._finish_request, self._orphan_seconds, self._max_buffered
            )
            self._frontends[reply_to] = frontend
            self._keep(self._serve(reply_to, frontend))
        frontend.requests[request_id] = RequestTokens(request_id, on_end)
        self._of_request[request_id] = frontend

    def admit(self, request_id: str) -> None:
        """The engine has accepted it."""
        self._admission(Admission(request_id))

    def refuse(self, request_id: str, error: str, param: str | None, retry_after: float | None = None) -> None:
        """The engine has refused it: that ends it. `retry_after` in seconds, where the queue is too long for it now."""
        self._admission(Admission(request_id, error, param, retry_after))
        self._of_request[request_id].requests[request_id].end("error")
        self._retire(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a request that the engine has not answered."""
        frontend = self._of_request.pop(request_id, None)
        if frontend is not None:
            del frontend.requests[request_id]

    def publish(self, outputs: Sequence[RequestOutput]) -> None:
        """Send at the loop's next turn: by then the engine has sent its next plan."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending += outputs

    def wants_report(self) -> Literal["no", "changes", "snapshot"]:
        """Whether any front end wants reports; "snapshot": one of them has none yet, or has missed something."""
        watchers = [frontend for frontend in self._frontends.values() if frontend.watches]
        if not watchers:
            return "no"
        return "changes" if all(frontend.has_snapshot for frontend in watchers) else "snapshot"

    def report(self, changes: ReplicaReport, snapshot: Callable[[], ReplicaReport]) -> None:
        """Send it to whoever wants reports. `snapshot` makes one of the same sequence for those that have none."""
        for frontend in self._frontends.values():
            if frontend.watches:
                frontend.say(changes if frontend.has_snapshot else snapshot())
                frontend.has_snapshot = True

    def _flush(self) -> None:
        outputs, self._pending = self._pending, []
        batches: dict[_Frontend, list[RequestOutput]] = {}
        for output in outputs:
            frontend = self._of_request.get(output.request_id)
            if frontend is not None:
                frontend.requests[output.request_id].append(output)
                batches.setdefault(frontend, []).append(output)
                if output.finish_reason is not None:
                    self._retire(output.request_id)
        for frontend, batch in batches.items():
            frontend.say(TokenBatch(batch))

    def _admission(self, admission: Admission) -> None:
        frontend = self._of_request[admission.request_id]
        frontend.requests[admission.request_id].admission = admission
        frontend.say(admission)

    def _retire(self, request_id: str) -> None:
        """Keep an ended request for as long as its front end may still redial for it."""
        asyncio.get_running_loop().call_later(self._orphan_seconds, self.drop, request_id)

    async def _serve(self, address: LinkAddress, frontend: _Frontend) -> None:
        try:
            await frontend.serve()
        finally:
            del self._frontends[address]
            frontend.give_up()
            for request_id in list(frontend.requests):
                self.drop(request_id)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for frontend in self._frontends.values():
                frontend.beat()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

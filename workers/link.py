"""Framing of every socket of ours: typed, length-prefixed messages over TCP.

A frame is a 4-byte big-endian length, one byte that names the kind of message, and the message. The
caller's first two frames are the listener's random token and the caller's name; a listener closes on
a wrong token, and on none within a deadline. Both ends notice a dead peer by EOF at once and a cut
network by TCP's own keep-alive and unacknowledged-data timers.

`Link` blocks: one thread reads it, any may send. `AsyncLink` never blocks: a peer that does not read is
dropped once `max_buffered` bytes wait for it. Knows neither torch nor Ray, nor what messages mean.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import cast

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 << 20
MAX_GREETING_BYTES = 256
GREETING_SECONDS = 5.0
MAX_BUFFERED_BYTES = 16 << 20
PEER_TIMEOUT_SECONDS = 10
"""After this long without any sign from the peer's machine the kernel closes the connection."""

_HEADER = struct.Struct(">IB")
_TOKEN_KIND = 0xF0
_NAME_KIND = 0xF1


class LinkError(Exception):
    """A link cannot be made, broke, or carried nonsense; the message names the peer and the cause."""


class LinkClosed(LinkError):
    """The peer closed the link, or its process died: EOF between two messages."""


def new_token() -> str:
    return secrets.token_hex(16)


def frame(kind: int, payload: bytes) -> bytes:
    """One message as it is on the wire. Raises LinkError when it is over the limit."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise LinkError(f"a message of {len(payload)} bytes is over the link's limit of {MAX_MESSAGE_BYTES}")
    return _HEADER.pack(len(payload), kind) + payload


def _greeting(token: str, name: str) -> bytes:
    return frame(_TOKEN_KIND, token.encode()) + frame(_NAME_KIND, name.encode())


def _tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a cut network ends the link within PEER_TIMEOUT_SECONDS or so."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PEER_TIMEOUT_SECONDS // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", PEER_TIMEOUT_SECONDS // 2),
        ("TCP_USER_TIMEOUT", PEER_TIMEOUT_SECONDS * 1000),
    ):
        if hasattr(socket, name):  # Linux has all of them; elsewhere only EOF is noticed.
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Link:
    """The blocking end, for a thread that has nothing else to do than to wait for its peer."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self.peer = peer

    @classmethod
    def connect(cls, host: str, port: int, token: str, name: str, timeout: float) -> "Link":
        """Connect and greet. Raises LinkError when nothing answers at the address within `timeout` seconds."""
        peer = f"{host}:{port}"
        try:
            sock = socket.create_connection((host, port), timeout)
            _tune(sock)
            sock.sendall(_greeting(token, name))
            sock.settimeout(None)
        except OSError as error:
            raise LinkError(f"cannot connect to {peer} within {timeout:g} s: {error}") from error
        return cls(sock, peer)

    def send(self, kind: int, payload: bytes) -> None:
        """Blocks until the kernel has taken it all; messages of two threads do not mix.

        Raises LinkError when the link is broken.
        """
        try:
            with self._sending:
                self._socket.sendall(frame(kind, payload))
        except OSError as error:
            raise LinkError(f"cannot send to {self.peer}: {error}") from error

    def receive(self) -> tuple[int, bytearray]:
        """The next message. Raises LinkClosed at EOF, LinkError when the link is broken or corrupt."""
        header = self._receive_exactly(_HEADER.size, at_boundary=True)
        length, kind = _HEADER.unpack(header)
        if length > MAX_MESSAGE_BYTES:
            raise LinkError(f"{self.peer} announces {length} bytes, over the link's limit of {MAX_MESSAGE_BYTES}")
        return kind, self._receive_exactly(length, at_boundary=False)

    def has_message(self) -> bool:
        """Whether a message has begun to arrive, or the link has ended: `receive` would say so at once."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _receive_exactly(self, length: int, *, at_boundary: bool) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        filled = 0
        while filled < length:
            try:
                received = self._socket.recv_into(view[filled:])
            except OSError as error:
                raise LinkError(f"link to {self.peer} broke: {error}") from error
            if received == 0:
                if at_boundary and filled == 0:
                    raise LinkClosed(f"{self.peer} closed the link")
                raise LinkError(f"{self.peer} closed the link in the middle of a message")
            filled += received
        return data

    def close(self) -> None:
        """Ends it for both sides, and wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # It may be broken already; then there is nobody left to tell.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class AsyncLink(asyncio.Protocol):
    """The non-blocking end. All callbacks run on the loop that made it, in order.

    `on_message(link, kind, payload)` per message; `on_close(link, cause)` once, when an opened link
    has ended, with None after our own `close`. Whatever `on_message` raises ends the link.
    """

    def __init__(
        self,
        on_message: Callable[["AsyncLink", int, bytes], None],
        on_close: Callable[["AsyncLink", LinkError | None], None],
        max_buffered: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._max_buffered = max_buffered
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._cause: LinkError | None = None
        self._closing = False
        self.peer = "?"
        self.name = "?"
        """What the peer calls itself (a listener's side only)."""

    def send(self, kind: int, payload: bytes) -> None:
        """Hand it to the kernel or to the buffer. Never waits; a closed link drops it silently, for
        `on_close` has said so or will."""
        if self._transport is None or self._closing:
            return
        buffered = self._transport.get_write_buffer_size()
        if buffered > self._max_buffered:
            self._drop(LinkError(f"{self.name} at {self.peer} does not read: {buffered} bytes wait for it"))
            return
        self._transport.write(frame(kind, payload))

    def close(self) -> None:
        """End it on purpose: what is buffered is still sent."""
        if self._transport is not None and not self._closing:
            self._closing = True
            self._transport.close()

    def abort(self) -> None:
        """End it now: what is buffered is lost."""
        if self._transport is not None:
            self._closing = True
            self._transport.abort()

    def _drop(self, cause: LinkError) -> None:
        if not self._closing:
            self._cause = cause
            self.abort()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _tune(transport.get_extra_info("socket"))
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else "a closed socket"

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        try:
            while not self._closing and len(self._buffer) - start >= _HEADER.size:
                length, kind = _HEADER.unpack_from(self._buffer, start)
                self._check_length(length)
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
                start = end
                self._receive(kind, payload)
        except LinkError as error:
            self._drop(error)
        except Exception as error:
            logger.exception("a message of %s at %s cannot be taken", self.name, self.peer)
            self._drop(LinkError(f"a message of {self.name} at {self.peer} cannot be taken: {error!r}"))
        del self._buffer[:start]

    def _check_length(self, length: int) -> None:
        if length > MAX_MESSAGE_BYTES:
            raise LinkError(f"{self.peer} announces {length} bytes, over the link's limit of {MAX_MESSAGE_BYTES}")

    def _receive(self, kind: int, payload: bytes) -> None:
        self._on_message(self, kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        cause = self._cause
        if cause is None and exc is not None:
            cause = LinkError(f"link to {self.name} at {self.peer} broke: {exc}")
        if cause is None and not self._closing:
            cause = LinkClosed(f"{self.name} at {self.peer} closed the link")
        self._closing = True
        self._on_close(self, cause)


class _GreetedLink(AsyncLink):
    """A listener's end: silent until the caller has shown the token and said its name."""

    def __init__(self, listener: "LinkListener") -> None:
        super().__init__(listener.on_message, listener.on_close, listener.max_buffered)
        self._listener = listener
        self._token_seen = False
        self._greeted = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.links.add(self)
        self._deadline = asyncio.get_running_loop().call_later(self._listener.greeting_seconds, self._expire)

    def _expire(self) -> None:
        self._drop(LinkError(f"{self.peer} showed no token within {self._listener.greeting_seconds:g} s"))

    def _check_length(self, length: int) -> None:
        if not self._greeted and length > MAX_GREETING_BYTES:
            raise LinkError(f"{self.peer} does not greet")
        super()._check_length(length)

    def _receive(self, kind: int, payload: bytes) -> None:
        if self._greeted:
            super()._receive(kind, payload)
        elif not self._token_seen:
            if kind != _TOKEN_KIND or not hmac.compare_digest(payload, self._listener.token.encode()):
                raise LinkError(f"{self.peer} showed a wrong token")
            self._token_seen = True
        else:
            if kind != _NAME_KIND:
                raise LinkError(f"{self.peer} does not say its name")
            self.name = payload.decode(errors="replace")
            self._greeted = True
            if self._deadline is not None:
                self._deadline.cancel()
            self._listener.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.links.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._greeted:
            super().connection_lost(exc)
        else:
            logger.warning("refused a link from %s: %s", self.peer, self._cause or exc or "it left before greeting")


class LinkListener:
    """Accepts links at one address of this node. `on_open(link)` runs once a caller has greeted."""

    def __init__(
        self,
        on_open: Callable[[AsyncLink], None],
        on_message: Callable[[AsyncLink, int, bytes], None],
        on_close: Callable[[AsyncLink, LinkError | None], None],
        max_buffered: int = MAX_BUFFERED_BYTES,
        greeting_seconds: float = GREETING_SECONDS,
    ) -> None:
        self.on_open = on_open
        self.on_message = on_message
        self.on_close = on_close
        self.max_buffered = max_buffered
        self.greeting_seconds = greeting_seconds
        self.token = new_token()
        self.host = ""
        self.port = 0
        self.links: set[AsyncLink] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> None:
        """Listen at `host`, the node's own address, on a free port. Raises LinkError when it is not ours."""
        try:
            self._server = await asyncio.get_running_loop().create_server(lambda: _GreetedLink(self), host, 0)
        except OSError as error:
            raise LinkError(f"cannot listen at {host}: {error}") from error
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    def stop_listening(self) -> None:
        """No new links; those that are open stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Stop listening and end every link at once."""
        self.stop_listening()
        for link in list(self.links):
            link.abort()


async def connect(
    host: str,
    port: int,
    token: str,
    name: str,
    on_message: Callable[[AsyncLink, int, bytes], None],
    on_close: Callable[[AsyncLink, LinkError | None], None],
    within: float,
    max_buffered: int = MAX_BUFFERED_BYTES,
) -> AsyncLink:
    """Connect and greet. Raises LinkError when nothing answers at the address `within` so many seconds.

    A wrong token is seen later, as the listener closing the link.
    """
    loop = asyncio.get_running_loop()
    link = AsyncLink(on_message, on_close, max_buffered)
    try:
        async with asyncio.timeout(within):
            transport, _ = await loop.create_connection(lambda: link, host, port)
    except (OSError, TimeoutError) as error:
        raise LinkError(f"cannot connect to {host}:{port} within {within:g} s: {error}") from error
    link.name = f"{host}:{port}"
    transport.write(_greeting(token, name))
    return link

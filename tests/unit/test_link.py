"""Framing, the token, and how both kinds of ends notice what goes wrong."""

import asyncio
import socket
import struct

import pytest
from link_peers import DEADLINE, HOST, Ends, Listening, until

from workers.link import MAX_MESSAGE_BYTES, Link, LinkClosed, LinkError, connect, frame

MESSAGES = [(1, b"plan"), (2, b""), (255, bytes(range(256)) * 4000), (3, b"x")]


def dial(server: Listening, token: str | None = None) -> Link:
    listener = server.listener
    return Link.connect(HOST, listener.port, listener.token if token is None else token, "rank 7", DEADLINE)


async def test_messages_cross_both_ways_whole_and_in_order() -> None:
    async with Listening() as server:
        link = await asyncio.to_thread(dial, server)
        await asyncio.to_thread(lambda: [link.send(*message) for message in MESSAGES])
        await until(lambda: len(server.messages) == len(MESSAGES))
        assert server.messages == MESSAGES
        assert [each.name for each in server.opened] == ["rank 7"]
        for message in MESSAGES:
            server.opened[0].send(*message)
        received = await asyncio.to_thread(lambda: [link.receive() for _ in MESSAGES])
        assert [(kind, bytes(payload)) for kind, payload in received] == MESSAGES
        link.close()
        await until(lambda: server.closed)
        assert isinstance(server.closed[0], LinkClosed)
        assert "rank 7" in str(server.closed[0])


async def test_frames_are_read_from_any_split() -> None:
    async with Listening() as server:
        greeting = frame(0xF0, server.listener.token.encode()) + frame(0xF1, b"slow")
        _, writer = await asyncio.open_connection(HOST, server.listener.port)
        for byte in greeting + frame(9, b"abc"):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await until(lambda: server.messages)
        assert server.messages == [(9, b"abc")]
        writer.close()


@pytest.mark.parametrize("token", ["", "0" * 32, "ü"])
async def test_wrong_token_is_closed_before_anything_is_heard(token: str) -> None:
    async with Listening() as server:
        link = await asyncio.to_thread(dial, server, token)
        with pytest.raises(LinkError):
            await asyncio.wait_for(asyncio.to_thread(link.receive), DEADLINE)
        assert (server.opened, server.messages, server.closed) == ([], [], [])


async def test_right_token_of_the_wrong_kind_is_closed() -> None:
    async with Listening() as server:
        reader, writer = await asyncio.open_connection(HOST, server.listener.port)
        writer.write(frame(1, server.listener.token.encode()))
        assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
        assert server.opened == []
        writer.close()


async def test_caller_without_a_token_is_closed_at_the_deadline() -> None:
    async with Listening(greeting_seconds=0.05) as server:
        reader, writer = await asyncio.open_connection(HOST, server.listener.port)
        assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
        assert server.opened == []
        writer.close()


async def test_greeted_caller_outlives_the_deadline() -> None:
    async with Listening(greeting_seconds=0.05) as server:
        link = await asyncio.to_thread(dial, server)
        await asyncio.sleep(0.15)
        await asyncio.to_thread(link.send, 4, b"still here")
        await until(lambda: server.messages)
        link.close()


async def test_stranger_cannot_make_the_listener_buffer() -> None:
    async with Listening() as server:
        reader, writer = await asyncio.open_connection(HOST, server.listener.port)
        writer.write(struct.pack(">IB", 100_000, 0xF0))
        assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
        writer.close()


async def test_oversized_frame_ends_the_link_with_its_cause() -> None:
    async with Listening() as server:
        link = await asyncio.to_thread(dial, server)
        await asyncio.to_thread(link._socket.sendall, struct.pack(">IB", MAX_MESSAGE_BYTES + 1, 1))
        await until(lambda: server.closed)
        assert f"over the link's limit of {MAX_MESSAGE_BYTES}" in str(server.closed[0])
        assert not isinstance(server.closed[0], LinkClosed)
        link.close()


async def test_handler_that_raises_ends_the_link_with_its_cause() -> None:
    async with Listening() as server:

        def explode(link: object, kind: int, payload: bytes) -> None:
            raise ValueError("no such plan")

        server.listener.on_message = explode
        link = await asyncio.to_thread(dial, server)
        await asyncio.to_thread(link.send, 1, b"")
        await until(lambda: server.closed)
        assert "no such plan" in str(server.closed[0])
        link.close()


async def test_asynchronous_caller() -> None:
    async with Listening() as server:
        ends = Ends()
        listener = server.listener
        link = await connect(HOST, listener.port, listener.token, "engine", ends.on_message, ends.on_close, DEADLINE)
        link.send(1, b"hello")
        await until(lambda: server.messages)
        server.opened[0].send(2, b"hello yourself")
        await until(lambda: ends.messages)
        assert (server.messages, ends.messages) == ([(1, b"hello")], [(2, b"hello yourself")])
        link.close()
        await until(lambda: ends.closed and server.closed)
        assert ends.closed == [None]
        link.send(1, b"into the void")  # dropped, and no error


async def test_peer_that_does_not_read_is_dropped_and_named() -> None:
    async with Listening(max_buffered=100_000) as server:
        link = await asyncio.to_thread(dial, server)
        await until(lambda: server.opened)
        for _ in range(1000):
            server.opened[0].send(1, bytes(100_000))
        await until(lambda: server.closed)
        assert "rank 7" in str(server.closed[0])
        assert "does not read" in str(server.closed[0])
        link.close()


def served_once(data: bytes) -> Link:
    """A blocking link whose peer has sent these bytes and left."""
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    return Link(ours, "rank 0's engine")


def test_blocking_end_tells_a_close_from_a_broken_message() -> None:
    link = served_once(frame(1, b"whole"))
    assert link.receive() == (1, b"whole")
    with pytest.raises(LinkClosed, match="rank 0's engine closed the link"):
        link.receive()
    for cut in (3, 7):
        with pytest.raises(LinkError, match="in the middle of a message") as error:
            served_once(frame(1, b"whole")[:cut]).receive()
        assert not isinstance(error.value, LinkClosed)
    with pytest.raises(LinkError, match="over the link's limit"):
        served_once(struct.pack(">IB", MAX_MESSAGE_BYTES + 1, 1)).receive()


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        with pytest.raises(LinkError, match=f"cannot connect to {HOST}:{port}"):
            Link.connect(HOST, port, "token", "me", 1.0)


async def test_listening_at_an_address_that_is_not_ours() -> None:
    server = Listening()
    with pytest.raises(LinkError, match=r"cannot listen at 192\.0\.2\.1"):
        await server.listener.start("192.0.2.1")

"""Data for a client is sent once and in order, by either write path, and never to another connection's client.

Also run on uvloop (connections/test_uvloop.py).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from gateway.server.client_writer import WRITE_BUFFER_BYTES
from gateway.server.connection import Connection
from tests.support.harness.gateway.gateway_rig import Rig, rig
from tests.support.net.certificates import sides

ROUNDS = 30
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
SIZES = (1, 100, 5_000, WRITE_BUFFER_BYTES, 5 * WRITE_BUFFER_BYTES)


@asynccontextmanager
async def connected(one: Rig) -> AsyncIterator[tuple[socket.socket, Connection]]:
    """Connect a client with small buffers; yield it and the gateway's side of the connection."""
    known = set(one.front._connections)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", one.port))
        async with asyncio.timeout(60):
            while not (new := set(one.front._connections) - known):
                await asyncio.sleep(0.001)
        yield client, new.pop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


def taken(client: socket.socket, most: int) -> bytes:
    """Return the bytes available to the client, up to `most`."""
    pieces: list[bytes] = []
    try:
        while most and (piece := client.recv(most)):
            pieces.append(piece)
            most -= len(piece)
    except (BlockingIOError, ConnectionResetError):
        pass
    return b"".join(pieces)


async def test_random_mix_of_direct_and_buffered_writes_is_sent_in_order() -> None:
    dice, ways = random.Random(4), set[tuple[bool, bool]]()
    async with rig() as one, connected(one) as (client, connection):
        transport = connection._transport
        assert transport is not None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(ROUNDS):
            given, got = bytearray(), bytearray()
            for _ in range(dice.randrange(40)):
                piece = dice.randbytes(dice.choice(SIZES))
                given += piece
                connection.write(piece)
                ways.add((connection._waits, connection.paused))
                assert connection.paused or transport.get_write_buffer_size() <= WRITE_BUFFER_BYTES
                got += taken(client, dice.choice((0, 100, 100_000)))
                await asyncio.sleep(0)
            async with asyncio.timeout(90):
                while len(got) < len(given):
                    got += taken(client, len(given))
                    await asyncio.sleep(0)
            assert got == given
            await until(lambda: not connection.paused and not connection._waits)
        assert connection.backlog() == 0
    assert ways == {(False, False), (True, False), (True, True)}


async def test_write_after_close_reaches_no_client_with_the_same_socket_number() -> None:
    """Socket numbers are reused at once."""
    ends: tuple[Callable[[Connection], None] | None, ...] = (
        Connection._close, Connection._abort, Connection._reset, Connection.let_go, None
    )  # fmt: skip
    async with rig() as one:
        for end in ends:
            async with connected(one) as (client, connection):
                transport = connection._transport
                assert transport is not None
                number = transport.get_extra_info("socket").fileno()
                if end is None:
                    client.shutdown(socket.SHUT_WR)
                    await until(partial(is_gone, connection))
                else:
                    end(connection)
                    transport.abort()
                connection.write(b"too late")
                await until(partial(is_closed, number))
                strangers = [pair for _ in range(50) for pair in socket.socketpair()]
                assert number in {stranger.fileno() for stranger in strangers}
                connection.write(b"too late")
                del connection, transport
                gc.collect()
                for stranger in strangers:
                    os.fstat(stranger.fileno())
                    stranger.setblocking(False)
                    assert taken(stranger, 100) == b""
                    stranger.close()
                assert taken(client, 100) == b"", end


def is_gone(connection: Connection) -> bool:
    return connection._transport is None


def is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


async def test_write_to_a_reset_client_ends_the_connection() -> None:
    """The socket reports the reset only once; reading, which is paused here, would not report it."""
    async with rig() as one, connected(one) as (client, connection):
        connection._stop_reading()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        async with asyncio.timeout(60):
            while one.front._connections:
                connection.write(b"x" * 1000)
                await asyncio.sleep(0)


async def test_client_socket_is_written_directly_only_without_tls() -> None:
    async with rig() as one:
        await one.client()
        await until(lambda: bool(one.front._connections))
        assert [connection._direct is not None for connection in one.front._connections] == [True]
    async with rig(tls=sides()) as one:
        await one.client()
        await until(lambda: bool(one.front._connections))
        assert [connection._direct for connection in one.front._connections] == [None]


async def test_connection_to_slow_client_closes_once_after_the_last_response() -> None:
    """The last response is produced when the client has taken the earlier ones: within the transport's own write."""
    trouble: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: trouble.append(context))
    async with rig() as one, connected(one) as (client, connection):
        transport = connection._transport
        assert transport is not None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        last, got = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), b""
        while transport.get_write_buffer_size() < WRITE_BUFFER_BYTES - 10:
            while transport.get_write_buffer_size() < WRITE_BUFFER_BYTES - 10:
                connection.write(b"x" * 10)
            await asyncio.sleep(0.05)  # a busy kernel may take some of it later
        client.send(GET + last)
        await until(lambda: connection.paused)
        async with asyncio.timeout(60):
            while one.front._connections:
                got += taken(client, 1 << 20)
                await asyncio.sleep(0)
        got += taken(client, 1 << 20)
        assert got.count(b"HTTP/1.1 200 OK") == 2
    assert not trouble

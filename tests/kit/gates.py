"""Calls through a chosen gateway of a `serve`: its gateways share one port, and the kernel chooses who gets a client.

Whose a connection is, the request id of a first answer on it says. Connections are opened until one is with the gateway
that is wanted; those that are with others are kept for when they are. A gateway that was replaced needs a new Gates.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from loadtest.client import ClientConnection, request_bytes, target_of
from loadtest.result import Shot

CONNECTIONS_MAX = 2000
"""Opened at most: as many as an address may have."""
ANSWER_S_MAX = 60.0


class Sent(NamedTuple):
    """One Call on a connection of its own."""

    connection: ClientConnection
    sent_s: float
    """When it was sent (monotonic)."""
    done: asyncio.Future[None]
    """Its answer has ended, well or badly."""

    @property
    def began_s(self) -> float | None:
        """When the first byte of its answer's body came."""
        return self.connection.first_byte_s

    @property
    def whole(self) -> bool:
        """It was answered as it should be."""
        answer = self.connection.answer
        return self.done.done() and answer.status == 200 and not answer.broken and not answer.errors

    @property
    def cut(self) -> bool:
        """Its connection broke before the answer was whole."""
        answer = self.connection.answer
        return self.done.done() and bool(answer.broken) and not answer.errors

    def leave(self) -> float:
        """The client goes away; when (monotonic)."""
        self.connection.close()
        return time.monotonic()


class Gates:
    """The inference port of one `serve`, gateway by gateway. `headers` go with every Call."""

    def __init__(self, url: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._target = target_of(url)
        self._headers = headers
        self._kept: dict[str, list[ClientConnection]] = {}
        self._opened: list[ClientConnection] = []

    async def connection(self, gateway: str) -> ClientConnection:
        """A fresh connection with this gateway."""
        kept = self._kept.setdefault(gateway, [])
        while not kept:
            assert len(self._opened) < CONNECTIONS_MAX, f"none of so many connections is with {gateway}"
            one = await self._open()
            self._kept.setdefault(await self._owner(one), []).append(one)
        return kept.pop()

    async def ready(self, gateway: str, count: int) -> None:
        """Until so many connections with it are there: `send` then needs no time for them."""
        self._kept[gateway] = [await self.connection(gateway) for _ in range(count)]

    async def send(self, gateway: str, shot: Shot, id: str = "") -> Sent:
        """Sends a Call through a gateway; `id` is its request id, if it matters."""
        connection = await self.connection(gateway)
        named = (("X-Request-Id", id),) if id else ()
        headers = (*self._headers, *shot.headers, *named)
        request = request_bytes(self._target, "POST", shot.path, headers, shot.body)
        sent_s = time.monotonic()
        return Sent(connection, sent_s, connection.begin(request, stream=shot.stream))

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._opened:
            if connection.open:
                connection.close()

    async def _open(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(ClientConnection, self._target.host, self._target.port)
        self._opened.append(connection)
        return connection

    async def _owner(self, connection: ClientConnection) -> str:
        async with asyncio.timeout(ANSWER_S_MAX):
            await connection.begin(request_bytes(self._target, "GET", "/health", (), b""), stream=False)
        id = connection.answer.headers["x-request-id"]
        return id.rsplit("-", 3)[0]  # gateway-N, and its process, boot and number


@contextlib.asynccontextmanager
async def gates(url: str, headers: tuple[tuple[str, str], ...] = ()) -> AsyncIterator[Gates]:
    """Gates whose connections are closed at the end."""
    one = Gates(url, headers)
    try:
        yield one
    finally:
        one.close()
        await asyncio.sleep(0)  # closed transports say so in the loop's next round

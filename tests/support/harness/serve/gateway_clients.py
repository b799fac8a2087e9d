"""Requests through a chosen gateway of a `serve`. The gateways share one port, and the kernel assigns the connections.

The request id of a connection's first response identifies its gateway. Connections are opened until one reaches the
wanted gateway; those to other gateways are kept for later use. After a gateway was replaced, create a new Gates.
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
"""Limit of open connections: as many as one address may have."""
ANSWER_S_MAX = 60.0


class Sent(NamedTuple):
    """One request on its own connection."""

    connection: ClientConnection
    sent_s: float
    """When it was sent (monotonic)."""
    done: asyncio.Future[None]
    """Done when its response has ended, successfully or not."""

    @property
    def began_s(self) -> float | None:
        """When the first byte of the response body arrived."""
        return self.connection.first_byte_s

    @property
    def whole(self) -> bool:
        """Whether the response is complete and correct."""
        answer = self.connection.answer
        return self.done.done() and answer.status == 200 and not answer.broken and not answer.errors

    @property
    def cut(self) -> bool:
        """Whether its connection broke before the response was complete."""
        answer = self.connection.answer
        return self.done.done() and bool(answer.broken) and not answer.errors

    def leave(self) -> float:
        """Disconnects the client; returns when (monotonic)."""
        self.connection.close()
        return time.monotonic()


class Gates:
    """The inference port of one `serve`, gateway by gateway. `headers` are sent with every request."""

    def __init__(self, url: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._target = target_of(url)
        self._headers = headers
        self._kept: dict[str, list[ClientConnection]] = {}
        self._opened: list[ClientConnection] = []

    async def connection(self, gateway: str) -> ClientConnection:
        """Returns a fresh connection to this gateway."""
        kept = self._kept.setdefault(gateway, [])
        while not kept:
            assert len(self._opened) < CONNECTIONS_MAX, f"none of so many connections is with {gateway}"
            one = await self._open()
            self._kept.setdefault(await self._owner(one), []).append(one)
        return kept.pop()

    async def ready(self, gateway: str, count: int) -> None:
        """Opens that many connections to the gateway in advance, so that `send` needs no time for it."""
        self._kept[gateway] = [await self.connection(gateway) for _ in range(count)]

    async def send(self, gateway: str, shot: Shot, id: str = "") -> Sent:
        """Sends a request through a gateway; `id` is its request id, if it matters."""
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
        return id.rsplit("-", 3)[0]  # gateway-N, then process, boot and number


@contextlib.asynccontextmanager
async def gates(url: str, headers: tuple[tuple[str, str], ...] = ()) -> AsyncIterator[Gates]:
    """Gates whose connections are closed at the end."""
    one = Gates(url, headers)
    try:
        yield one
    finally:
        one.close()
        await asyncio.sleep(0)  # closed transports finish in the next iteration of the event loop

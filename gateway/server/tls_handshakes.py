"""The TLS side of the inference port: clients from accept until the handshake is complete (RFC 8446). I/O.

Handles the handshake timeout, the connection limit per address, and the silent close after a failed handshake. A
Connection never sees a byte before the handshake is complete and then sees every byte in order, so the same code serves
TLS and plain clients. The caller supplies the current certificate for each client; this module reads no files.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from gateway.server.context import GatewayContext

SECONDS_MIN = 0.05
"""asyncio rejects a timeout of 0."""


class Handshakes:
    """Clients with a pending handshake. `context` returns the current TLS context; `client` is the protocol factory."""

    def __init__(self, gateway: GatewayContext, context: Callable[[], ssl.SSLContext]) -> None:
        self.gateway = gateway
        self.context = context
        self.under_way: set[asyncio.Task[None]] = set()
        """Bounded like connections: by address."""

    def client(self) -> asyncio.Protocol:
        """Build a protocol (the factory of a TLS port)."""
        return Newcomer(self)

    def close(self) -> None:
        """Abort all pending handshakes. Close the listener first."""
        for task in self.under_way:
            task.cancel()


class Newcomer(asyncio.Protocol):
    """One client until its handshake is complete; then a Connection replaces it."""

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes
        self._held: list[bytes] = []
        """Bytes that arrived before the handshake took over the transport, or together with the handshake's end."""
        self._left = False
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake; a client above a limit of connections is disconnected at once."""
        raw = cast("asyncio.Transport", transport)
        peer = raw.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""
        if not self._handshakes.gateway.count(address):
            self._handshakes.gateway.discount(address)
            raw.abort()
            return
        task = asyncio.get_running_loop().create_task(self._shake(raw, address))
        self._handshakes.under_way.add(task)
        task.add_done_callback(lambda task: self._ended(task, raw, address))

    def data_received(self, data: bytes) -> None:
        """Keep bytes for the handshake or the Connection."""
        self._held.append(data)

    def eof_received(self) -> None:
        """The client has disconnected already."""
        self._left = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected already."""
        del exc
        self._left = True

    def _ended(self, task: asyncio.Task[None], raw: asyncio.Transport, address: str) -> None:
        self._handshakes.under_way.discard(task)
        if not self._begun:  # a task that is cancelled before its first step runs no line of its coroutine
            raw.abort()
            self._handshakes.gateway.discount(address)

    async def _shake(self, raw: asyncio.Transport, address: str) -> None:
        self._begun = True
        loop, gateway = asyncio.get_running_loop(), self._handshakes.gateway
        try:
            if self._left or raw.is_closing():
                return
            loop.call_soon(self._give, raw)
            transport = await loop.start_tls(
                raw,
                self,
                self._handshakes.context(),
                server_side=True,
                ssl_handshake_timeout=max(gateway.limits.header_seconds_max, SECONDS_MIN),
                ssl_shutdown_timeout=max(gateway.limits.write_stall_seconds_max, SECONDS_MIN),
            )
        except OSError:  # no TLS, an old version, too slow, or disconnected: it is closed silently
            return
        finally:
            gateway.discount(address)
        if transport is None or self._left:
            raw.abort()
            return
        connection = gateway.connection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.unsent = lambda: transport.get_write_buffer_size() + raw.get_write_buffer_size()
        for data in self._held:
            connection.data_received(data)

    def _give(self, raw: asyncio.Transport) -> None:
        """Pass the bytes read so far to the handshake, which reads from now on (uvloop reads as soon as it accepts)."""
        handshake = cast("asyncio.BufferedProtocol", raw.get_protocol())
        pieces, self._held = self._held, []
        for piece in () if raw.is_closing() else pieces:
            memoryview(handshake.get_buffer(len(piece)))[: len(piece)] = piece
            handshake.buffer_updated(len(piece))

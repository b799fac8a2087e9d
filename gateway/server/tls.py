"""The TLS side of the inference port: clients from accept until they have shaken hands (RFC 8446). I/O.

Owns a client's TLS handshake: its clock, its place among its address's connections, and its quiet end when it fails. It
promises that a Connection never sees a byte before the handshake is whole and then sees every one in order, so that
the edge serves TLS and plain clients by the same code. Which certificate is in force is the caller's to say, anew for
each client; nothing here reads a file.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from gateway.gateway import Gateway

SECONDS_MIN = 0.05
"""A clock of 0 is an error to asyncio."""


class Handshakes:
    """The clients that have not shaken hands yet. `context` gives what is in force now; `client` is the factory."""

    def __init__(self, front: Gateway, context: Callable[[], ssl.SSLContext]) -> None:
        self.front = front
        self.context = context
        self.under_way: set[asyncio.Task[None]] = set()
        """Bounded as connections are: by address."""

    def client(self) -> asyncio.Protocol:
        """The protocol factory of a TLS port."""
        return Newcomer(self)

    def close(self) -> None:
        """Ends all that have not shaken hands. Close the listener before."""
        for task in self.under_way:
            task.cancel()


class Newcomer(asyncio.Protocol):
    """One client until it has shaken hands; then a Connection takes its place."""

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes
        self._held: list[bytes] = []
        """What came before the handshake took over the transport, or together with its end: one reading each."""
        self._left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here; one too many from its address is closed at once."""
        raw = cast("asyncio.Transport", transport)
        peer = raw.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""
        if not self._handshakes.front.count(address):
            self._handshakes.front.discount(address)
            raw.abort()
            return
        task = asyncio.get_running_loop().create_task(self._shake(raw, address))
        self._handshakes.under_way.add(task)
        task.add_done_callback(self._handshakes.under_way.discard)

    def data_received(self, data: bytes) -> None:
        """Bytes for whoever comes after us: the handshake, or the Connection."""
        self._held.append(data)

    def eof_received(self) -> None:
        """It has left already."""
        self._left = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The same."""
        del exc
        self._left = True

    async def _shake(self, raw: asyncio.Transport, address: str) -> None:
        loop, front = asyncio.get_running_loop(), self._handshakes.front
        try:
            if self._left or raw.is_closing():
                return
            loop.call_soon(self._give, raw)
            transport = await loop.start_tls(
                raw,
                self,
                self._handshakes.context(),
                server_side=True,
                ssl_handshake_timeout=max(front.limits.header_seconds_max, SECONDS_MIN),
                ssl_shutdown_timeout=max(front.limits.write_stall_seconds_max, SECONDS_MIN),
            )
        except OSError:  # no TLS, an old version, too slow, or gone: it is closed, and there is nobody to tell
            return
        finally:
            front.discount(address)
        if transport is None or self._left:
            raw.abort()
            return
        connection = front.connection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.unsent = lambda: transport.get_write_buffer_size() + raw.get_write_buffer_size()
        for data in self._held:
            connection.data_received(data)

    def _give(self, raw: asyncio.Transport) -> None:
        """The handshake reads from now on; it gets what was read before (uvloop reads as soon as it accepts)."""
        handshake = cast("asyncio.BufferedProtocol", raw.get_protocol())
        pieces, self._held = self._held, []
        for piece in () if raw.is_closing() else pieces:
            memoryview(handshake.get_buffer(len(piece)))[: len(piece)] = piece
            handshake.buffer_updated(len(piece))

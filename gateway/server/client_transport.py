"""Reading, timeouts and closing of a client connection: base class of `gateway.server.connection`.

Manages the one running timeout. Closes the connection after the written bytes have been sent, at once, or with a reset.
Independent of requests.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.server.client_writer import ClientWriter

if TYPE_CHECKING:
    from gateway.server.context import GatewayContext
    from gateway.server.proxied_call import ProxiedCall

LINGER_S = 2.0
"""After a rejection, received bytes are dropped for this long; else a reset could destroy the response in transit."""

_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER with a timeout of 0: close(2) sends a reset."""


class ClientTransport(ClientWriter):
    """One client connection without its requests. `proxied_call` is its running request."""

    __slots__ = ("_clock", "_gateway", "_left_bytes", "_lingers", "_reading", "_since_s", "proxied_call", "unsent")

    def __init__(self, gateway: GatewayContext) -> None:
        super().__init__()
        self._gateway = gateway
        self._reading = True
        self._lingers = False
        """Whether further requests are ignored."""
        self._clock = "idle"
        """The timeout that runs since `_since_s`: idle, head, body, busy, stall or linger."""
        self._since_s = 0.0
        self._left_bytes = 0
        """Unsent bytes at the last sweep."""
        self.proxied_call: ProxiedCall | None = None
        self.unsent: Callable[[], int] | None = None
        """Over TLS (`gateway.server.tls_handshakes`): returns the number of unsent bytes."""

    def _run(self, clock: str) -> None:
        self._clock = clock
        self._since_s = self._gateway.clock()

    def _said_all(self) -> bool:
        """Return whether all is sent; a TLS close then waits only briefly for close_notify (RFC 8446, 6.1)."""
        return self._lingers and self.unsent is not None and not self.unsent()

    def _takes(self, now_s: float) -> bool:
        """Return whether the client has read anything since the last sweep; if so, restart its timeout."""
        left = 0 if self._transport is None else self._transport.get_write_buffer_size()
        taken, self._left_bytes = left < self._left_bytes, left
        if taken:
            self._since_s = now_s
        return taken

    def _stop_reading(self) -> None:
        if self._transport is not None and self._reading:
            self._reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def _on_disconnect(self) -> None:
        proxied_call, self.proxied_call = self.proxied_call, None
        if proxied_call is not None:
            proxied_call.client_left()

    def _linger(self) -> None:
        """Signal the end of the response, and drop bytes that still arrive."""
        self._lingers = True
        self._run("linger")
        self._resume_reading()
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        """Close after the written bytes have been sent; nothing more is read."""
        if self._transport is not None:
            self._run("stall")
            self._lingers = True
            self.let_go()
            self._transport.close()

    def _abort(self) -> None:
        self._on_disconnect()
        self.let_go()
        if self._transport is not None:
            self._transport.abort()

    def _reset(self) -> None:
        """Reset the connection, so that no client takes the response for complete and the kernel drops unsent bytes."""
        self.let_go()
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._transport.abort()

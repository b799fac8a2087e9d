"""How a client connection is read, clocked and ended: what `gateway.server.connection` builds on.

Owns the one clock that runs, and the ways to end: after what is written, at once, or by a reset. It must not know what
is said on the connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.server.writer import ClientWriter

if TYPE_CHECKING:
    from gateway.gateway import Gateway
    from gateway.server.exchange import ProxiedCall

LINGER_S = 2.0
"""After a refusal what still arrives is dropped for so long, else a reset could destroy the answer on its way."""

_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER on, for no time: close(2) sends a reset."""


class ClientTransport(ClientWriter):
    """One client connection without its requests. `exchange` is its running Call."""

    __slots__ = ("_clock", "_front", "_left_bytes", "_lingers", "_reading", "_since_s", "exchange", "unsent")

    def __init__(self, front: Gateway) -> None:
        super().__init__()
        self._front = front
        self._reading = True
        self._lingers = False
        """Nothing is answered any more."""
        self._clock = "idle"
        """Which clock runs since `_since_s`: idle, head, body, busy, stall or linger."""
        self._since_s = 0.0
        self._left_bytes = 0
        """What waited for the client at the last look."""
        self.exchange: ProxiedCall | None = None
        self.unsent: Callable[[], int] | None = None
        """Over TLS (`gateway.server.tls`): bytes that have not gone out yet."""

    def _run(self, clock: str) -> None:
        self._clock = clock
        self._since_s = self._front.clock()

    def _said_all(self) -> bool:
        """Over TLS a close waits for the client's goodbye, which nobody owes us (RFC 8446, 6.1): not for long."""
        return self._lingers and self.unsent is not None and not self.unsent()

    def _takes(self, now_s: float) -> bool:
        """Whether the client has taken anything since the last look; then its clock begins anew."""
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

    def _left(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_left()

    def _linger(self) -> None:
        """Says that no more is answered, and drops what still arrives."""
        self._lingers = True
        self._run("linger")
        self._resume_reading()
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        """After what is written has gone out; nothing is read any more."""
        if self._transport is not None:
            self._run("stall")
            self._lingers = True
            self.let_go()
            self._transport.close()

    def _abort(self) -> None:
        self._left()
        self.let_go()
        if self._transport is not None:
            self._transport.abort()

    def _reset(self) -> None:
        """Ends the connection so that nobody takes what was sent for whole, and the kernel drops what was not taken."""
        self.let_go()
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._transport.abort()

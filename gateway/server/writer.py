"""What one client is told: straight to the kernel while nothing waits, else behind what waits in the transport.

Owns the transport and the second way to its socket. A transport writes with write(2), through the layers that files
have, after its own; send(2) makes a token cost less (bench/README.md, chunks). Promises: bytes go out in the order in
which they were given, or not at all; the socket is let go of before the transport closes it, for its number is another
connection's a moment later; that a client does not keep up is told once, and once that it does again.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

WRITE_BUFFER_BYTES = 64 << 10
"""What may wait for a client before its engine is paused."""


class ClientWriter(asyncio.Protocol):
    """One client connection as far as it is written to. `paused`: the client does not read what it is told."""

    __slots__ = ("_direct", "_transport", "_waits", "paused")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._direct: socket.socket | None = None
        """The transport's own socket, if what is written may go past the transport: not over TLS."""
        self._waits = False
        """The transport has bytes that the kernel did not take yet, or has been told where that begins to matter."""
        self.paused = False

    def write(self, data: bytes) -> None:
        """Now, or when the client takes more; nothing once the connection is gone."""
        direct = self._direct
        if direct is not None and not self._waits:
            try:
                sent = direct.send(data)
            except OSError:  # it takes nothing now, or is broken: which, the transport finds out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport = self._transport
        if transport is not None:
            transport.write(data)
            if self._waits:
                self._count()

    def backlog(self) -> int:
        """Bytes that wait for a client which does not keep up."""
        return self._transport.get_write_buffer_size() if self.paused and self._transport is not None else 0

    def let_go(self) -> None:
        """Nothing goes past the transport any more. To be called before anybody closes its socket."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.detach()

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The kernel does not take all: from now on what waits is counted."""
        self._waits = True
        self._count()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._waits = False
        if self.paused:
            self.paused = False
            self._caught_up()

    # --- what is built on it -----------------------------------------------------------------------------------------

    def _fell_behind(self) -> None:
        """`paused` has become true."""
        raise NotImplementedError

    def _caught_up(self) -> None:
        """`paused` has become false."""
        raise NotImplementedError

    def _made(self, transport: asyncio.BaseTransport) -> asyncio.Transport:
        """A connection: nothing has been written yet."""
        self._transport = made = cast("asyncio.Transport", transport)
        its = made.get_extra_info("socket")
        if its is None or made.get_extra_info("sslcontext") is not None:
            made.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        else:  # with a limit of 0 the transport says when something waits, and when nothing does
            made.set_write_buffer_limits(high=0)
            self._direct = socket.socket(its.family, its.type, its.proto, fileno=its.fileno())
        return made

    def _count(self) -> None:
        transport = self._transport
        if transport is not None and not self.paused and transport.get_write_buffer_size() > WRITE_BUFFER_BYTES:
            self.paused = True
            self._fell_behind()

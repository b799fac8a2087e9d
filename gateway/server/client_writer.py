"""Writes to one client socket. Bypasses the asyncio transport while its buffer is empty.

A transport has code of its own and uses write(2), which passes through the kernel's file layer. A direct send(2) costs
less per token (bench/results/data-plane.md, chunks). Bytes are sent in the order given, or not at all. The socket is
released before the transport closes it, because another connection may get the same file descriptor at once.
`_fell_behind` and `_caught_up` are called once per change.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final, cast

WRITE_BUFFER_BYTES: Final = 64 << 10
"""Bytes that may wait for a client before its engine is paused."""


class ClientWriter(asyncio.Protocol):
    """The write side of a client connection. `paused`: the client does not keep up."""

    __slots__ = ("_direct", "_transport", "_waits", "paused")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._direct: socket.socket | None = None
        """The transport's own socket, if writes may bypass the transport (not over TLS)."""
        self._waits = False
        """Whether the transport has bytes that the kernel has not accepted yet; over TLS, more than its limit."""
        self.paused = False

    def write(self, data: bytes) -> None:
        """Write now, or when the client accepts more; no-op once the connection is closed."""
        direct = self._direct
        if direct is not None and not self._waits:
            try:
                sent = direct.send(data)
            except OSError:  # not writable now, or broken: the transport will detect it
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
        """Return the bytes waiting for a client that does not keep up."""
        return self._transport.get_write_buffer_size() if self.paused and self._transport is not None else 0

    def let_go(self) -> None:
        """Stop bypassing the transport. Call it before anything closes its socket."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.detach()

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The kernel does not accept everything: count waiting bytes from now on."""
        self._waits = True
        self._count()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._waits = False
        if self.paused:
            self.paused = False
            self._caught_up()

    # --- for subclasses ----------------------------------------------------------------------------------------------

    def _fell_behind(self) -> None:
        """Called when `paused` becomes true."""
        raise NotImplementedError

    def _caught_up(self) -> None:
        """Called when `paused` becomes false."""
        raise NotImplementedError

    def _made(self, transport: asyncio.BaseTransport) -> asyncio.Transport:
        """Set up a new connection, before anything is written."""
        self._transport = made = cast("asyncio.Transport", transport)
        its = made.get_extra_info("socket")
        if its is None or made.get_extra_info("sslcontext") is not None:
            made.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        else:  # with a limit of 0 the transport reports any waiting byte, and an empty buffer
            made.set_write_buffer_limits(high=0)
            self._direct = socket.socket(its.family, its.type, its.proto, fileno=its.fileno())
        return made

    def _count(self) -> None:
        transport = self._transport
        if transport is not None and not self.paused and transport.get_write_buffer_size() > WRITE_BUFFER_BYTES:
            self.paused = True
            self._fell_behind()

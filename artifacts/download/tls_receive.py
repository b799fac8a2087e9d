"""Moves a TLS response body from its connection into a file outside the event loop, one thread per body. I/O.

Bytes already received are in the TLS object's buffer, the rest in the socket; this module keeps their order. asyncio
would copy each piece twice, in the one thread shared by all connections. Host and certificate were verified before the
connection was handed over. Never reads more bytes than requested; every wait has a timeout; bytes are passed to `put`
before more are decrypted.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from artifacts.download.splice import Patience
from artifacts.http.transport import Limits, Sealed
from artifacts.registry.blobs import Moved

SEALED_BYTES = 256 << 10
"""Encrypted bytes read from the socket at once."""
PLAIN_BYTES = 256 << 10
"""Plaintext bytes passed to `put` at once; fits into a core's cache, where it is hashed."""
_rooms = threading.local()


class Ends(NamedTuple):
    """The socket and the TLS object of one connection."""

    rest: socket.socket
    sealed: Sealed


Put = Callable[[int, Sequence[bytes | memoryview]], None]
"""`put(at, pieces)`; the pieces' buffer is reused after it returns."""


def receive_body(ends: Ends, count: int, put: Put, at: int, limits: Limits) -> Moved:
    """Receive `count` bytes of the body and write them from offset `at` on. Raises OSError if `put` raises it."""
    coming, (_, room) = _Coming(ends, Patience(ends.rest, limits)), _own_rooms()
    moved = 0
    while moved < count:
        got, broken = coming.into(room[: count - moved])
        if got:
            put(at + moved, [room[:got]])
            moved += got
        if broken:
            return Moved(moved, broken)
    return Moved(moved)


class _Coming:
    """Decrypts the bytes of one connection."""

    def __init__(self, ends: Ends, patience: Patience) -> None:
        self._rest, self._sealed = ends
        self._patience = patience

    def into(self, room: memoryview) -> tuple[int, str]:
        """Fill the buffer until it is full or reading would block; return (bytes, error text)."""
        got = 0
        while got < len(room):
            try:
                count = self._sealed.into(room[got:])
            except ssl.SSLWantReadError:
                try:
                    if self._more():
                        continue
                except BlockingIOError:
                    if got:
                        break
                    if broken := self._patience.wait():
                        return got, broken
                    continue
                except OSError as error:
                    return got, f"the connection broke during the response ({error.strerror})"
                count = 0
            except ssl.SSLError:
                return got, "the connection broke during the response (the data is not TLS)"
            if not count:
                return got, "the connection broke during the response (it ended too early)"
            got += count
        self._patience.came(got)
        return got, ""

    def _more(self) -> bool:
        """Read encrypted bytes from the socket; False at the end of the connection. Raises OSError."""
        if self._sealed.outgoing.pending:
            self._rest.send(self._sealed.outgoing.read())  # key update
        taken, _ = _own_rooms()
        count = self._rest.recv_into(taken)
        self._sealed.incoming.write(taken[:count])
        return count > 0


def _own_rooms() -> tuple[memoryview, memoryview]:
    """Return the thread's own buffers (encrypted, plaintext)."""
    found: tuple[memoryview, memoryview] | None = getattr(_rooms, "both", None)
    if found is None:
        found = _rooms.both = memoryview(bytearray(SEALED_BYTES)), memoryview(bytearray(PLAIN_BYTES))
    return found

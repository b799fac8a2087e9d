"""A body by TLS from its connection into a file, beside the event loop (one thread for each body). I/O.

Owns the order of one connection's bytes: what had come already lies in the buffer of its sealed end, the rest in the
socket. asyncio would copy each piece twice, in the one thread that all connections share. Whom the connection leads to,
and whether its certificate holds, was judged before it was given away. Promises: never more bytes than were asked for;
an end to every wait; bytes are given to `put` before more are unsealed.
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
"""Taken from the socket at once."""
PLAIN_BYTES = 256 << 10
"""Given to `put` at once: what fits beside it into the cache of a core, where it is summed."""
_rooms = threading.local()


class Ends(NamedTuple):
    """Both of one connection."""

    rest: socket.socket
    sealed: Sealed


Put = Callable[[int, Sequence[bytes | memoryview]], None]
"""`put(at, pieces)`: what the pieces are in is written over when it has returned."""


def receive_body(ends: Ends, count: int, put: Put, at: int, limits: Limits) -> Moved:
    """`count` bytes of the body, the first of which is to lie at `at`. Raises OSError where `put` does."""
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
    """One connection."""

    def __init__(self, ends: Ends, patience: Patience) -> None:
        self._rest, self._sealed = ends
        self._patience = patience

    def into(self, room: memoryview) -> tuple[int, str]:
        """(how much, what broke) until there is no more room, or nothing to go on with at once."""
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
                    return got, f"the connection broke while it answered ({error.strerror})"
                count = 0
            except ssl.SSLError:
                return got, "the connection broke while it answered (what came is no TLS)"
            if not count:
                return got, "the connection broke while it answered (its end came too early)"
            got += count
        self._patience.came(got)
        return got, ""

    def _more(self) -> bool:
        """Something came from the other side; False: its end did. Raises OSError."""
        if self._sealed.outgoing.pending:
            self._rest.send(self._sealed.outgoing.read())  # it wanted new keys
        taken, _ = _own_rooms()
        count = self._rest.recv_into(taken)
        self._sealed.incoming.write(taken[:count])
        return count > 0


def _own_rooms() -> tuple[memoryview, memoryview]:
    """(sealed, plain) of a thread, for as long as it lives."""
    found: tuple[memoryview, memoryview] | None = getattr(_rooms, "both", None)
    if found is None:
        found = _rooms.both = memoryview(bytearray(SEALED_BYTES)), memoryview(bytearray(PLAIN_BYTES))
    return found

"""How many bytes of bodies one gateway may hold, and who may bring more. Pure.

Owns that one number. Promises: what was let in is never more than `size`; a large body with a length is let in whole or
not at all, so that none waits for another half read; large ones wait in order, and leave a quarter to small ones; a
small one takes what has come of it, so that nobody fills the room with promises. It must
not know connections: who waits is told that it may go on.
"""

from __future__ import annotations

from typing import Protocol

from gateway.http.body import LARGE_BYTES, ChunkedBody

DEFAULT_BYTES = 1 << 30
"""Where no limit of memory is known."""
SHARE = 0.5
"""Of the limit; the rest is for connections, Calls and answers."""
LARGE_SHARE = 0.75
"""Of the room: above it no large body is let in."""
TLS_BYTES = 512 << 10
"""What a body that comes over TLS has in buffers beside itself, at most."""
STEP_BYTES = 1 << 20
"""A body that does not say its length is let in by so much at a time."""


class Waiter(Protocol):
    """Who waits until its body has room."""

    def let_in(self) -> None:
        """There is room now, and it is taken."""


class BodyBudget:
    """The bytes that bodies take, from the first that is read to the last that is given back."""

    __slots__ = ("_refused", "_waiting", "held_bytes", "large_bytes", "size_bytes", "staked_bytes", "stakes_bytes")

    def __init__(self, memory_bytes: int | None) -> None:
        self.size_bytes = DEFAULT_BYTES if memory_bytes is None else int(memory_bytes * SHARE)
        self.large_bytes = int(self.size_bytes * LARGE_SHARE)
        self.stakes_bytes = (self.size_bytes - self.large_bytes) // 2
        self.held_bytes = 0
        self.staked_bytes = 0
        """Of them what those hold who wait; apart from large bodies, else they could wait for each other."""
        self._waiting: dict[Waiter, tuple[ChunkedBody, int]] = {}
        """In order; bounded by what they hold: what was read with their heads."""
        self._refused = False
        """Since the last look."""

    @property
    def wanted(self) -> bool:
        """Somebody waits, or was refused since the last look."""
        return self._refused or bool(self._waiting)

    def looked(self) -> None:
        """Everybody has been asked to make room."""
        self._refused = False

    def admit(self, pieces: ChunkedBody, length: int | None, tls: int = 0) -> bool:
        """Takes room for a large body of that length, or for what has come of a small one or of one that does not say
        it, and for what lies in TLS's own buffers. False: there is none for it now.
        """
        if length is None or length <= LARGE_BYTES:
            missing = pieces.size + tls - pieces.reserved
            step = STEP_BYTES if pieces.size > LARGE_BYTES else 0
            if missing <= 0 or self._take(pieces, max(missing, step)):
                return True
            self._refused = True
            return False
        return not self._waiting and self._take(pieces, length + tls - pieces.reserved, self.large_bytes)

    def wait(self, waiter: Waiter, pieces: ChunkedBody, length: int, tls: int = 0) -> bool:
        """The body waits with what has come of it; False: there is not even room for that."""
        stake = pieces.size + tls
        if self.staked_bytes + stake > self.stakes_bytes or not self._take(pieces, stake - pieces.reserved):
            return False
        self.staked_bytes += stake
        self._waiting[waiter] = pieces, length + tls - pieces.reserved
        return True

    def waits(self, waiter: Waiter) -> bool:
        """Whether it does."""
        return waiter in self._waiting

    def forget(self, waiter: Waiter) -> None:
        """It waits no longer; those behind it may fit."""
        waited = self._waiting.pop(waiter, None)
        if waited is not None:
            self.staked_bytes -= waited[0].reserved
            self._fill()

    def release(self, pieces: ChunkedBody) -> None:
        """The body is gone."""
        self.held_bytes -= pieces.reserved
        pieces.reserved = 0
        self._fill()

    def _take(self, pieces: ChunkedBody, size: int, most: int | None = None) -> bool:
        if self.held_bytes + size > self.size_bytes:
            return False
        if most is not None and self.held_bytes - self.staked_bytes + size > most:
            return False
        self.held_bytes += size
        pieces.reserved += size
        return True

    def _fill(self) -> None:
        while self._waiting:
            waiter, (pieces, missing) = next(iter(self._waiting.items()))
            stake = pieces.reserved
            self.staked_bytes -= stake
            if not self._take(pieces, missing, self.large_bytes):
                self.staked_bytes += stake
                return
            del self._waiting[waiter]
            waiter.let_in()

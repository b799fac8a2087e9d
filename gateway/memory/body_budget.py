"""The budget for request bodies in a gateway's memory. Pure.

Invariants: admitted bytes never exceed the total size. A large body of known length is admitted entirely or not at all,
so that no body waits half read for another one. Large bodies are admitted in order and leave a quarter of the budget to
small ones. A small body takes only the bytes that have arrived, so a client cannot reserve memory without sending.
Independent of connections: a waiter is notified when it may continue.
"""

from __future__ import annotations

from typing import Protocol

from gateway.http.body_buffers import LARGE_BYTES, ChunkedBody

DEFAULT_BYTES = 1 << 30
"""Size if no memory limit is known."""
SHARE = 0.5
"""Share of the memory limit; the rest is for connections, requests and responses."""
LARGE_SHARE = 0.75
"""Share of the budget above which no large body is admitted."""
TLS_BYTES = 512 << 10
"""Maximum additional buffers of a body received over TLS."""
STEP_BYTES = 1 << 20
"""A body of unknown length is admitted in steps of this size."""


class Waiter(Protocol):
    """A connection whose body waits for room."""

    def let_in(self) -> None:
        """Called when memory for the body was reserved."""


class BodyBudget:
    """The bytes taken by bodies, from the first byte read until the body is released."""

    __slots__ = ("_refused", "_waiting", "held_bytes", "large_bytes", "size_bytes", "staked_bytes", "stakes_bytes")

    def __init__(self, memory_bytes: int | None) -> None:
        self.size_bytes = DEFAULT_BYTES if memory_bytes is None else int(memory_bytes * SHARE)
        self.large_bytes = int(self.size_bytes * LARGE_SHARE)
        self.stakes_bytes = (self.size_bytes - self.large_bytes) // 2
        self.held_bytes = 0
        self.staked_bytes = 0
        """The bytes that waiting bodies hold. They do not count towards the share of large bodies, because
        waiting bodies could otherwise wait for each other.
        """
        self._waiting: dict[Waiter, tuple[ChunkedBody, int]] = {}
        """Waiting bodies in order. While they wait, they hold at most `stakes_bytes` together."""
        self._refused = False
        """Whether a body was rejected since the last `looked`."""

    @property
    def wanted(self) -> bool:
        """Whether a body waits, or was rejected since the last `looked`."""
        return self._refused or bool(self._waiting)

    def looked(self) -> None:
        """Record that all connections have been checked for bodies that are too slow."""
        self._refused = False

    def admit(self, pieces: ChunkedBody, length: int | None, tls: int = 0) -> bool:
        """Take room for a body and its TLS buffers; False if there is none now.
        A large body with a length takes all of it; a small one, or one without a length, takes the bytes that have
        arrived.
        """
        if length is None or length <= LARGE_BYTES:
            missing = pieces.size + tls - pieces.reserved
            step = STEP_BYTES if pieces.size > LARGE_BYTES else 0
            if missing <= 0 or self._take(pieces, max(missing, step)):
                return True
            self._refused = True
            return False
        return not self._waiting and self._take(pieces, length + tls - pieces.reserved, self.large_bytes)

    def exchange(self, before: ChunkedBody | None, after: ChunkedBody) -> bool:
        """Pass the room of a body on to the one that replaces it, and take or release the difference in size; False if
        there is no room for it.
        """
        reserved = 0 if before is None else before.reserved
        if self.held_bytes - reserved + after.size > self.size_bytes:
            return False
        self.held_bytes += after.size - reserved
        after.reserved = after.size
        if before is not None:
            before.reserved = 0
        self._fill()
        return True

    def wait(self, waiter: Waiter, pieces: ChunkedBody, length: int, tls: int = 0) -> bool:
        """Let the body wait with the bytes that have arrived; False if there is no room even for these."""
        stake = pieces.size + tls
        if self.staked_bytes + stake > self.stakes_bytes or not self._take(pieces, stake - pieces.reserved):
            return False
        self.staked_bytes += stake
        self._waiting[waiter] = pieces, length + tls - pieces.reserved
        return True

    def waits(self, waiter: Waiter) -> bool:
        """Return whether it waits."""
        return waiter in self._waiting

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting; the next waiters may fit."""
        waited = self._waiting.pop(waiter, None)
        if waited is not None:
            self.staked_bytes -= waited[0].reserved
            self._fill()

    def release(self, pieces: ChunkedBody) -> None:
        """Release the room of a body."""
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

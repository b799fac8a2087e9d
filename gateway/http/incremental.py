"""Reads a large body where it lies, in steps that are bounded whatever is in it. Pure.

Owns Scan, a walk over the parts of Pieces that goes on when more has arrived. Promises: the same bytes are read the
same way however they are cut; a step does about STEP_UNITS of work, so that nobody else waits long; nothing is joined
or kept but what a reader asks for. What the bytes mean is the matter of those who walk: `gateway.request.json_scanner`
(JSON) and `gateway.request.multipart`.
"""

from __future__ import annotations

from gateway.errors import CallError, invalid_request
from gateway.http.body import Part

STEP_UNITS = 1_500_000
"""Work of one step; a unit is about a nanosecond."""
WINDOW_BYTES = 16 << 10
"""What is looked at in one go."""


class Scan:
    """A walk over Pieces, which may still grow. What it finds wrong is raised at the end (`check`)."""

    __slots__ = ("_at", "_index", "_token_bytes_max", "_units", "error", "offset", "parts", "size")

    def __init__(self, parts: list[Part], token_bytes_max: int) -> None:
        self.parts = parts
        """Of the Pieces: the Scan is theirs, and does not hold them in turn."""
        self.size = 0
        """How much of them has arrived."""
        self.error: CallError | None = None
        self.offset = 0
        """Bytes that are done with."""
        self._token_bytes_max = token_bytes_max
        self._units = 0
        """Left for this step."""
        self._index = self._at = 0
        """`offset` is in pieces.parts[_index] at _at."""

    def step(self, size: int, units: int = STEP_UNITS) -> bool:
        """Goes on, now that so many bytes are here; True once they are read (or something in them was wrong)."""
        self.size, self._units = size, units
        try:
            while self.offset < size and self.error is None:
                if self._units <= 0:
                    return False
                window = self._take(self._wanted())
                self._units -= len(window) + 2000
                used = self._read(window)
                if used == 0:
                    if len(window) >= self._token_bytes_max:
                        raise self._refusal()
                    if self.offset + len(window) >= size:
                        break  # the rest of it is still to come
                self.offset += used
                self._at += used
        except CallError as error:
            self.error = error.with_traceback(None)
        return True

    def check(self, size: int) -> None:
        """To be called when all has arrived: reads what is left. Raises CallError 400."""
        while not self.step(size):
            pass
        if self.error is None:
            try:
                self._ended()
            except CallError as error:
                self.error = error
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _take(self, size: int) -> bytes:
        """The next bytes: `size`, or fewer, but never so few that a token could not be seen when all of it is here."""
        parts = self.parts
        while self._at >= len(parts[self._index]) and self._index + 1 < len(parts):
            self._at -= len(parts[self._index])
            self._index += 1
        at, index = self._at, self._index
        found = bytes(parts[index][at : at + size])
        enough = min(size, self._token_bytes_max)
        while len(found) < enough and index + 1 < len(parts):
            index += 1
            found += bytes(parts[index][: size - len(found)])
        return found

    def _wanted(self) -> int:
        """Bytes to look at in one go."""
        return WINDOW_BYTES

    def _read(self, window: bytes) -> int:
        """Reads on; how many bytes are done with. 0: more are needed."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Raises when the body must not end here."""

    def _refusal(self) -> CallError:
        return invalid_request("the body is malformed")

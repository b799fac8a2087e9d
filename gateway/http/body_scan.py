"""Incremental reading of a large body in place, in bounded steps. Pure.

Scan walks over the parts of a ChunkedBody and continues when more has arrived. The result does not depend on how the
bytes are split. A step does about STEP_UNITS of work, so that other connections do not wait long. Nothing is joined or
stored unless a subclass requests it. The subclasses interpret the bytes: `gateway.request.json_scanner` (JSON) and
`gateway.request.multipart`.
"""

from __future__ import annotations

from gateway.errors import CallError, invalid_request
from gateway.http.body_buffers import Part

STEP_UNITS = 1_500_000
"""Work of one step; a unit is about a nanosecond."""
WINDOW_BYTES = 16 << 10
"""Bytes examined at once."""


class Scan:
    """A walk over a ChunkedBody that may still grow. Errors that it finds are raised at the end (`check`)."""

    __slots__ = ("_at", "_index", "_token_bytes_max", "_units", "error", "offset", "parts", "size")

    def __init__(self, parts: list[Part], token_bytes_max: int) -> None:
        self.parts = parts
        """The parts only: the ChunkedBody refers to its Scan, which must not refer back."""
        self.size = 0
        """Bytes that have arrived."""
        self.error: CallError | None = None
        self.offset = 0
        """Bytes already processed."""
        self._token_bytes_max = token_bytes_max
        self._units = 0
        """Remaining work of this step."""
        self._index = self._at = 0
        """`offset` is in parts[_index] at position _at."""

    def step(self, size: int, units: int = STEP_UNITS) -> bool:
        """Continue up to `size` bytes; True once they are processed (or an error was found)."""
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
                        break  # the rest is yet to arrive
                self.offset += used
                self._at += used
        except CallError as error:
            self.error = error.with_traceback(None)
        return True

    def check(self, size: int) -> None:
        """Process the rest after everything has arrived. Raises CallError 400."""
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
        """Return the next bytes: `size`, or fewer, but enough to contain a whole token if it has arrived."""
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
        """Return the number of bytes to examine at once."""
        return WINDOW_BYTES

    def _read(self, window: bytes) -> int:
        """Process a window; return the number of processed bytes, 0 if more are needed."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Raise if the body must not end here."""

    def _refusal(self) -> CallError:
        return invalid_request("the body is malformed")

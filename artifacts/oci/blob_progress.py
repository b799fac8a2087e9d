"""Download progress of one blob: its division into parts, received bytes, and spans still to request. Pure.

A part is the unit recorded in a sidecar; a span is what one request fetches. The spans of a large blob are its parts,
which are fetched concurrently; those of a smaller blob are as long as possible. All bytes before the frontier are
present and may be hashed; spans never overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WHOLE_BYTES_MAX = 256 << 20
"""A blob of at most this size is fetched with one request. It is not split, since other blobs are fetched at the same
time."""
SMALL_PART_BYTES, PART_BYTES = 8 << 20, 32 << 20
MARK_BYTES, MARKS_MAX = 4 << 20, 256
"""Progress of an incomplete part is recorded every `MARK_BYTES`, at most `MARKS_MAX` times per blob."""
PARTS_MAX = 1 << 16
"""Above this number parts become larger, which keeps sidecars small."""


class Span(NamedTuple):
    """Bytes from `first` up to (excluding) `end`."""

    first: int
    end: int


def part_bytes(size: int) -> int:
    """Return the part size for a blob of `size` bytes."""
    if size <= WHOLE_BYTES_MAX:
        return SMALL_PART_BYTES
    return max(PART_BYTES, -(-size // PARTS_MAX))


def mark_bytes(size: int) -> int:
    """Return the progress within a part that is worth recording, for a blob of `size` bytes."""
    return max(MARK_BYTES, -(-size // MARKS_MAX))


class BlobProgress:
    """Which bytes of a blob have been received. Each part is filled from its beginning."""

    def __init__(
        self, size: int, part: int, done: frozenset[int] = frozenset(), begun: Mapping[int, int] | None = None
    ) -> None:
        """`part`: part size; `done`: complete parts; `begun`: bytes received of other parts. Raises ValueError for an
        inconsistent layout.
        """
        if size < 0 or part < 1 or -(-size // part) > max(PARTS_MAX, 1):
            raise ValueError(
                f"a blob of {size} bytes in parts of {part} bytes: a size or the number of parts is invalid"
            )
        self.size = size
        self.part = part
        self.count = -(-size // part)
        if not all(0 <= each < self.count for each in done):
            raise ValueError(f"there are only {self.count} parts")
        self._filled = [
            self.span(each).end - self.span(each).first if each in done else 0 for each in range(self.count)
        ]
        for each, count in (begun or {}).items():
            if each not in done:
                if not (0 <= each < self.count and 0 <= count < self.span(each).end - self.span(each).first):
                    raise ValueError(f"there are only {self.count} parts of {part} bytes")
                self._filled[each] = count
        self.full = set(done)
        """Complete parts."""
        self.came = sum(self._filled)
        """Bytes received, over all parts."""
        self._front = 0

    def span(self, part: int) -> Span:
        """Return the byte range of a part."""
        return Span(part * self.part, min(self.size, (part + 1) * self.part))

    @property
    def frontier(self) -> int:
        """All bytes before this offset are present."""
        while self._front in self.full:
            self._front += 1
        return self.size if self._front >= self.count else self.span(self._front).first + self._filled[self._front]

    def filled(self, part: int) -> int:
        """Return how many bytes of the part are present, from its beginning."""
        return self._filled[part]

    def begun(self) -> dict[int, int]:
        """Return the received bytes of each incomplete part that has any."""
        return {part: count for part, count in enumerate(self._filled) if count and part not in self.full}

    @property
    def complete(self) -> bool:
        """Whether all bytes are present."""
        return len(self.full) == self.count

    def wrote(self, at: int, count: int) -> None:
        """Record `count` bytes written at offset `at`. Raises ValueError if that leaves a gap in a part."""
        while count:
            part = min(at // self.part, self.count)
            if part == self.count or at != self.span(part).first + self._filled[part]:
                raise ValueError(f"byte {at} is not the next byte of its part")
            taken = min(count, self.span(part).end - at)
            self._filled[part] += taken
            self.came += taken
            if at + taken == self.span(part).end:
                self.full.add(part)
            at, count = at + taken, count - taken

    def spans(self) -> list[Span]:
        """Return the spans still to request, in order."""
        lies_together = self.size <= WHOLE_BYTES_MAX
        found: list[Span] = []
        for part in range(self.count):
            first, end = self.span(part)
            first += self._filled[part]
            if first == end:
                continue
            if lies_together and found and found[-1].end == first:
                found[-1] = Span(found[-1].first, end)
            else:
                found.append(Span(first, end))
        return found

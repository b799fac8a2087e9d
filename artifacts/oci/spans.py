"""Parts of a blob while it is fetched: how it is cut, what has come, what is left to ask for. Pure.

Owns the layout and the frontier. A part is the unit in which a sidecar remembers; a span is what one request asks for:
a large blob's spans are its parts, so that several come at once, a smaller one's as much as lies together. Promises:
the frontier is where the first missing byte is, so all before it may be summed; spans never overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WHOLE_BYTES_MAX = 256 << 20
"""Up to here a blob comes by one request: other blobs beside it keep the line busy."""
SMALL_PART_BYTES, PART_BYTES = 8 << 20, 32 << 20
MARK_BYTES, MARKS_MAX = 4 << 20, 256
"""Of a part that has begun to come it is remembered how far it is, this often, and of a blob so many times at most."""
PARTS_MAX = 1 << 16
"""Beyond them parts are larger: what a sidecar has to remember stays small."""


class Span(NamedTuple):
    """Bytes `first` up to, and without, `end`."""

    first: int
    end: int


def part_bytes(size: int) -> int:
    """How large the parts of a blob of `size` bytes are."""
    if size <= WHOLE_BYTES_MAX:
        return SMALL_PART_BYTES
    return max(PART_BYTES, -(-size // PARTS_MAX))


def mark_bytes(size: int) -> int:
    """So much more of a part of a blob of `size` bytes is worth being remembered."""
    return max(MARK_BYTES, -(-size // MARKS_MAX))


class BlobProgress:
    """What of one blob has come. Each part is filled from its begin on."""

    def __init__(
        self, size: int, part: int, done: frozenset[int] = frozenset(), begun: Mapping[int, int] | None = None
    ) -> None:
        """`part`: bytes; `done`: parts that are there; `begun`: how many bytes are, of others. Raises ValueError where
        the layout is none.
        """
        if size < 0 or part < 1 or -(-size // part) > max(PARTS_MAX, 1):
            raise ValueError(f"{size} bytes are not kept in parts of {part}")
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
        """Parts that have come whole."""
        self.came = sum(self._filled)
        """Bytes, of all parts."""
        self._front = 0

    def span(self, part: int) -> Span:
        """Where a part lies."""
        return Span(part * self.part, min(self.size, (part + 1) * self.part))

    @property
    def frontier(self) -> int:
        """All bytes before this one are there."""
        while self._front in self.full:
            self._front += 1
        return self.size if self._front >= self.count else self.span(self._front).first + self._filled[self._front]

    def filled(self, part: int) -> int:
        """So many bytes of it are there, from its begin on."""
        return self._filled[part]

    def begun(self) -> dict[int, int]:
        """Of each part that is there in part."""
        return {part: count for part, count in enumerate(self._filled) if count and part not in self.full}

    @property
    def complete(self) -> bool:
        """Nothing is missing."""
        return len(self.full) == self.count

    def wrote(self, at: int, count: int) -> None:
        """`count` bytes are in the file from `at` on. Raises ValueError where that leaves a gap in a part."""
        while count:
            part = min(at // self.part, self.count)
            if part == self.count or at != self.span(part).first + self._filled[part]:
                raise ValueError(f"byte {at} is not where its part ends so far")
            taken = min(count, self.span(part).end - at)
            self._filled[part] += taken
            self.came += taken
            if at + taken == self.span(part).end:
                self.full.add(part)
            at, count = at + taken, count - taken

    def spans(self) -> list[Span]:
        """What is to be asked for, in order."""
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

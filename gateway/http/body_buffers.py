"""A request's body: bytes if it is small, ChunkedBody if it is large. Pure.

A large body is never joined, and split only where an edit changes it. Memory stays near the bytes received, however
small the pieces are. An edited body shares its pieces with the original, and a body may be forwarded while it arrives
(StreamingBody). Pieces can be sent repeatedly, since sending does not consume them. Bytes above LARGE_BYTES are stored
in blocks of their own (mmap(2)), outside the allocator: a dropped block returns to the kernel at once, whatever else
was allocated meanwhile.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from gateway.http.body_scan import Scan

LARGE_BYTES: Final = 256 << 10
"""A larger body is read by a Scan, in steps, instead of at once. Up to this size, reading takes 1 to 2 ms."""
_SMALL_BYTES, _SHARED_BYTES = 16 << 10, 64 << 10
"""Smaller pieces share a buffer, which gets no more pieces once it has this length."""
_BLOCK_BYTES = 1 << 20
"""Memory that the kernel provides page by page as it is filled."""


Part = bytes | bytearray | memoryview


class Edit(NamedTuple):
    """An edit: body[start:end] becomes `text`."""

    start: int
    end: int
    text: bytes


class ChunkedBody:
    """A body that arrives in pieces. Small pieces share a buffer, so that tiny ones do not cost an object each."""

    __slots__ = ("_block", "_filled", "parts", "reserved", "scan", "size")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.size = 0
        self.reserved = 0
        """Bytes reserved for it in the gateway's budget (`gateway.memory.body_budget`)."""
        self._block: memoryview | None = None
        self._filled = 0
        """Used bytes of the block, which is the last part."""
        self.scan: Scan | None = None
        """The scan that reads it while it arrives, if any."""

    def __len__(self) -> int:
        return self.size

    def add(self, piece: bytes) -> None:
        """Append a piece."""
        before = self.size
        self.size = before + len(piece)
        if before >= LARGE_BYTES:
            self._copy(piece)
            return
        if len(piece) >= _SMALL_BYTES:
            self.parts.append(piece)
            return
        last = self.parts[-1] if self.parts else None
        if isinstance(last, bytearray) and len(last) < _SHARED_BYTES:
            last += piece
        else:
            self.parts.append(bytearray(piece))

    def _copy(self, piece: bytes) -> None:
        """Copy a piece into blocks."""
        at, size = 0, len(piece)
        while at < size:
            block, filled = self._block, self._filled
            if block is None or filled == _BLOCK_BYTES:
                block = self._block = memoryview(mmap(-1, _BLOCK_BYTES, MAP_PRIVATE | MAP_ANONYMOUS))
                filled = 0
                self.parts.append(b"")
            step = min(size - at, _BLOCK_BYTES - filled)
            block[filled : filled + step] = piece[at : at + step] if step < size else piece
            self._filled = filled + step
            self.parts[-1] = block[: filled + step]
            at += step

    def join(self) -> bytes:
        """Return the whole body."""
        return b"".join(self.parts)

    def edited(self, edits: list[Edit]) -> ChunkedBody:
        """Return the body with these edits, which are in order and do not overlap."""
        out = ChunkedBody()
        at = 0
        for start, end, text in edits:
            out._append(view_range(self.parts, at, start))
            out._append([text] if text else [])
            at = end
        out._append(view_range(self.parts, at, self.size))
        out.reserved, self.reserved = self.reserved, 0
        return out

    def _append(self, parts: list[Part]) -> None:
        self.parts += parts
        self.size += sum(map(len, parts))


class StreamingBody:
    """A body of known length that is forwarded while it arrives, with edits. Offsets are those after the edits."""

    __slots__ = ("_all", "_edits", "_grown", "length", "pieces", "ready")

    def __init__(self, pieces: ChunkedBody, length: int, ready: int) -> None:
        self.pieces = pieces
        self.length = length
        """The client's content-length."""
        self.ready = ready
        """Number of the client's bytes that may be forwarded."""
        self._all: list[Part] = []
        """Set when the body is complete; later changes of the pieces have no effect."""
        self._edits: list[Edit] = []
        self._grown = 0
        """Bytes that the edits add."""

    def __len__(self) -> int:
        return self.length + self._grown

    @property
    def parts(self) -> list[Part]:
        """The pieces as they arrived."""
        return self._all or self.pieces.parts

    def end(self) -> None:
        """All of it has arrived and may be forwarded."""
        self.ready = self.length
        self._all = [*self.pieces.parts]

    def edited(self, edits: list[Edit]) -> StreamingBody:
        """Set the edits, which are in order and do not overlap, and return the same object."""
        self._edits = edits
        self._grown = sum(len(edit.text) - (edit.end - edit.start) for edit in edits)
        return self

    def take(self, at: int, size: int) -> list[Part]:
        """Return up to `size` forwardable bytes at offset `at`. The edited ranges have arrived already."""
        stop, parts = min(at + size, self.ready + self._grown), self.parts
        found: list[Part] = []
        grown, begin = 0, 0
        """Bytes that the edits so far add, and the end of the last one in the client's bytes."""
        for start, end, text in self._edits:
            if at < start + grown:
                found += view_range(parts, max(at - grown, begin), min(stop - grown, start))
            if at < start + grown + len(text) and stop > start + grown:
                found.append(text[max(at - start - grown, 0) : stop - start - grown])
            grown += len(text) - (end - start)
            begin = end
        return found + view_range(parts, max(at - grown, begin), stop - grown)


Body = bytes | ChunkedBody | StreamingBody


def copy_range(parts: list[Part], start: int, end: int) -> bytes:
    """Return a copy of a range."""
    return b"".join(view_range(parts, start, end))


def view_range(parts: list[Part], start: int, end: int) -> list[Part]:
    """Return a range without copying."""
    found: list[Part] = []
    base = 0
    for part in parts:
        size = len(part)
        begin, stop = max(start - base, 0), min(end - base, size)
        if begin < stop:
            found.append(part if stop - begin == size else memoryview(part)[begin:stop])
        base += size
        if base >= end:
            break
    return found

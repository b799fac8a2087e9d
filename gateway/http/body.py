"""A request's body: bytes where it is small, Pieces where it is not. Pure.

Promises: a large body is never joined, only cut where an edit changes it; memory stays near the bytes received however
small the pieces are; a body that was edited shares its pieces with the one that came, and one that is still coming may
go on (Growing). Pieces may be sent again and
again: nothing takes them apart. What is over LARGE_BYTES lies in blocks of its own (mmap(2)): the allocator never sees
it, and a block that is dropped is the kernel's again at once, whatever else was allocated meanwhile.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gateway.http.incremental import Scan

LARGE_BYTES = 256 << 10
"""A larger body is read by a Scan, in steps, instead of in one go. Up to here one go takes 1 to 2 ms."""
_SMALL_BYTES, _SHARED_BYTES = 16 << 10, 64 << 10
"""Smaller pieces share a buffer, which is left alone once it is so long."""
_BLOCK_BYTES = 1 << 20
"""Of memory, which the kernel gives page by page as it is filled."""


Part = bytes | bytearray | memoryview


class Edit(NamedTuple):
    """A change: body[start:end] becomes `text`."""

    start: int
    end: int
    text: bytes


class ChunkedBody:
    """Bytes that arrive in pieces. Small ones share a buffer: tiny ones do not cost an object each."""

    __slots__ = ("_block", "_filled", "parts", "reserved", "scan", "size")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.size = 0
        self.reserved = 0
        """Bytes taken for it of the gateway's room (`gateway.memory.body_budget`)."""
        self._block: memoryview | None = None
        self._filled = 0
        """How much of the block, which is the last part."""
        self.scan: Scan | None = None
        """What has been read of it so far, where somebody reads it while it arrives."""

    def __len__(self) -> int:
        return self.size

    def add(self, piece: bytes) -> None:
        """Keeps the piece."""
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
        """Into blocks."""
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
        """All of it."""
        return b"".join(self.parts)

    def edited(self, edits: list[Edit]) -> ChunkedBody:
        """The body with these changes, which do not overlap and come in order."""
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
    """A body of a known length that goes on while it comes, with one change. Places are those after the change."""

    __slots__ = ("_all", "_edit", "length", "pieces", "ready")

    def __init__(self, pieces: ChunkedBody, length: int, ready: int) -> None:
        self.pieces = pieces
        self.length = length
        """As the client said it."""
        self.ready = ready
        """So many of the client's bytes may go on."""
        self._all: list[Part] = []
        """Once it is whole: what becomes of the pieces then is no matter."""
        self._edit = Edit(0, 0, b"")

    def __len__(self) -> int:
        edit = self._edit
        return self.length + len(edit.text) - (edit.end - edit.start)

    @property
    def parts(self) -> list[Part]:
        """As they came."""
        return self._all or self.pieces.parts

    def end(self) -> None:
        """All of it is here and may go on."""
        self.ready = self.length
        self._all = [*self.pieces.parts]

    def edited(self, edits: list[Edit]) -> StreamingBody:
        """The same, from now on with this one change."""
        (self._edit,) = edits
        return self

    def take(self, at: int, size: int) -> list[Part]:
        """What stands there and may go on, at most `size` bytes. What is changed has come."""
        start, end, text = self._edit
        grown = start + len(text) - end
        """How far what follows the change has moved."""
        stop, parts = min(at + size, self.ready + grown), self.parts
        if stop <= at:
            return []
        found = view_range(parts, at, min(stop, start))
        if at < end + grown and stop > start:
            found.append(text[max(at - start, 0) : stop - start])
        return found + view_range(parts, max(at, end + grown) - grown, stop - grown)


Body = bytes | ChunkedBody | StreamingBody


def copy_range(parts: list[Part], start: int, end: int) -> bytes:
    """A copy of what stands there."""
    return b"".join(view_range(parts, start, end))


def view_range(parts: list[Part], start: int, end: int) -> list[Part]:
    """What stands there, uncopied."""
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

"""Streaming decompression of layers with bounded output and memory. Pure.

Limits what untrusted compressed data can cost: total output, output per input byte, and memory. Consecutive gzip
members or zstd frames form one stream, as in all common tools; any other data after them is rejected. Output is
produced one piece at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import zstandard

from artifacts.archives.tar_reader import BadArchiveError
from artifacts.dialects.base import Encoding

PIECE_BYTES = 1 << 20
"""Maximum size of an output piece."""
RATIO_MAX = 100
"""Maximum output bytes per input byte. Weights reach about 3, text 10."""
FREE_BYTES = 64 << 20
"""Output below this limit is exempt from the ratio: small files of mostly zeros are harmless."""
WINDOW_BYTES_MAX = 128 << 20
"""Maximum zstd window: what the zstd tools accept by default; decompression allocates this much memory."""
_BLOCK_BYTES_MAX = 128 << 10
_STEP_BYTES_MIN, _STEP_BYTES_MAX = 512, 64 << 10
"""Input bytes per gzip call: the minimum at the start of a member, doubled with each call up to the maximum. Large
first steps are slow with many small members, since zlib copies the unused input at the end of each member."""
_MAGIC = (0xFD2FB528).to_bytes(4, "little")
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_RUN, _RESERVED = 1, 3


def decompress_layer(pieces: Iterable[bytes], encoding: Encoding, bytes_max: int) -> Iterator[bytes]:
    """Decompress the pieces of a layer, yielding at most `bytes_max` bytes. Raises BadArchiveError."""
    if encoding == "tar+gzip":
        stream = _gunzip
    elif encoding == "tar+zstd":
        stream = _unzstd
    else:
        stream = _as_it_is
    given = _Given(pieces)
    out = 0
    for piece in stream(given):
        out += len(piece)
        if out > bytes_max:
            raise BadArchiveError(f"the archive expands to more than {bytes_max} bytes")
        if out > FREE_BYTES and stream is not _as_it_is and out > RATIO_MAX * given.taken:
            raise BadArchiveError(f"the archive is a decompression bomb: expanded more than {RATIO_MAX} times")
        yield piece


class _Given:
    """The compressed input, read on demand; `taken` counts the consumed bytes."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")
        self._at = 0
        self.taken = 0

    def any_left(self) -> bool:
        """Return whether input remains."""
        while self._at == len(self._piece):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._piece, self._at = memoryview(piece), 0
        return True

    def some(self, most: int) -> memoryview:
        """Read up to `most` bytes; empty at the end of the input."""
        found = self._piece[self._at : self._at + most] if self.any_left() else memoryview(b"")
        self._at += len(found)
        self.taken += len(found)
        return found

    def back(self, count: int) -> None:
        """Return the last `count` bytes to the input."""
        self._at -= count
        self.taken -= count

    def exactly(self, count: int) -> bytes:
        """Read exactly `count` bytes. Raises BadArchiveError if fewer remain."""
        found = bytearray()
        while len(found) < count:
            piece = self.some(count - len(found))
            if not piece:
                raise BadArchiveError("the compressed archive is truncated")
            found += piece
        return bytes(found)


def _as_it_is(given: _Given) -> Iterator[bytes]:
    while piece := given.some(PIECE_BYTES):
        yield bytes(piece)


def _gunzip(given: _Given) -> Iterator[bytes]:
    """Decompress consecutive gzip members (RFC 1952)."""
    begun = True
    while begun or given.any_left():
        begun = False
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        most, rest = _STEP_BYTES_MIN, b""
        while not member.eof:
            step = rest or given.some(most)
            if not step:
                raise BadArchiveError("the compressed archive is truncated")
            most = min(2 * most, _STEP_BYTES_MAX)
            try:
                piece = member.decompress(step, PIECE_BYTES)
            except zlib.error:
                raise BadArchiveError("the compressed archive is corrupt, or other data follows it") from None
            rest = member.unconsumed_tail
            if piece:
                yield piece
        given.back(len(member.unused_data))


def _unzstd(given: _Given) -> Iterator[bytes]:
    """Decompress consecutive zstd frames (RFC 8878), block by block, since a block yields at most 128 KiB."""
    context = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    begun = True
    while begun or given.any_left():
        begun = False
        magic = given.exactly(4)
        if int.from_bytes(magic, "little") in _SKIPPABLE:
            _skip(given, int.from_bytes(given.exactly(4), "little"))
            continue
        if magic != _MAGIC:
            raise BadArchiveError("the compressed archive is corrupt, or other data follows it")
        header, has_sum = _frame_header(given)
        frame = context.decompressobj()
        try:
            yield from filter(None, _frame(given, frame, magic + header, has_sum=has_sum))
        except zstandard.ZstdError:
            raise BadArchiveError("the compressed archive is corrupt") from None
        if not frame.eof:
            raise BadArchiveError("the compressed archive is corrupt: a frame is incomplete")


def _frame(given: _Given, frame: zstandard.ZstdDecompressionObj, header: bytes, *, has_sum: bool) -> Iterator[bytes]:
    yield frame.decompress(header)
    last = False
    while not last:
        block = given.exactly(3)
        fields = int.from_bytes(block, "little")
        last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
        if kind == _RESERVED or size > _BLOCK_BYTES_MAX:
            raise BadArchiveError("the compressed archive is corrupt: a block exceeds the maximum size")
        content = given.exactly(1 if kind == _RUN else size)
        ending = given.exactly(4) if last and has_sum else b""
        yield frame.decompress(block + content + ending)


def _frame_header(given: _Given) -> tuple[bytes, bool]:
    """Return the frame header after the magic number, and whether the frame has a checksum. Raises BadArchiveError."""
    first = given.exactly(1)
    flags = first[0]
    single, has_sum = bool(flags & 0x20), bool(flags & 0x04)
    if flags & 0x08:
        raise BadArchiveError("the compressed archive is corrupt: a reserved bit of its header is set")
    if flags & 0x03:
        raise BadArchiveError("the compressed archive requires a dictionary, which is not supported")
    window = b"" if single else given.exactly(1)
    content_bytes = (1 if single else 0, 2, 4, 8)[flags >> 6]
    content = given.exactly(content_bytes)
    if single:
        needed = int.from_bytes(content, "little") + (256 if content_bytes == 2 else 0)
    else:
        base = 1 << 10 + (window[0] >> 3)
        needed = base + (base >> 3) * (window[0] & 7)
    if needed > WINDOW_BYTES_MAX:
        raise BadArchiveError(
            f"the compressed archive requires more memory than {WINDOW_BYTES_MAX >> 20} MiB: "
            "pack it with a smaller window (zstd --long=27 at most)"
        )
    return first + window + content, has_sum


def _skip(given: _Given, count: int) -> None:
    while count:
        found = min(count, PIECE_BYTES)
        given.exactly(found)
        count -= found

"""Reads request bodies by length or by chunks (RFC 9112, 6 and 7.1). Pure.

Each byte is stored once, as in `gateway.http.body_buffers`. Chunk sizes are 1 to 16 hex digits, extensions are
rejected, line ends are exact, trailers are validated, bounded and dropped. The body limit is checked against a chunk's
size before any of its bytes are stored.
"""

from __future__ import annotations

import re

from gateway.errors import header_too_large, too_large, too_many_chunks
from gateway.http.body_buffers import ChunkedBody
from gateway.http.request_head import TRAILERS, malformed_request

CHUNKS_MAX, CHUNK_BYTES_MEAN = 4096, 64
"""A body may have CHUNKS_MAX chunks of any size, and one more per CHUNK_BYTES_MEAN bytes; above that 400.
Each chunk costs as much as some hundred bytes, and no well-behaved client sends thousands of smaller ones.
"""
TRAILER_BYTES_MAX = 8 << 10
"""Limit of all trailers of one body with the final empty line; above it 431."""

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n")
_SIZE_BEGUN = re.compile(rb"(?:[0-9A-Fa-f]{1,16}\r?)?")


class LengthReader:
    """Reads one body of known length."""

    __slots__ = ("length", "missing", "pieces")

    def __init__(self, length: int) -> None:
        self.pieces = ChunkedBody()
        self.length = length
        self.missing = length

    @property
    def buffered(self) -> int:
        """Number of stored bytes."""
        return self.pieces.size

    def feed(self, data: bytes) -> bytes | None:
        """Return the bytes after the body once it is complete, else None."""
        missing = self.missing
        if len(data) < missing:
            self.pieces.add(data)
            self.missing = missing - len(data)
            return None
        self.pieces.add(data[:missing])
        return data[missing:]


class ChunkReader:
    """Reads one chunked body of at most `bytes_max` decoded bytes."""

    __slots__ = ("_bytes_max", "_chunks", "_data_ended", "_last", "_missing", "_rest", "pieces")

    def __init__(self, bytes_max: int) -> None:
        self.pieces = ChunkedBody()
        self._bytes_max = bytes_max
        self._chunks = 0
        self._missing = 0
        """Outstanding bytes of the current chunk."""
        self._data_ended = False
        """Whether a chunk's data is complete and its CRLF is due."""
        self._last = False
        """Whether the last chunk was read and trailers are due."""
        self._rest = b""
        """An incomplete line; at most TRAILER_BYTES_MAX."""

    @property
    def buffered(self) -> int:
        """Number of stored bytes."""
        return self.pieces.size + len(self._rest)

    def feed(self, data: bytes) -> bytes | None:
        """Return the bytes after the body once it is complete, else None."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        while not self._last:
            step = self._data(data, at) if self._missing or self._data_ended else self._size(data, at)
            if step is None:
                return None
            at = step
        return self._trailers(data, at)

    def _size(self, data: bytes, at: int) -> int | None:
        match = _SIZE.match(data, at)
        if match is None:
            if _SIZE_BEGUN.fullmatch(data, at) is None:
                raise malformed_request()
            self._rest = data[at:]
            return None
        size = int(match[1], 16)
        if self.pieces.size + size > self._bytes_max:
            raise too_large(self._bytes_max)
        self._chunks += 1
        if self._chunks > CHUNKS_MAX + self.pieces.size // CHUNK_BYTES_MEAN:
            raise too_many_chunks()
        self._missing = size
        self._last = size == 0
        return match.end() if size else match.end() - 2  # trailers begin with the line end before them

    def _data(self, data: bytes, at: int) -> int | None:
        if self._missing:
            piece = data[at : at + self._missing]
            self.pieces.add(piece)
            self._missing -= len(piece)
            at += len(piece)
            if self._missing:
                return None
            self._data_ended = True
        end = data[at : at + 2]
        if end == b"\r\n":
            self._data_ended = False
            return at + 2
        if end not in (b"", b"\r"):
            raise malformed_request()
        self._rest = end
        return None

    def _trailers(self, data: bytes, at: int) -> bytes | None:
        """Read from the CRLF that ends the last chunk's size to the empty line."""
        end = data.find(b"\r\n\r\n", at, at + TRAILER_BYTES_MAX)
        if end < 0:
            if len(data) - at >= TRAILER_BYTES_MAX:
                raise header_too_large()
            self._rest = data[at:]
            return None
        if TRAILERS.fullmatch(data, at, end) is None:
            raise malformed_request()
        return data[end + 4 :]

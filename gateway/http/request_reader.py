"""The request side of HTTP/1.1 without I/O: parses the bytes of one client connection into Requests, one at a time.

Handles framing and its limits. The same bytes give the same Requests and the same error, however they are split. Any
input gives Requests or raises CallError (`close` set), never anything else. Nothing is buffered beyond a limit. After
an error the reader is unusable. Pipelined bytes stay unread until `next` is called, so there is one request at a time.
The caller applies the timeouts, using `waiting_for` and `buffered`.
"""

from __future__ import annotations

from typing import Literal

from gateway.errors import CallError, pipelining_limit_exceeded, too_large
from gateway.http.body_buffers import LARGE_BYTES, ChunkedBody
from gateway.http.request_body import ChunkReader, LengthReader
from gateway.http.request_head import (
    CHUNKED,
    HEAD_BYTES_MAX,
    LENGTH_DIGITS_MAX,
    CachedHead,
    Head,
    Request,
    check_partial_head,
    read_head,
    read_line,
)

__all__ = ["AHEAD_BYTES_MAX", "Request", "RequestReader"]

AHEAD_BYTES_MAX = 64 << 10
"""Maximum of pipelined bytes; above it 400. Reading must continue, or a disconnect would go unnoticed."""


class RequestReader:
    """Reads one connection. `feed` returns a Request when one is complete; after the response, call `next`."""

    __slots__ = (
        "_ahead", "_at", "_body", "_body_bytes_max", "_dropping", "_failure", "_head", "_known", "pending",
        "waiting_for",
    )  # fmt: skip

    def __init__(self, body_bytes_max: int) -> None:
        self.waiting_for: Literal["head", "body", "drop", "nothing"] = "head"
        """`nothing`: a Request was returned, or the reader is unusable. `drop`: skip a body after an early response."""
        self.pending: Head | None = None
        """The head whose body is being read or was rejected, so that the caller can respond early.
        For a rejected head, its first line if that could be parsed.
        """
        self._body: ChunkReader | LengthReader | None = None
        """Set together with `pending`."""
        self._body_bytes_max = body_bytes_max
        self._head = bytearray()
        """An incomplete head; at most HEAD_BYTES_MAX plus one read."""
        self._known: CachedHead | None = None
        """The connection's last head, which is probably its next one, too."""
        self._ahead = b""
        self._at = 0
        """Start of the next request in `_ahead`."""
        self._dropping = 0
        """Bytes still to arrive and to be dropped."""
        self._failure: CallError | None = None

    @property
    def ahead(self) -> int:
        """Bytes of later requests that wait for `next`."""
        return len(self._ahead) - self._at

    @property
    def buffered(self) -> int:
        """Stored bytes of an incomplete request, and of pipelined ones."""
        return len(self._head) + (self._body.buffered if self._body is not None else 0) + self.ahead

    @property
    def pieces(self) -> ChunkedBody | None:
        """The received part of the body that is being read (or was, when it was rejected)."""
        return None if self._body is None else self._body.pieces

    @property
    def length(self) -> int | None:
        """Length of the body that is being read; None if it is chunked."""
        return self._body.length if isinstance(self._body, LengthReader) else None

    def partial_head(self) -> Head | None:
        """Return the known part of an incomplete or rejected request: its head, else its first line, else None."""
        return self.pending or read_line(bytes(self._head), 0)

    def feed(self, data: bytes) -> Request | None:
        """Take received bytes; return a complete Request or None. Raises CallError for HTTP that is not accepted."""
        if self._failure is not None:
            raise self._failure
        at = min(self._dropping, len(data))
        try:
            if self.waiting_for == "head":
                return self._read_more_head(data) if self._head else self._read_head(data, 0)
            if self._body is not None and self.pending is not None:
                return self._read_body(self._body, self.pending, data)
            if self._dropping:
                return self._drop_more(data, at)
            self._keep_ahead(data)
        except CallError as error:
            self._fail(error, bytes(self._head) or data, 0 if self._head else at)
            raise
        return None

    def next(self) -> Request | None:
        """Continue after the response was sent, and return the next Request if all of it has arrived."""
        if self._failure is not None or self.waiting_for != "nothing":
            return None
        self.waiting_for = "head"
        data, at = self._ahead, self._at
        if at == len(data):
            return None
        self._ahead, self._at = b"", 0
        try:
            return self._read_head(data, at)
        except CallError as error:
            self._fail(error, data, at)
            raise

    def drop(self, bytes_max: int) -> bool:
        """Drop the rest of a body whose request has been answered.
        False if the rest is too long or of unknown length: then the connection must end.
        """
        body = self._body
        if not isinstance(body, LengthReader) or body.missing > bytes_max:
            return False
        self._dropping = body.missing
        self.waiting_for = "drop"
        self.pending = self._body = None
        return True

    def _drop_more(self, data: bytes, dropped: int) -> Request | None:
        self._dropping -= dropped
        if self._dropping:
            return None
        self.waiting_for = "head"
        return self._read_head(data, dropped) if dropped < len(data) else None

    def _fail(self, error: CallError, data: bytes, at: int = 0) -> None:
        """Make the reader unusable and drop its buffers (not the body). An incomplete head is at data[at]."""
        self._failure = error
        if self.waiting_for == "head" and self.pending is None:
            self.pending = read_line(data, at)
        self.waiting_for = "nothing"
        self._body = None
        self._head = bytearray()
        self._ahead, self._at = b"", 0

    def _read_head(self, data: bytes, start: int) -> Request | None:
        """Read a head that starts at data[start]."""
        known = self._known
        if known is not None and data.startswith(known.before, start):
            at = start + len(known.before)
            stop = data.find(b"\r", at, at + LENGTH_DIGITS_MAX + 1)
            if data.startswith(known.after, stop) and (digits := data[at:stop]).isdigit():
                return self._read_on(known.head, int(digits), data, stop + len(known.after))
        end = data.find(b"\r\n\r\n", start, start + HEAD_BYTES_MAX)
        if end < 0:
            check_partial_head(data, start, len(data) - start)
            self._head += data[start:] if start else data
            return None
        head, length, self._known = read_head(data, start, end)
        return self._read_on(head, length, data, end + 4)

    def _read_more_head(self, data: bytes) -> Request | None:
        head = self._head
        before = len(head)
        head += data
        end = head.find(b"\r\n\r\n", max(0, before - 3), HEAD_BYTES_MAX)
        if end < 0:
            check_partial_head(head, before, len(head))
            return None
        data = bytes(head)
        read, length, self._known = read_head(data, 0, end)
        self._head = bytearray()
        return self._read_on(read, length, data, end + 4)

    def _read_on(self, head: Head, length: int, data: bytes, start: int) -> Request | None:
        """Read the body, or the part of it that has arrived, from data[start]."""
        if length > self._body_bytes_max:
            self.pending = head
            raise too_large(self._body_bytes_max)
        end, size = start + length, len(data)
        if end <= size and length != CHUNKED:
            self.waiting_for = "nothing"
            if end < size:
                self._ahead, self._at = data, end
            return Request(head, data[start:end])
        self.waiting_for = "body"
        self.pending = head
        self._body = ChunkReader(self._body_bytes_max) if length == CHUNKED else LengthReader(length)
        return self._read_body(self._body, head, data[start:])

    def _read_body(self, body: ChunkReader | LengthReader, head: Head, data: bytes) -> Request | None:
        rest = body.feed(data)
        if rest is None:
            return None
        self.pending = self._body = None
        self.waiting_for = "nothing"
        self._ahead, self._at = rest, 0
        pieces = body.pieces
        return Request(head, pieces if pieces.size > LARGE_BYTES else pieces.join())

    def _keep_ahead(self, data: bytes) -> None:
        if self.ahead + len(data) > AHEAD_BYTES_MAX:
            raise pipelining_limit_exceeded()
        self._ahead = self._ahead[self._at :] + data
        self._at = 0

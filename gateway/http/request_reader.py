"""The request side of HTTP/1.1 without I/O: bytes of one client connection -> Requests, one at a time.

Owns framing and its bounds. Promises: the same bytes give the same Requests and the same refusal, however they are
cut; garbage is read as Requests or raises CallError (`close` set), never anything else; nothing is buffered past a
limit. After a refusal the reader is dead. What a client pipelines waits unread until `next` is called, so there is
one Call at a time. The clocks belong to the edge, which sees `waiting_for` and `buffered`.
"""

from __future__ import annotations

from typing import Literal

from gateway.errors import CallError, pipelining_limit_exceeded, too_large
from gateway.http.body import LARGE_BYTES, ChunkedBody
from gateway.http.request_framing import ChunkReader, LengthReader
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
"""Bytes sent ahead of their turn. Reading must go on, else nobody would see a client leave; above it 400."""


class RequestReader:
    """Reads one connection. `feed` what arrived; it returns a Request when one is complete. Answer it, then call
    `next`.
    """

    __slots__ = (
        "_ahead", "_at", "_body", "_body_bytes_max", "_dropping", "_failure", "_head", "_known", "pending",
        "waiting_for",
    )  # fmt: skip

    def __init__(self, body_bytes_max: int) -> None:
        self.waiting_for: Literal["head", "body", "drop", "nothing"] = "head"
        """`nothing`: a Request is out (or the reader is dead) and `next` was not called yet. `drop`: the rest of a body
        that was answered early."""
        self.pending: Head | None = None
        """While waiting for a body, and when it was refused: its head, so that the edge can answer it early. Of a head
        that was refused its first line, where that could be read.
        """
        self._body: ChunkReader | LengthReader | None = None
        """Set together with `pending`."""
        self._body_bytes_max = body_bytes_max
        self._head = bytearray()
        """An unfinished head; at most HEAD_BYTES_MAX plus one read."""
        self._known: CachedHead | None = None
        """The connection's last head, which is probably its next one, too."""
        self._ahead = b""
        self._at = 0
        """Where in `_ahead` the next request begins."""
        self._dropping = 0
        """Bytes that are still to come and are dropped."""
        self._failure: CallError | None = None

    @property
    def ahead(self) -> int:
        """Bytes of later requests that wait for `next`."""
        return len(self._ahead) - self._at

    @property
    def buffered(self) -> int:
        """Bytes held of a request that is not complete, and ahead of their turn."""
        return len(self._head) + (self._body.buffered if self._body is not None else 0) + self.ahead

    @property
    def pieces(self) -> ChunkedBody | None:
        """What is here of the body that is being read (or was, when it was refused)."""
        return None if self._body is None else self._body.pieces

    @property
    def length(self) -> int | None:
        """Of the body that is being read; None where only its last chunk will tell."""
        return self._body.length if isinstance(self._body, LengthReader) else None

    def told(self) -> Head | None:
        """What is known of the request that is not whole, or was refused: its head, or only its first line; None where
        not even that is here.
        """
        return self.pending or read_line(bytes(self._head), 0)

    def feed(self, data: bytes) -> Request | None:
        """Takes what arrived; a complete Request or None. Raises CallError when it is not HTTP as we accept it."""
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
        """The answer is out: reads on, and returns the next Request if the client has already sent all of it."""
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
        """The request whose body is being read has its answer: the rest of the body is dropped as it comes. False when
        that is too long, or nobody knows how long: then the connection must end.
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
        """The reader is dead, and keeps nothing any more; a body is the edge's to discard. A head that did not come to
        its end begins at data[at].
        """
        self._failure = error
        if self.waiting_for == "head" and self.pending is None:
            self.pending = read_line(data, at)
        self.waiting_for = "nothing"
        self._body = None
        self._head = bytearray()
        self._ahead, self._at = b"", 0

    def _read_head(self, data: bytes, start: int) -> Request | None:
        """A head that begins at data[start]."""
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
        """The body, or as much of it as is here, begins at data[start]."""
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

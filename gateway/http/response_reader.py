"""The response side of HTTP/1.1 without I/O: reads an engine's head and finds the end of its body (RFC 9112).

Defines what is accepted from an engine and which headers are passed on to the client. A body is walked, not re-framed:
`walk` returns the received bytes except the end marker, which the gateway sends itself once the real end has arrived.
Anything irregular raises FramingError, and the connection is never reused. A last chunk is recognized by its position
in the framing, never by its bytes (a header line ending in `max=100` looks the same).
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache
from typing import Final, NamedTuple

from gateway.http.request_head import FIELD, TRAILERS, connection_names

HEAD_BYTES_MAX: Final = 64 << 10
"""Limit of one response head, including preceding interim ones."""
INTERIM_MAX: Final = 8
"""Maximum number of 1xx heads before the final one."""
KNOWN_MAX, KNOWN_BYTES_MAX = 256, 1 << 10
"""Cache of parsed heads: number of entries, and maximum bytes of one."""
TRAILER_BYTES_MAX: Final = 4 << 10
"""Limit of the last chunk's line, trailers and the empty line; they are read and dropped."""
TAIL_PIECES: Final = 4
TAIL_PIECE_BYTES: Final = 2 << 10
"""The end of a body is remembered as the last bytes of each of the last pieces."""
CRUMB_BYTES: Final = 64
"""A smaller piece is merged with the one before it; otherwise the tail of a body in tiny pieces would be too short."""

STEP_BYTES: Final = 16 << 10
"""Bytes walked per step if the body costs work per byte (chunks, events): it may consist of one-byte pieces."""

LAST_CHUNK: Final = b"0\r\n\r\n"

_HEAD: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*+)?((?:" + FIELD + rb")*+)")
_NO_HEAD: Final = re.compile(rb"[^\r]\n|\r[^\n]|[^\t\r\n\x20-\x7e\x80-\xff]")
"""Bytes invalid in any head: half of a line end, control characters."""
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
"""Chunk extensions are rejected: no engine sends any, and a client might parse them differently."""
SIZE_BEGUN: Final = re.compile(rb"(?:[0-9A-Fa-f]{1,8}\r?)?")
_LENGTH_DIGITS_MAX: Final = 15

PASSED = frozenset(
    {
        b"cache-control", b"content-disposition", b"content-encoding", b"content-language", b"content-type", b"date",
        b"retry-after",
    }
)  # fmt: skip
"""Engine headers passed on to the client. All others are dropped: hop-by-hop headers and internals of the engine."""
STREAM_FIELDS: Final = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Header lines of an event stream: proxies neither store it nor, as nginx does by default, buffer it."""
_ONCE = frozenset({b"content-length", b"transfer-encoding", b"content-type", b"content-encoding"})


class FramingError(Exception):
    """The engine's bytes are not an unambiguous HTTP/1.1 response."""


class ResponseHead(NamedTuple):
    """A final head. The body is chunked, or `length` bytes, or (neither) ends with the connection."""

    status: int
    chunked: bool
    length: int | None
    keep_alive: bool
    """Whether the engine keeps the connection open. False if the close ends the body."""
    content_type: bytes
    fields: bytes
    """The PASSED header lines, each as `name: value CRLF`, ready for the gateway's own head."""

    @property
    def elsewhere(self) -> bool:
        """Whether the request moves instead (busy or redirect): not a response for the client (RFC 9110, 15.4)."""
        return self.status in (429, 503) or 300 <= self.status < 400

    @property
    def event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self.content_type.startswith(b"text/event-stream")


class HeadReader:
    """Collects one response head; `feed` returns it with the first body bytes. `reset` prepares for the next one."""

    __slots__ = ("_held", "_interim")

    def __init__(self) -> None:
        self._held = b""
        self._interim = 0

    @property
    def begun(self) -> bool:
        """Whether any byte of the response has arrived."""
        return bool(self._held) or self._interim > 0

    def reset(self) -> None:
        """Prepare for the next response."""
        self._held = b""
        self._interim = 0

    def feed(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """Return the final head and the bytes after it; None while it is incomplete. Interim heads are skipped."""
        seen = len(self._held)
        if seen:
            data = self._held + data
        while True:
            end = data.find(b"\r\n\r\n", max(0, seen - 3), HEAD_BYTES_MAX)
            if end < 0:
                _refuse_unfinished(data, seen)
                self._held = data
                return None
            seen = 0
            head = known_head(data[:end]) if end <= KNOWN_BYTES_MAX else parse_head(data[:end])
            data = data[end + 4 :]
            if head is not None:
                return head, data
            self._interim += 1
            if self._interim > INTERIM_MAX:
                raise FramingError("too many interim responses")


def _refuse_unfinished(data: bytes, seen: int) -> None:
    """Raise if an incomplete head can no longer become valid, because its engine may wait for the gateway.

    `seen`: bytes checked before. They are not checked again, so that a head in many small pieces costs little.
    """
    fresh = max(0, seen - 1)
    line_end = data.find(b"\r\n")
    if (
        len(data) >= HEAD_BYTES_MAX
        or not b"HTTP/1.".startswith(data[:7])
        or (line_end >= fresh and _HEAD.fullmatch(data, 0, line_end) is None)
        or _NO_HEAD.search(data, fresh) is not None
    ):
        raise FramingError("no head")


def parse_head(data: bytes) -> ResponseHead | None:
    """Parse a head without its empty line; None for an interim one (1xx). 101 is an error: no upgrade is offered."""
    match = _HEAD.fullmatch(data)
    if match is None:
        raise FramingError("malformed head")
    minor, digits, lines = match.groups()
    status = int(digits)
    if status < 200:
        if status == 101:
            raise FramingError("switches protocols")
        return None
    known, fields = _read_fields(lines)
    coding, length = known.get(b"transfer-encoding"), known.get(b"content-length")
    keep_alive = minor == b"1"
    connection = known.get(b"connection")
    if connection is not None:
        named = connection_names(connection)
        keep_alive = keep_alive and b"close" not in named
        fields = b"".join([line for line in fields.splitlines(keepends=True) if line.partition(b":")[0] not in named])
    content_type = known.get(b"content-type", b"").lower()
    if content_type.startswith(b"text/event-stream"):
        rest = [line for line in fields.splitlines(keepends=True) if not line.startswith(b"cache-control:")]
        fields = b"".join(rest) + STREAM_FIELDS
    if status in (204, 205, 304):
        if coding is not None or length not in (None, b"0"):
            raise FramingError("a body that this response must not have")
        return ResponseHead(status, False, 0, keep_alive, content_type, fields)
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None or minor == b"0":
            raise FramingError("a transfer coding other than chunked alone")
        return ResponseHead(status, True, None, keep_alive, content_type, fields)
    if length is None:
        return ResponseHead(status, False, None, False, content_type, fields)
    if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX:
        raise FramingError("content-length is not a number")
    return ResponseHead(status, False, int(length), keep_alive, content_type, fields)


known_head = lru_cache(KNOWN_MAX)(parse_head)
"""Cached `parse_head`: a busy engine sends the same head many times per second."""


def _read_fields(lines: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """Return lower-case names with their values (lists joined), and the header lines to pass on."""
    known: dict[bytes, bytes] = {}
    fields = b""
    for line in lines.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        name = name.lower()
        value = value.strip(b" \t")
        if name in known:
            if name in _ONCE:
                raise FramingError("a header that must occur once occurs twice")
            value = known[name] + b", " + value
        elif name in PASSED:
            fields += name + b": " + value + b"\r\n"
        known[name] = value
    return known, fields


def extract_tail(body: bytes) -> bytes:
    """Return the start and end of a whole body, like `BodyWalker.tail`."""
    if len(body) <= 2 * TAIL_PIECE_BYTES:
        return body
    return body[:TAIL_PIECE_BYTES] + body[-TAIL_PIECE_BYTES:]


class BodyWalker:
    """Walks one body. After `ended`, further bytes only set `excess`: the connection must not be reused.

    Expensive bodies are walked in steps of STEP_BYTES: while `unread` is not empty, another step is due in a later
    turn.
    """

    __slots__ = (
        "_chunked", "_held", "_last", "_left", "_stepped", "between", "ended", "excess", "first", "recent", "unread",
    )  # fmt: skip

    def __init__(self, head: ResponseHead) -> None:
        self._chunked = head.chunked
        self._left = -1 if head.length is None else head.length
        """Outstanding bytes: of the whole body if its length is known, or of the current chunk with its CRLF. -1: the
        body ends when the connection closes.
        """
        if head.chunked:
            self._left = 0
        self._held = b""
        """An incomplete line of the framing, held back until it is complete."""
        self._last = False
        self._stepped = head.chunked or head.event_stream
        self.unread = b""
        """Bytes for a further step (`walk` or `strip`, with or without new data): at most one read."""
        self.between = head.chunked
        """Whether the position is exactly between two chunks: no byte of the next one has arrived."""
        self.ended = head.length == 0
        self.excess = False
        self.first = b""
        self.recent: deque[bytes] = deque(maxlen=TAIL_PIECES)

    @property
    def at_boundary(self) -> bool:
        """Whether the bytes returned so far end between two chunks."""
        return self._chunked and self._left == 0

    @property
    def left_of_chunk(self) -> int:
        """Outstanding bytes of the current chunk, with its line end; 0 between two chunks or within a size line."""
        return self._left if self._chunked and not self.unread else 0

    @property
    def until_close(self) -> bool:
        """Whether the close of the connection ends the body."""
        return not self._chunked and self._left < 0

    def tail(self) -> bytes:
        """Return the first and last bytes of the body, framing included."""
        recent = self.recent
        if recent and recent[0] is self.first:
            return recent[0] if len(recent) == 1 else b"".join(recent)
        return b"".join((self.first, *recent))

    def walk(self, data: bytes) -> bytes:
        """Take received bytes and return those to forward now, with framing, without the end marker."""
        return self._walk(data, None)

    def strip(self, data: bytes) -> bytes:
        """Like `walk`, but return the content without framing."""
        content: list[bytes] = []
        plain = self._walk(data, content)
        return b"".join(content) if self._chunked else plain

    def _walk(self, data: bytes, content: list[bytes] | None) -> bytes:
        data = self._step(data)
        if not data:
            return data
        self.skip(data)
        return self._chunks(data, content) if self._chunked else self._plain(data)

    def _step(self, data: bytes) -> bytes:
        """Return the bytes for this step."""
        if self.unread:
            data = self.unread + data
        if self._stepped and len(data) > STEP_BYTES:
            self.unread = data[STEP_BYTES:]
            return data[:STEP_BYTES]
        self.unread = b""
        return data

    def skip(self, data: bytes) -> None:
        """Remember bytes for `tail`. The caller walks them next, or they are whole chunks, which it need not walk: the
        position is between two chunks before and after them.
        """
        if len(data) > TAIL_PIECE_BYTES:
            if not self.first:
                self.first = data[:TAIL_PIECE_BYTES]
            data = data[-TAIL_PIECE_BYTES:]
        elif not self.first:
            self.first = data
        elif len(data) < CRUMB_BYTES and len(last := self.recent[-1]) < TAIL_PIECE_BYTES:
            self.recent[-1] = last + data
            if last is self.first:
                self.first = self.recent[-1]
            return
        self.recent.append(data)

    def _plain(self, data: bytes) -> bytes:
        left = self._left
        if left < 0:
            return data
        size = len(data)
        if size < left:
            self._left = left - size
            return data
        self._left = 0
        self.ended = True
        self.excess = size > left or len(self.unread) > 0
        return data[:left]

    def _chunks(self, data: bytes, content: list[bytes] | None) -> bytes:
        """Advance over data; return the bytes to forward, and append the chunks' contents to `content`."""
        if self._held:
            data = self._held + data
            self._held = b""
        stop = self._advance(data, content)
        self.between = self._left == 0 and not self._held and not self._last and not self.unread
        return data if stop == len(data) else data[:stop]

    def _advance(self, data: bytes, content: list[bytes] | None) -> int:
        """Return up to where data may be forwarded."""
        size, at, left = len(data), 0, self._left
        while not self._last:
            if left:
                end = at + left
                if content is not None:
                    content.append(data[at : max(at, min(end - 2, size))])
                if end > size:
                    self._left = left = end - size
                    if left == 1 and data[-1:] != b"\r":
                        raise FramingError("a chunk longer than its size")
                    return size
                if data[max(at, end - 2) : end] != (b"\r\n" if left > 1 else b"\n"):
                    raise FramingError("a chunk longer than its size")
                at = end
                self._left = left = 0
            match = _SIZE.match(data, at)
            if match is None:
                if at < size:
                    self._hold_size(data[at:])
                return at
            chunk_bytes = int(match[1], 16)
            if chunk_bytes:
                left = chunk_bytes + 2
                at = match.end()
            else:
                self._last = True
                self._trailers(data, match.end() - 2)
                return at
        self._trailers(data, 0)
        return 0

    def _hold_size(self, line: bytes) -> None:
        if SIZE_BEGUN.fullmatch(line) is None:
            raise FramingError("malformed chunk size")
        self._held = line

    def _trailers(self, data: bytes, at: int) -> None:
        """Read from the CRLF of the last chunk's size to the empty line, and drop it."""
        if self.ended:
            self.excess = True
            return
        end = data.find(b"\r\n\r\n", at, at + TRAILER_BYTES_MAX)
        if end < 0:
            if len(data) - at >= TRAILER_BYTES_MAX:
                raise FramingError("trailers without end")
            self._held = data[at:]
            return
        if TRAILERS.fullmatch(data, at, end) is None:
            raise FramingError("malformed trailers")
        self.ended = True
        self.excess = end + 4 < len(data) or len(self.unread) > 0

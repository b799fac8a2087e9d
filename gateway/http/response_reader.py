"""The response side of HTTP/1.1 without I/O: an engine's bytes -> its head, and where its body ends (RFC 9112).

Owns what we accept from an engine and what of its head goes on to the client. A body is walked, not re-framed: `walk`
gives back the very bytes that arrived, less the end marker, which the client gets from us once the end was really seen.
Promises: what is odd in any way raises FramingError, and such a connection is never used again; a last chunk is told by
its place in the framing, never by how some bytes look (a head whose last line ends in `max=100` ends as a body does).
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache
from typing import Final, NamedTuple

from gateway.http.request_head import FIELD, TRAILERS, connection_names

HEAD_BYTES_MAX = 64 << 10
"""Of one response head, interim ones before it included."""
INTERIM_MAX = 8
"""1xx heads before the final one; more is odd."""
KNOWN_MAX, KNOWN_BYTES_MAX = 256, 1 << 10
"""So many heads of up to so many bytes are remembered as read."""
TRAILER_BYTES_MAX = 4 << 10
"""The last chunk's line, trailers and the empty line; they are read and dropped."""
TAIL_PIECES: Final = 4
TAIL_PIECE_BYTES: Final = 2 << 10
"""What is remembered of a body's end: of each of the last pieces, its last bytes."""
CRUMB_BYTES: Final = 64
"""A piece smaller than this is remembered with the one before it, else a few of them would be all that is."""

STEP_BYTES: Final = 16 << 10
"""Of a body whose bytes cost work (chunks, events) so much is walked in one step: it may be cut into single bytes."""

LAST_CHUNK = b"0\r\n\r\n"

_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*+)?((?:" + FIELD + rb")*+)")
_NO_HEAD = re.compile(rb"[^\r]\n|\r[^\n]|[^\t\r\n\x20-\x7e\x80-\xff]")
"""What is in no head: half of a line end, control characters."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
"""Chunk extensions are odd: no engine sends any, and a client might read them otherwise than we do."""
SIZE_BEGUN = re.compile(rb"(?:[0-9A-Fa-f]{1,8}\r?)?")
_LENGTH_DIGITS_MAX = 15

PASSED = frozenset(
    {
        b"cache-control", b"content-disposition", b"content-encoding", b"content-language", b"content-type", b"date",
        b"retry-after",
    }
)  # fmt: skip
"""Headers of an engine that go on to the client. All others stay here: hop-by-hop ones and the engine's internals."""
_ONCE = frozenset({b"content-length", b"transfer-encoding", b"content-type", b"content-encoding"})


class FramingError(Exception):
    """The engine's bytes are not the response that HTTP/1.1 lets us read in one way only."""


class ResponseHead(NamedTuple):
    """A final head. The body is chunked, or `length` bytes, or (neither) ends with the connection."""

    status: int
    chunked: bool
    length: int | None
    keep_alive: bool
    """The engine means to keep the connection; never so when its end is the body's end."""
    content_type: bytes
    fields: bytes
    """The PASSED header lines, each as `name: value CRLF`, ready to go into our own head."""

    @property
    def elsewhere(self) -> bool:
        """It says `not now` or `elsewhere`: no answer for a client, whose Call moves (commit point, RFC 9110, 15.4)."""
        return self.status in (429, 503) or 300 <= self.status < 400

    @property
    def event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self.content_type.startswith(b"text/event-stream")


class HeadReader:
    """Collects one response head; `feed` gives it with the body bytes that came along. Made anew by `reset`."""

    __slots__ = ("_held", "_interim")

    def __init__(self) -> None:
        self._held = b""
        self._interim = 0

    @property
    def begun(self) -> bool:
        """Whether any byte of the response has come."""
        return bool(self._held) or self._interim > 0

    def reset(self) -> None:
        """The next response begins."""
        self._held = b""
        self._interim = 0

    def feed(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """The final head and what follows it; None while it is incomplete. Interim heads are skipped."""
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
    """Raises when what is not a whole head cannot become one: its engine may wait for us, and would do so for long.

    `seen`: bytes that were looked at before. They are not looked at twice, so that a trickle stays cheap.
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
    """A head without its empty line; None for an interim one (1xx; 101 is odd: we offer nothing to switch to)."""
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
    if status in (204, 205, 304):
        if coding is not None or length not in (None, b"0"):
            raise FramingError("a body where there can be none")
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
"""The same: an engine that is busy says the same head many times within a second."""


def _read_fields(lines: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """Lower-case names with their values (lists joined), and the lines that go on."""
    known: dict[bytes, bytes] = {}
    fields = b""
    for line in lines.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        name = name.lower()
        value = value.strip(b" \t")
        if name in known:
            if name in _ONCE:
                raise FramingError("a header that may stand once stands twice")
            value = known[name] + b", " + value
        elif name in PASSED:
            fields += name + b": " + value + b"\r\n"
        known[name] = value
    return known, fields


def extract_tail(body: bytes) -> bytes:
    """The ends of a whole body, as `BodyWalker.tail`."""
    if len(body) <= 2 * TAIL_PIECE_BYTES:
        return body
    return body[:TAIL_PIECE_BYTES] + body[-TAIL_PIECE_BYTES:]


class BodyWalker:
    """Walks one body. After `ended` more bytes only set `excess`: the response is whole, the connection odd.

    What is much work is done in steps of STEP_BYTES: while there is `unread`, another one is due, in a later turn.
    """

    __slots__ = (
        "_chunked", "_held", "_last", "_left", "_stepped", "between", "ended", "excess", "first", "recent", "unread",
    )  # fmt: skip

    def __init__(self, head: ResponseHead) -> None:
        self._chunked = head.chunked
        self._left = -1 if head.length is None else head.length
        """Length: bytes to come (-1: until close). Chunked: bytes of this chunk to come, with its CRLF."""
        if head.chunked:
            self._left = 0
        self._held = b""
        """An unfinished line of the framing: not given back before it is known what it is."""
        self._last = False
        self._stepped = head.chunked or head.event_stream
        self.unread = b""
        """What came and waits for a further step (`walk` or `strip`, of nothing or of more): at most one read."""
        self.between = head.chunked
        """Exactly between two chunks: nothing of the next one is known."""
        self.ended = head.length == 0
        self.excess = False
        self.first = b""
        self.recent: deque[bytes] = deque(maxlen=TAIL_PIECES)

    @property
    def at_boundary(self) -> bool:
        """Whether what was given back so far ends between two chunks."""
        return self._chunked and self._left == 0

    @property
    def left_of_chunk(self) -> int:
        """Bytes that are still to come of the chunk that was begun, with its line end; 0 between two, or in a size."""
        return self._left if self._chunked and not self.unread else 0

    @property
    def until_close(self) -> bool:
        """Whether the end of the connection is the end of the body."""
        return not self._chunked and self._left < 0

    def tail(self) -> bytes:
        """The last bytes of the body, framing included; and its first ones before them."""
        recent = self.recent
        if recent and recent[0] is self.first:
            return recent[0] if len(recent) == 1 else b"".join(recent)
        return b"".join((self.first, *recent))

    def walk(self, data: bytes) -> bytes:
        """Takes what arrived; gives back what may go on now, framing included, the end marker not."""
        return self._walk(data, None)

    def strip(self, data: bytes) -> bytes:
        """As `walk`, but gives back the content alone."""
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
        """What is walked now."""
        if self.unread:
            data = self.unread + data
        if self._stepped and len(data) > STEP_BYTES:
            self.unread = data[STEP_BYTES:]
            return data[:STEP_BYTES]
        self.unread = b""
        return data

    def skip(self, data: bytes) -> None:
        """Remembers bytes that went by: whole chunks (it is still between two), or what is about to be walked."""
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
        """Advances over data; gives back what may go on, and appends the chunks' contents to `content`."""
        if self._held:
            data = self._held + data
            self._held = b""
        stop = self._advance(data, content)
        self.between = self._left == 0 and not self._held and not self._last and not self.unread
        return data if stop == len(data) else data[:stop]

    def _advance(self, data: bytes, content: list[bytes] | None) -> int:
        """Up to where data may go on."""
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
        """From the CRLF of the last chunk's size to the empty line; dropped."""
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

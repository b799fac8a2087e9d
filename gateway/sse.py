"""Server-sent events on their way through. Pure.

Owns what we add to an event stream (comments, error events come from `errors`) and the one event that we take out: the
usage chunk that we asked for and the client did not. Promises: only whole events go on (but for huge ones), so what
the client has got ends between two events, and an error can be told there. Almost all pieces from engines are whole
chunks of whole events; they go on as they came, for the price of two look-ups.
"""

from __future__ import annotations

import re

import msgspec

from gateway import errors
from gateway.shapes import Chunk, ErrorDocument
from gateway.walker import BodyWalker, ResponseHead, is_one_chunk, whole_chunks

EVENT_BYTES_MAX = 64 << 10
"""An unfinished event longer than this goes on unfinished: it is content, not usage."""

_LINE_END = rb"(?:\n|\r\n?+)"
_EVENT_END = re.compile(_LINE_END + _LINE_END)
"""A line ends with LF, CR or both, and an empty line ends an event (WHATWG HTML, 9.2.6)."""
_EMPTY_LIST = re.compile(rb"\[[ \t]*+[]\r\n]")
"""A list that is empty, or might be further lines down."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""May stand before a stream's first event."""
_CHUNK_END, _CHUNK_END_CR = _CHUNK_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
"""How a chunk that ends with an event ends, with the CRLF of the chunk."""
_CHUNKED = ResponseHead(200, True, None, True, b"text/event-stream", b"")


_decode = msgspec.json.Decoder(Chunk).decode
_decode_error = msgspec.json.Decoder(ErrorDocument).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises where an engine's JSON is none, is not UTF-8, or nests without end."""


def chunk(content: bytes) -> bytes:
    """Content as one chunk of a chunked body; nothing for nothing, for an empty chunk is the last one."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""


def waiting(position: int, expected_wait_s: float | None, dialect: str) -> bytes:
    """What a parked stream hears: a comment, or Anthropic's ping."""
    if dialect == "anthropic":
        return b'event: ping\ndata: {"type": "ping"}\n\n'
    about = b"" if expected_wait_s is None else b", about %d s" % max(1, round(expected_wait_s))
    return b": waiting, position %d%b\n\n" % (position, about)


def told_error(body: bytes, dialect: str) -> bytes:
    """An engine's error document as one event; ours when it is not one."""
    try:
        told = _decode_error(body).error
        told_object = {"type": "error", "error": told} if dialect == "anthropic" else {"error": told}
        document = msgspec.json.encode(told_object)
    except _UNREADABLE:
        return errors.event(errors.upstream_error(), dialect)
    return (b"event: error\n" if dialect == "anthropic" else b"") + b"data: " + document + b"\n\n"


class EventGate:
    """Lets whole events through, one body long. `drop_usage`: the usage chunk was our wish, not the client's."""

    __slots__ = ("_drop_usage", "_held", "_inner", "_part", "_walker", "whole")

    def __init__(self, walker: BodyWalker, *, drop_usage: bool) -> None:
        self._walker = walker
        self._drop_usage = drop_usage
        self._held = b""
        """The beginning of an event."""
        self._part = b""
        """The beginning of a chunk, which the walker has not seen."""
        self.whole = True
        """What went on ends between two events; false only inside an event above EVENT_BYTES_MAX."""
        self._inner: BodyWalker | None = None
        """Set while pieces are taken apart, between two boundaries of the chunked body."""

    def pass_chunks(self, data: bytes) -> bytes:
        """What arrived of a chunked body -> what may go on, in chunks.

        Nearly all of it goes on as it came: whole chunks of which the last one ends an event.
        """
        walker = self._walker
        if self._inner is not None or not walker.between:
            return self._take_apart(data)
        if (  # `find`, for `in` makes an error and drops it where a number might have been meant
            not self._part
            and (data.endswith(_CHUNK_END) or data.endswith(_CHUNK_END_CR))  # noqa: PIE810  the first is nearly always it
            and is_one_chunk(data)
            and not (self._drop_usage and data.find(b'"usage"') >= 0 and _EMPTY_LIST.search(data) is not None)
        ):
            walker.skip(data)  # one token, as most engines send them
            return data
        if self._part:
            data = self._part + data
            self._part = b""
        usage_at = data.find(b'"usage"') if self._drop_usage else -1
        if usage_at >= 0 and _EMPTY_LIST.search(data) is None:
            usage_at = -1  # some engines say it in every chunk
        end, content_bytes = whole_chunks(data, len(data) if usage_at < 0 else usage_at)
        if end and (content_bytes < 4 or not data.endswith(_CHUNK_ENDS, 0, end)):  # with fewer it might be framing
            return self._take_apart(data)
        if end == len(data):
            walker.skip(data)
            return data
        piece = data[:end]
        if piece:
            walker.skip(piece)
        rest = data[end:]
        if usage_at < 0 and len(rest) <= EVENT_BYTES_MAX and not rest.startswith(b"0"):
            self._part = rest
            return piece
        return piece + self._take_apart(rest)

    def _take_apart(self, data: bytes) -> bytes:
        """The same where events and chunks do not end together, or one event has to go."""
        piece = self._walker.walk(data)
        if not piece:
            return piece
        if self._inner is None:
            self._inner = BodyWalker(_CHUNKED)
        content = self.pass_content(self._inner.strip(piece))
        if self.whole and not self._held and self._inner.at_boundary:
            self._inner = None
        return chunk(content)

    def pass_content(self, content: bytes) -> bytes:
        """The same for content without framing."""
        seen = len(self._held)
        begin = 1 if not seen and self.whole and content.startswith(b"\n") else 0  # of a CRLF whose CR ended an event
        content = self._held + content
        out = [content[:begin]]
        for match in _EVENT_END.finditer(content, max(begin, seen - 1)):
            event = content[begin : match.end()]
            begin = match.end()
            self.whole = True
            if not (self._drop_usage and is_usage(event)):
                out.append(event)
        self._held = content[begin:]
        if len(self._held) > EVENT_BYTES_MAX:
            stop = len(self._held.rstrip(b"\r\n"))  # a line end stays: the next one may make it the event's end
            out.append(self._held[:stop])
            self._held = self._held[stop:]
            self.whole = False
        return b"".join(out)

    def rest(self) -> bytes:
        """What is held when the engine has ended the body properly: an event without its empty line."""
        held, self._held = self._held, b""
        return held


def is_usage(event: bytes) -> bool:
    """Whether it is the chunk that `stream_options.include_usage` adds: no choices, and usage.

    Whatever else the event says (a comment, an id, its name), and in however many lines.
    """
    if event.find(b'"usage"') < 0:
        return False
    lines = event.removeprefix(_BYTE_ORDER_MARK).splitlines()  # of bytes: at the line ends of events, and no others
    try:
        read = _decode(b"\n".join([line[5:] for line in lines if line.startswith(b"data:")]))
    except _UNREADABLE:
        return False
    return read.choices == [] and read.usage is not None

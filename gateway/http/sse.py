"""Server-sent events on their way through. Pure.

Owns what we add to an event stream (comments, error events come from `errors`) and the one event that we take out: the
usage chunk that we asked for and the client did not. Promises: only whole events go on (but for huge ones), so what
the client has got ends between two events, and an error can be told there; which events, hangs neither on how the bytes
are cut nor on where chunks end. Almost all pieces from engines are whole chunks of whole events; they go on as they
came, for the price of two look-ups.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

from gateway import errors
from gateway.http.json_types import Chunk, ErrorDocument
from gateway.http.response_reader import SIZE_BEGUN, BodyWalker

EVENT_BYTES_MAX: Final = 64 << 10
"""An event longer than this, without its last line ends, goes on unfinished: it is content, not usage."""
PART_BYTES_MAX: Final = 8 << 10
"""The begin of a chunk that is kept until the rest of it has come; a longer one is taken apart."""

SIZES_MAX = 4096
"""Chunk sizes remembered as read."""
RUNS_MAX = 4096
"""Runs of chunks of one size that are looked at in one go; what comes after them is taken apart, in steps."""

_DIGITS = re.compile(rb"[0-9A-Fa-f]{1,8}")
_SIZE_BYTES_MAX: Final = 10
_LINE_END = rb"(?:\n|\r\n?+)"
_EVENT_END = re.compile(rb"(" + _LINE_END + _LINE_END + rb")[\r\n]*+")
"""A line ends with LF, CR or both, and an empty line ends an event (WHATWG HTML, 9.2.6). More of them are of none."""
_EMPTY_LIST = re.compile(rb"\[[ \t]*+[]\r\n]")
"""A list that is empty, or might be further lines down."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""May stand before a stream's first event."""
_CHUNK_END: Final = b"\n\n\r\n"
_CHUNK_END_CR: Final = b"\r\n\r\n\r\n"
_EMPTY_LINE: Final = b"\r\n\r\n"
_CHUNK_ENDS: Final = (_CHUNK_END, _CHUNK_END_CR)
"""How a chunk that ends with an event ends, with the CRLF of the chunk."""

_decode = msgspec.json.Decoder(Chunk).decode
_decode_error = msgspec.json.Decoder(ErrorDocument).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises where an engine's JSON is none, is not UTF-8, or nests without end."""


def encode_chunk(content: bytes) -> bytes:
    """Content as one chunk of a chunked body; nothing for nothing, for an empty chunk is the last one."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""


def render_waiting_event(position: int, expected_wait_s: float | None, dialect: str) -> bytes:
    """What a parked stream hears: a comment, or Anthropic's ping."""
    if dialect == "anthropic":
        return b'event: ping\ndata: {"type": "ping"}\n\n'
    about = b"" if expected_wait_s is None else b", about %d s" % max(1, round(expected_wait_s))
    return b": waiting, position %d%b\n\n" % (position, about)


def render_engine_error(body: bytes, dialect: str) -> bytes:
    """An engine's error document as one event; ours when it is not one."""
    try:
        told = _decode_error(body).error
        told_object = {"type": "error", "error": told} if dialect == "anthropic" else {"error": told}
        document = msgspec.json.encode(told_object)
    except _UNREADABLE:
        return errors.render_error_event(errors.upstream_error(), dialect)
    return (b"event: error\n" if dialect == "anthropic" else b"") + b"data: " + document + b"\n\n"


def is_one_chunk(data: bytes) -> bool:
    """Whether data, which begins between two chunks and ends with a line end, is exactly one of at least four bytes."""
    size = len(data)
    return size > 8 and data.startswith(_LINES[size] if size <= PART_BYTES_MAX else _line_of(size))


def _line_of(size: int) -> bytes:
    """The size line of the chunk that has so many bytes with its framing, as nearly all engines write it."""
    digits = 1
    while size - digits - 4 >= 1 << 4 * digits:
        digits += 1
    line = b"%x\r\n" % max(0, size - digits - 4)
    return line if len(line) == digits + 2 else b"\n"  # no chunk is so long: nothing begins with that


_LINES: Final[list[bytes]] = [_line_of(size) for size in range(PART_BYTES_MAX + 1)]
"""By the bytes of a whole chunk; a list, for a dictionary would be asked with an object."""


@lru_cache(SIZES_MAX)
def parse_chunk_size(digits: bytes) -> int:
    """A chunk's size, 0 for what is none: an engine's chunks of one length have the same digits."""
    return int(digits, 16) if _DIGITS.fullmatch(digits) else 0


def whole_chunks(data: bytes, stop: int) -> tuple[int, bool]:
    """(up to where data is whole chunks that each end with an event, whether what follows is but the begin of a chunk).

    Data begins between two chunks, and none that is counted ends after `stop`. An engine that has much to say says it
    in chunks of one size: a run of such costs one comparison each.
    """
    at = 0
    for _ in range(RUNS_MAX):
        line_end = data.find(b"\r\n", at, at + _SIZE_BYTES_MAX)
        if line_end <= at:
            return at, SIZE_BEGUN.fullmatch(data, at) is not None
        size = parse_chunk_size(data[at:line_end])
        if size < 2:
            break  # the last one, or none, or one in which no event can end by itself
        step, seam = line_end - at + size + 4, _CHUNK_END + data[at : line_end + 2]
        while at + step <= stop and data.startswith(seam, at + step - len(_CHUNK_END)):
            at += step
        end = at + step
        if end > stop:
            return at, end > len(data)
        if not data.endswith(_CHUNK_ENDS, end - size - 2, end):
            break
        at = end
    return at, False


class EventGate:
    """Lets whole events through, one body long. `drop_usage`: the usage chunk was our wish, not the client's."""

    __slots__ = ("_apart", "_drop_usage", "_half", "_held", "_part", "_walker", "whole")

    def __init__(self, walker: BodyWalker, *, drop_usage: bool) -> None:
        self._walker = walker
        self._drop_usage = drop_usage
        self._held = b""
        """The beginning of an event."""
        self._half = False
        """An event that was taken out ended with CR: an LF that comes next is the other half of its line end."""
        self._part = b""
        """The beginning of a chunk, which the walker has not seen."""
        self.whole = True
        """What went on ends between two events; false only inside an event above EVENT_BYTES_MAX."""
        self._apart = False
        """Pieces are being taken apart: what came so far does not end between two chunks and two events."""

    def pass_chunks(self, data: bytes) -> bytes:
        """What arrived of a chunked body -> what may go on, in chunks.

        Nearly all of it goes on as it came: whole chunks that each end with an event. (No event is cut in two by the
        end of such a chunk, so what makes one the usage chunk is seen where it stands.)
        """
        walker = self._walker
        if self._apart or not walker.between:
            left = walker.left_of_chunk
            if not 0 < left < len(data):
                return self._take_apart(data)
            piece = self._take_apart(data[:left])
            data = data[left:]
            if self._apart or not walker.between:
                return piece + self._take_apart(data)
            return piece + self.pass_chunks(data)  # on as before: it does not come here again
        end = data[-4:]
        if (
            not self._part
            and (end == _CHUNK_END or (end == _EMPTY_LINE and data.endswith(_CHUNK_END_CR)))
            and is_one_chunk(data)
        ):  # one token, as most engines send them
            if data.find(b'"usage"') < 0:  # not `in`: that makes an error and drops it where a number might be meant
                return data  # nothing of it is asked for at the end: it need not stay in memory
            if not self._drop_usage or _EMPTY_LIST.search(data) is None:
                walker.skip(data)
                return data
        if self._part:
            data = self._part + data
            self._part = b""
        usage_at = data.find(b'"usage"') if self._drop_usage else -1
        if usage_at >= 0 and _EMPTY_LIST.search(data) is None:
            usage_at = -1  # some engines say it in every chunk
        stop, begun = whole_chunks(data, len(data) if usage_at < 0 else usage_at)
        if stop == len(data):
            walker.skip(data)
            return data
        piece, rest = data[:stop], data[stop:]
        if piece:
            walker.skip(piece)
        if begun and len(rest) <= PART_BYTES_MAX and _EVENT_END.search(rest) is None:
            self._part = rest
            return piece
        return piece + self._take_apart(rest)

    def _take_apart(self, data: bytes) -> bytes:
        """The same where events and chunks do not end together, or one event has to go."""
        content = self.pass_content(self._walker.strip(data))
        self._apart = self._half or not self.whole or len(self._held) > 0 or not self._walker.at_boundary
        return encode_chunk(content)

    def pass_content(self, content: bytes) -> bytes:
        """The same for content without framing."""
        if self._half and content:
            self._half = False
            content = content.removeprefix(b"\n")
        seen = len(self._held)
        content = self._held + content
        begin = 0 if seen or not self.whole else len(content) - len(content.lstrip(b"\r\n"))
        out = [content[:begin]]
        for match in _EVENT_END.finditer(content, max(begin, seen - 1)):
            end = match.end(1)
            if self._drop_usage and self.whole and is_usage(content[begin:end]):
                begin = match.end()
                out.append(content[end:begin])
                self._half = begin == end == len(content) and content.endswith(b"\r")
            else:
                out.append(content[begin : match.end()])
                begin = match.end()
            self.whole = True
        self._held = held = content[begin:]
        if len(held) > EVENT_BYTES_MAX or not self.whole:
            stop = len(held.rstrip(b"\r\n"))  # a line end stays: the next one may make it the event's end
            if stop > EVENT_BYTES_MAX or not self.whole:
                out.append(held[:stop])
                self._held = held[stop:]
                self.whole = False
        return b"".join(out)

    def rest(self) -> bytes:
        """What is held when the engine has ended the body properly: an event without its empty line."""
        held, self._held = self._held, b""
        return b"" if self._drop_usage and self.whole and is_usage(held) else held


def is_usage(event: bytes) -> bool:
    """Whether it is the chunk that `stream_options.include_usage` adds: no choices, and usage.

    Whatever else the event says (a comment, an id, its name), and in however many lines.
    """
    if event.find(b'"usage"') < 0 or len(event.rstrip(b"\r\n")) > EVENT_BYTES_MAX:
        return False
    lines = event.removeprefix(_BYTE_ORDER_MARK).splitlines()  # of bytes: at the line ends of events, and no others
    try:
        read = _decode(b"\n".join([line[5:] for line in lines if line.startswith(b"data:")]))
    except _UNREADABLE:
        return False
    return read.choices == [] and read.usage is not None

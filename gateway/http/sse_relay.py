"""Relays server-sent events. Pure.

Adds comments to an event stream (error events come from `gateway.errors`), and removes what the gateway requested and
the client did not: the usage chunk. If an engine adds other members to that chunk (llama.cpp: `timings`), they move to
the chunk before it, where the engine writes them if no client requests usage. Many clients expect a choice in each
chunk, so the chunk with the last choice waits for the usage chunk. Only whole events are forwarded (except huge ones),
so the client's stream always ends between two events, where an error can be added. The selected events do not depend on
how the bytes are split, or on chunk boundaries. Almost all pieces from engines are whole chunks of whole events; these
are forwarded unchanged after three lookups.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

from gateway import errors
from gateway.http.json_structs import Chunk, ErrorDocument
from gateway.http.response_reader import SIZE_BEGUN, BodyWalker

EVENT_BYTES_MAX: Final = 64 << 10
"""A longer event (without its final line ends) is forwarded incomplete: it is content, not usage."""
PART_BYTES_MAX: Final = 8 << 10
"""The beginning of a chunk is held back until its rest arrives; a longer one is taken apart."""

LAST_BYTES_MAX: Final = 2 << 10
"""The last chunk with a choice is recognized in this many bytes before the usage chunk."""

SIZES_MAX = 4096
"""Cache size of parsed chunk sizes."""
RUNS_MAX = 4096
"""Runs of equal-sized chunks handled at once; the bytes after them are taken apart, in steps."""

_DIGITS = re.compile(rb"[0-9A-Fa-f]{1,8}")
_SIZE_BYTES_MAX: Final = 10
_LINE_END = rb"(?:\n|\r\n?+)"
_EVENT_END = re.compile(rb"(" + _LINE_END + _LINE_END + rb")[\r\n]*+")
"""A line ends with LF, CR or CRLF, and an empty line ends an event (WHATWG HTML, 9.2.6). Ignore further ones."""
_EMPTY_LIST = re.compile(rb"\[[ \t]*+[]\r\n]")
"""A list that is empty, or may be continued on the next line."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""May precede a stream's first event."""
_CHUNK_END: Final = b"\n\n\r\n"
_CHUNK_END_CR: Final = b"\r\n\r\n\r\n"
_EMPTY_LINE: Final = b"\r\n\r\n"
_CHUNK_ENDS: Final = (_CHUNK_END, _CHUNK_END_CR)
"""The ends of a chunk that ends with an event, including the chunk's CRLF."""

_decode = msgspec.json.Decoder(Chunk).decode
_decode_error = msgspec.json.Decoder(ErrorDocument).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_FINISHED: Final = b'_reason":"'
"""In the last chunk of a choice: `finish_reason` is not null."""
_ENVELOPE = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier", "obfuscation"}
)
"""The members of each chunk, which mean nothing without choices and usage."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for an engine's JSON that is invalid, not UTF-8, or nested too deeply."""


def encode_chunk(content: bytes) -> bytes:
    """Encode content as one chunk; empty content gives nothing, because an empty chunk is the last one."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""


def render_waiting_event(position: int, expected_wait_s: float | None, dialect: str) -> bytes:
    """Render the keep-alive of a queued stream: a comment, Anthropic's ping, or a space for Ollama's lines."""
    if dialect in {"anthropic", "ollama"}:
        return render_keepalive(dialect)
    about = b"" if expected_wait_s is None else b", about %d s" % max(1, round(expected_wait_s))
    return b": waiting, position %d%b\n" % (position, about)


def render_keepalive(dialect: str) -> bytes:
    """Render the keep-alive of a stream whose engine is silent. A space before a line of JSON changes nothing."""
    if dialect == "ollama":
        return b" "
    return b'event: ping\ndata: {"type": "ping"}\n\n' if dialect == "anthropic" else b": keepalive\n"


def render_engine_error(body: bytes, dialect: str) -> bytes:
    """Render an engine's error document as one event; if it is malformed, the gateway's own error."""
    try:
        error = _decode_error(body).error
        typed = dialect in {"anthropic", "responses"}
        wrapped = {"type": "error", "error": error} if typed else {"error": error}
        document = msgspec.json.encode(wrapped)
    except _UNREADABLE:
        return errors.render_error_event(errors.upstream_error(), dialect)
    return (b"event: error\n" if typed else b"") + b"data: " + document + b"\n\n"


def is_one_chunk(data: bytes) -> bool:
    """Return whether data (starting between two chunks, ending with a line end) is one chunk of at least four bytes."""
    size = len(data)
    return size > 8 and data.startswith(_LINES[size] if size <= PART_BYTES_MAX else _line_of(size))


def _line_of(size: int) -> bytes:
    """Return the size line of a chunk with this total size, as nearly all engines write it."""
    digits = 1
    while size - digits - 4 >= 1 << 4 * digits:
        digits += 1
    line = b"%x\r\n" % max(0, size - digits - 4)
    return line if len(line) == digits + 2 else b"\n"  # impossible size: no data starts with this


_LINES: Final[list[bytes]] = [_line_of(size) for size in range(PART_BYTES_MAX + 1)]
"""By the total bytes of a chunk; a list, because a dictionary lookup would need an int object."""


@lru_cache(SIZES_MAX)
def parse_chunk_size(digits: bytes) -> int:
    """Return a chunk's size, or 0 if it is invalid. Cached: an engine's chunks of one length have the same digits."""
    return int(digits, 16) if _DIGITS.fullmatch(digits) else 0


def whole_chunks(data: bytes, stop: int) -> tuple[int, bool]:
    """Return (end of the leading whole chunks that each end with an event, whether only the start of a chunk follows).

    Data starts between two chunks, and no counted chunk ends after `stop`. A fast engine sends chunks of one size: each
    chunk of such a run costs one comparison.
    """
    at = 0
    for _ in range(RUNS_MAX):
        line_end = data.find(b"\r\n", at, at + _SIZE_BYTES_MAX)
        if line_end <= at:
            return at, SIZE_BEGUN.fullmatch(data, at) is not None
        size = parse_chunk_size(data[at:line_end])
        if size < 2:
            break  # the last chunk, an invalid one, or one too short for the end of an event
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
    """Forwards whole events of one body. `drop_usage`: the gateway requested the usage chunk, not the client."""

    __slots__ = ("_apart", "_drop_usage", "_half", "_held", "_last", "_part", "_walker", "whole")

    def __init__(self, walker: BodyWalker, *, drop_usage: bool) -> None:
        self._walker = walker
        self._drop_usage = drop_usage
        self._held = b""
        """The beginning of an event."""
        self._half = False
        """A removed event ended with CR; a following LF is the second half of its line end."""
        self._part = b""
        """A chunk that waits for the usage chunk, or the beginning of a chunk; the walker has not seen it."""
        self._last = b""
        """An event that waits for the usage chunk."""
        self.whole = True
        """Whether the forwarded bytes end between two events; false only inside an event above EVENT_BYTES_MAX."""
        self._apart = False
        """Whether new chunks are built: the bytes so far do not end where both a chunk and an event end."""

    def pass_chunks(self, data: bytes) -> bytes:
        """Take received bytes of a chunked body and return the bytes to forward, in chunks.

        Nearly everything is forwarded unchanged: whole chunks that each end with an event. (The end of such a chunk
        splits no event, so a usage chunk is recognized in place.)
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
            return piece + self.pass_chunks(data)  # recurses only once
        end = data[-4:]
        if (
            not self._part
            and (end == _CHUNK_END or (end == _EMPTY_LINE and data.endswith(_CHUNK_END_CR)))
            and is_one_chunk(data)
        ):  # one token, as most engines send them
            if data.find(b'"usage"') < 0:  # not `in`, which raises and drops an error internally (an int is allowed)
                if not self._drop_usage or data.find(_FINISHED) < 0:
                    return data  # not needed at the end, so not remembered
                self._part = data
                return b""
            if not self._drop_usage or _EMPTY_LIST.search(data) is None:
                walker.skip(data)
                return data
        waited = len(self._part) > 0
        if waited:
            data = self._part + data
            self._part = b""
        usage_at = data.find(b'"usage"') if self._drop_usage else -1
        if usage_at >= 0 and _EMPTY_LIST.search(data) is None:
            usage_at = -1  # some engines send usage in every chunk
        stop, begun = whole_chunks(data, len(data) if usage_at < 0 else usage_at)
        seen = stop
        if self._drop_usage and (usage_at >= 0 or begun or (stop == len(data) and not waited)):
            last_at = data.rfind(_FINISHED, max(0, stop - LAST_BYTES_MAX), stop)
            if last_at >= 0:
                stop, _ = whole_chunks(data, last_at)
                begun = usage_at < 0
        if stop == len(data):
            walker.skip(data)
            return data
        piece, rest = data[:stop], data[stop:]
        if piece:
            walker.skip(piece)
        if begun and len(rest) <= PART_BYTES_MAX and _EVENT_END.search(data, seen) is None:
            self._part = rest
            return piece
        return piece + self._take_apart(rest)

    def _take_apart(self, data: bytes) -> bytes:
        """Do the same if events and chunks do not end together, or one event must be removed."""
        content = self.pass_content(self._walker.strip(data))
        waits = len(self._held) > 0 or len(self._last) > 0
        self._apart = waits or self._half or not self.whole or not self._walker.at_boundary
        return encode_chunk(content)

    def pass_content(self, content: bytes) -> bytes:
        """Do the same for content without framing."""
        if self._half and content:
            self._half = False
            content = content.removeprefix(b"\n")
        seen = len(self._held)
        content = self._held + content
        begin = 0 if seen or not self.whole else len(content) - len(content.lstrip(b"\r\n"))
        out = [piece for piece in (self._last, content[:begin]) if piece]
        self._last = b""
        for match in _EVENT_END.finditer(content, max(begin, seen - 1)):
            end = match.end(1)
            if self._drop_usage and self.whole and is_usage(content[begin:end]):
                _add_extras(out, content[begin:end])
                begin = match.end()
                out.append(content[end:begin])
                self._half = begin == end == len(content) and content.endswith(b"\r")
            else:
                out.append(content[begin : match.end()])
                begin = match.end()
            self.whole = True
        self._held = held = content[begin:]
        if self._drop_usage and self.whole and out and out[-1].find(_FINISHED) >= 0:
            self._last = out.pop()
        if len(held) > EVENT_BYTES_MAX or not self.whole:
            stop = len(held.rstrip(b"\r\n"))  # hold back line ends: the next one may complete the event
            if stop > EVENT_BYTES_MAX or not self.whole:
                out += (self._last, held[:stop])
                self._last = b""
                self._held = held[stop:]
                self.whole = False
        return b"".join(out)

    def release(self) -> tuple[bytes, bytes]:
        """Return the events that wait for the usage chunk, as chunks and as content: the stream breaks."""
        stop, _ = whole_chunks(self._part, len(self._part))
        chunks, content = self._part[:stop], self._last
        self._part, self._last = self._part[stop:], b""
        return chunks, content

    def rest(self) -> bytes:
        """Return the held bytes after the engine has ended the body properly: an event without its empty line."""
        held, self._held = self._held, b""
        out = [self._last]
        self._last = b""
        if self._drop_usage and self.whole and is_usage(held):
            _add_extras(out, held)
        else:
            out.append(held)
        return b"".join(out)


def is_usage(event: bytes) -> bool:
    """Return whether an event is the chunk that `stream_options.include_usage` adds: no choices, and usage.
    Other fields of the event (comment, id, name) and the number of its lines do not matter.
    """
    if event.find(b'"usage"') < 0 or len(event.rstrip(b"\r\n")) > EVENT_BYTES_MAX:
        return False
    try:
        read = _decode(_event_data(event))
    except _UNREADABLE:
        return False
    return read.choices == [] and read.usage is not None


def _event_data(event: bytes) -> bytes:
    """Return the data of an event: all of its `data` lines."""
    lines = event.removeprefix(_BYTE_ORDER_MARK).splitlines()  # bytes.splitlines splits at CR and LF only, like SSE
    return b"\n".join([line[5:] for line in lines if line.startswith(b"data:")])


def _add_extras(out: list[bytes], usage_event: bytes) -> None:
    """Add the other members of a usage chunk: to the last event of `out`, if that is the last chunk with a choice,
    otherwise as an event without the usage.
    """
    try:
        members = _decode_members(_event_data(usage_event))
        extras = {name: value for name, value in members.items() if name not in _ENVELOPE and bytes(value) != b"null"}
        if not extras:
            return
        last = out[-1] if out else b""
        brace = last.rfind(b"}")
        is_last = last.find(_FINISHED) >= 0 and not last[brace + 1 :].strip(b"\r\n")
        known = _decode_members(_event_data(last)) if is_last else {}
    except _UNREADABLE:
        return
    if bytes(known.get("choices", b"[]")) not in (b"[]", b"null") and not extras.keys() & known.keys():
        added = b"".join([b",%b:%b" % (msgspec.json.encode(name), value) for name, value in extras.items()])
        out[-1] = last[:brace] + added + last[brace:]
    else:
        del members["usage"]
        kept = [b"%b:%b" % (msgspec.json.encode(name), value) for name, value in members.items()]
        out.append(b"data: {%b}\n\n" % b",".join(kept))

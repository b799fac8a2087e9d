"""Parses the head of one HTTP/1.1 request and determines how its body is framed (RFC 9112, RFC 9110). Pure.

A head either matches one anchored grammar completely or raises a CallError that closes the connection. There is no
recovery, folding or decoding: an accepted head is unambiguous. Targets are in origin-form, in absolute-form, whose
authority replaces `Host`, or `*` with OPTIONS (RFC 9112, 3.2); versions 1.0 and 1.1. Only headers in `KEPT` are stored.
All others are validated and dropped, so nothing is passed on by accident. If a kept header that is not a list is
repeated, a hint is dropped, equal values count once, and all others are rejected; a header that frames the request is
always rejected. A client's heads mostly differ only in the body's length; such heads are parsed once and cached.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from gateway.errors import CallError, header_too_large, invalid_request, unsupported_media_type
from gateway.http.body_buffers import Body
from gateway.http.host_check import HostCheck, host_name

HEAD_BYTES_MAX: Final = 64 << 10
"""Including the final empty line; above it 431."""
HEADERS_MAX: Final = 100
"""Header lines in one head; above it 431."""
CHUNKED: Final = -1
"""Body length if Transfer-Encoding determines it."""
KNOWN_MAX, KNOWN_BYTES_MAX = 512, 2 << 10
"""Cache of parsed heads: number of entries, and maximum bytes of one; at most a few MiB."""

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
"""RFC 9110, 5.6.2."""
FIELD = rb"\r\n" + TOKEN + rb"++:[\t\x20-\x7e\x80-\xff]*+"
"""One header line with the preceding line end: no space before the colon, no folding, no control characters."""
TRAILERS = re.compile(rb"(?:" + FIELD + rb")*+")
"""Header lines after a chunked body (RFC 9112, 7.1.2), without the final empty line."""

_PATH = rb"/[!\"$->@-~]*+"
_LINE = (
    rb"(?!CONNECT |(?!OPTIONS )" + TOKEN + rb"{1,32}+ \*)(" + TOKEN + rb"{1,32}+) (?:(" + _PATH + rb"|\*(?= ))"
    rb"|[Hh][Tt][Tt][Pp][Ss]?://([0-9A-Za-z.:_~%\[\]-]++)(" + _PATH + rb")?)(?:\?([!\"$-~]*+))? HTTP/1\.([01])"
)
"""Method, target in origin-form or `*`, authority and path of a target in absolute-form, query, and minor version."""
_HEAD = re.compile(_LINE + rb"((?:" + FIELD + rb")*+)")
_FIRST_LINE = re.compile(_LINE + rb"\r\n")
_BARE = re.compile(rb"[^\r]\n|\r[^\n]|\0")
_DROPPED = b"\0"
"""The value of a repeated hint, until all headers have been read; no header has this value."""
_LENGTH_DIGITS_MAX = 19
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,9})(?=\r\n|\Z)")
LENGTH_DIGITS_MAX = 9
"""Digits of the content-length in a cached head; actual bodies are far smaller."""

LISTS = frozenset(
    {
        b"accept", b"accept-language", b"access-control-request-headers", b"anthropic-beta", b"connection",
        b"openai-beta", b"prefer", b"sec-fetch-site", b"tracestate",
    }
)  # fmt: skip
"""Kept headers that may be repeated (RFC 9110, 5.3); the values are joined by a comma.
`sec-fetch-site` is one of them: few ports use it, and the others need not reject a request that repeats it.
"""
HINTS = frozenset({b"traceparent", b"user-agent", b"x-forwarded-proto", b"x-request-id", b"x-stainless-read-timeout"})
"""Kept headers that are dropped if they are repeated: the request means the same without them."""
FRAMING = frozenset({b"content-encoding", b"content-length", b"expect", b"host", b"transfer-encoding"})
"""Kept headers that are rejected if they are repeated, even with equal values."""
KEPT = LISTS | HINTS | FRAMING | {
    b"anthropic-version", b"api-key", b"authorization", b"content-type", b"origin", b"x-api-key", b"x-model",
    b"x-priority",
}  # fmt: skip
"""All headers that the gateway reads, in lower case."""


class Head:
    """A request's head as the client sent it, not decoded. Shared between requests, so it is never changed.

    `headers` contains only KEPT names, without those that frame the body.
    """

    __slots__ = (
        "derived", "expects_continue", "headers", "host", "keep_alive", "method", "minor", "passed", "path", "query",
    )  # fmt: skip

    def __init__(
        self,
        method: bytes,
        path: bytes,
        headers: dict[bytes, bytes],
        query: bytes = b"",
        minor: int = 1,
        *,
        keep_alive: bool = True,
        expects_continue: bool = False,
        host: str | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.query = query
        self.minor = minor
        self.keep_alive = keep_alive
        """False: the connection ends after the response, as always with HTTP/1.0 (close-delimited)."""
        self.expects_continue = expects_continue
        """Whether the client waits for `100 Continue` before the body (ignored on HTTP/1.0, RFC 9110, 10.1.1)."""
        self.host = host
        """The name or address in Host (`gateway.http.host_check.host_name`)."""
        self.passed: HostCheck | None = None
        """The last host check that it passed, valid until the settings change."""
        self.derived: object = None
        """A value that a caller derives from the head, once for all requests that share it."""


class Request:
    """A complete request."""

    __slots__ = ("body", "head")

    def __init__(self, head: Head, body: Body) -> None:
        self.head = head
        self.body = body

    def __repr__(self) -> str:
        return f"<Request {self.head.method!r} {self.head.path!r} 1.{self.head.minor} {len(self.body)} bytes>"


class CachedHead:
    """A parsed head: the bytes before the digits of its Content-Length, and those after them up to the body."""

    __slots__ = ("after", "before", "head")

    def __init__(self, before: bytes, after: bytes, head: Head) -> None:
        self.before = before
        self.after = after
        self.head = head


def read_head(data: bytes, start: int, end: int) -> tuple[Head, int, CachedHead | None]:
    """Parse data[start:end], a head without its final CRLFCRLF; return it with the body's length in bytes or CHUNKED.

    Two heads of one client mostly differ only in the length. A head with a length is therefore cached as a CachedHead:
    the same bytes around other digits need not be parsed again.
    """
    found = _LENGTH.search(data, start, end) if end - start <= KNOWN_BYTES_MAX else None
    if found is None:
        return *parse_head(data[start:end]), None
    begin, stop = found.span(1)
    known = cached_head(data[start:begin], data[stop : end + 4])
    return known.head, int(data[begin:stop]), known


@lru_cache(KNOWN_MAX)
def cached_head(before: bytes, after: bytes) -> CachedHead:
    """Parse and cache a head around the digits of its length, on which nothing else depends."""
    return CachedHead(before, after, parse_head(before + b"0" + after[:-4])[0])


def parse_head(data: bytes) -> tuple[Head, int]:
    """Parse a complete head without its final CRLFCRLF; return it with the body's length. Raises CallError."""
    match = _HEAD.fullmatch(data)
    if match is None:
        raise malformed_request()
    method, origin_path, authority, path, query, minor, fields = match.groups()
    headers = _kept(fields)
    persistent = minor == b"1"
    host = _host(headers, needed=persistent)
    if authority is not None:
        host = _target_host(authority)
        headers[b"host"] = authority
    length = _body_length(headers, int(minor))
    connection = headers.get(b"connection", b"")
    if b"expect" in headers and headers[b"expect"].lower() != b"100-continue":
        raise invalid_request("header expect may only be 100-continue", close=True)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        error = unsupported_media_type()
        error.close = True
        raise error
    head = Head(
        method=method,
        path=origin_path or _absolute_path(method, path, query),
        query=query or b"",
        minor=int(minor),
        headers=headers,
        keep_alive=persistent and b"close" not in connection_names(connection),
        expects_continue=persistent and b"expect" in headers,
        host=host,
    )
    return head, length


def read_line(data: bytes, start: int) -> Head | None:
    """Parse the request line at data[start] of a rejected head: it determines the format of the error."""
    match = _FIRST_LINE.match(data, start)
    if match is None:
        return None
    method, origin_path, _, path, query, minor = match.groups()
    path = origin_path or _absolute_path(method, path, query)
    return Head(method, path, {}, query or b"", int(minor), keep_alive=False)


def check_partial_head(data: bytes | bytearray, start: int, size: int) -> None:
    """Raise if an incomplete head can no longer become valid.

    The head is the last `size` bytes of `data`; `start` is the position of the new bytes. Old bytes are not checked
    again, so that a slow client costs little. A client that uses another protocol (bare line feeds, TLS,
    HTTP/0.9) gets an error at once instead of at the header timeout.
    """
    begin = len(data) - size
    limit = begin + HEAD_BYTES_MAX
    fresh = max(begin, start - 1)
    line_end = data.find(b"\r\n", begin, limit)
    if line_end >= fresh and _FIRST_LINE.match(data, begin, limit) is None:
        raise malformed_request()
    if data[begin : begin + 1] == b"\n" or _BARE.search(data, fresh, limit) is not None:
        raise malformed_request()
    if size >= HEAD_BYTES_MAX:
        raise header_too_large()


def malformed_request() -> CallError:
    """400 for any violation of the grammar; it does not name the byte, and echoes nothing."""
    return invalid_request("the request is not well-formed HTTP/1.1", close=True)


def _kept(fields: bytes) -> dict[bytes, bytes]:
    """Return the KEPT headers by lower-case name, with values stripped of white space."""
    lines = fields.split(b"\r\n")
    if len(lines) > HEADERS_MAX + 1:
        raise header_too_large()
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in KEPT:
            value = value.strip(b" \t")
            headers[name] = _joined(name, headers[name], value) if name in headers else value
    if _DROPPED in headers.values():
        return {name: value for name, value in headers.items() if value != _DROPPED}
    return headers


def _joined(name: bytes, before: bytes, value: bytes) -> bytes:
    """Return the value of a repeated header. Raises CallError if two values would be ambiguous.

    A list of origins matches no allowed origin, so it counts as a page that is not allowed.
    """
    if name in LISTS:
        return before + b", " + value
    if name in HINTS:
        return _DROPPED
    if name not in FRAMING and before == value:
        return value
    if name == b"origin":
        return before + b", " + value
    raise invalid_request(f"header {name.decode()} is sent more than once", close=True)


def _target_host(authority: bytes) -> str:
    """Return the name or address in a target in absolute-form, which replaces Host (RFC 9112, 3.2.2)."""
    name = host_name(authority.decode("ascii"))
    if name is None:
        raise malformed_request()
    return name


def _absolute_path(method: bytes, path: bytes | None, query: bytes | None) -> bytes:
    """Return the path of a target in absolute-form; without a path it is `/`, or `*` with OPTIONS (RFC 9112, 3.2.4)."""
    return path or (b"*" if method == b"OPTIONS" and query is None else b"/")


def _host(headers: dict[bytes, bytes], *, needed: bool) -> str | None:
    """Return the name or address in Host. Raises CallError if it is malformed, or missing but required (HTTP/1.1)."""
    header = headers.get(b"host")
    if header is None:
        if needed:
            raise invalid_request("header host is missing", close=True)
        return None
    name = host_name(header.decode("latin-1"))
    if name is None:
        raise invalid_request("header host is not a host and port", close=True)
    return name


def connection_names(value: bytes) -> list[bytes]:
    """Return the members of a Connection header, lower-case: `close`, `keep-alive`, or names not to be forwarded."""
    return [name.strip(b" \t") for name in value.lower().split(b",")]


def _body_length(headers: dict[bytes, bytes], minor: int) -> int:
    """Apply RFC 9112, 6.3, without its leniencies: one Content-Length, or `chunked` alone on HTTP/1.1, never both."""
    length = headers.pop(b"content-length", None)
    coding = headers.pop(b"transfer-encoding", None)
    if coding is not None:
        if length is not None or minor == 0 or coding.lower() != b"chunked":
            raise invalid_request(
                "transfer-encoding may only be chunked, on HTTP/1.1, and without content-length", close=True
            )
        return CHUNKED
    if length is None:
        return 0
    if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX:
        raise invalid_request("header content-length is not a number", close=True)
    return int(length)

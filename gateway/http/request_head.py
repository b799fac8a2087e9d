"""The head of one HTTP/1.1 request: bytes -> Head and how its body is framed (RFC 9112, RFC 9110). Pure.

Promises: a head either matches one anchored grammar as a whole or raises a CallError that closes the connection.
There is no recovery, no folding, no decoding: what is accepted has one reading only. Targets are origin-form,
versions 1.0 and 1.1. Only headers in `KEPT` survive; every other one is checked for its grammar and forgotten, so
nothing can be passed on by accident. A kept header that may not be a list is refused when it comes twice.
A client says the same head again and again but for the length of the body: such heads are read once and remembered.
"""

from __future__ import annotations

import re
from functools import lru_cache

from gateway.errors import CallError, header_too_large, invalid_request, unsupported_media_type
from gateway.http.body import Body
from gateway.http.host_check import HostCheck, host_name

HEAD_BYTES_MAX = 64 << 10
"""With its closing empty line; above it 431."""
HEADERS_MAX = 100
"""Header lines in one head; above it 431."""
CHUNKED = -1
"""A body's length when Transfer-Encoding tells it."""
KNOWN_MAX, KNOWN_BYTES_MAX = 512, 2 << 10
"""So many heads of up to so many bytes are remembered as read: at most a few MiB."""

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
"""RFC 9110, 5.6.2."""
FIELD = rb"\r\n" + TOKEN + rb"++:[\t\x20-\x7e\x80-\xff]*+"
"""One header line with the line end before it: no space before the colon, no folding, no CR, LF, NUL or other
control.
"""
TRAILERS = re.compile(rb"(?:" + FIELD + rb")*+")
"""Header lines behind a body in chunks (RFC 9112, 7.1.2), without the empty line at their end."""

_LINE = rb"(?!CONNECT )(" + TOKEN + rb"{1,32}+) (/[!\"$->@-~]*+)(?:\?([!\"$-~]*+))? HTTP/1\.([01])"
_HEAD = re.compile(_LINE + rb"((?:" + FIELD + rb")*+)")
_FIRST_LINE = re.compile(_LINE + rb"\r\n")
_BARE = re.compile(rb"[^\r]\n|\r[^\n]|\0")
_LENGTH_DIGITS_MAX = 19
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,9})(?=\r\n|\Z)")
LENGTH_DIGITS_MAX = 9
"""Of a length in a head that is remembered; the body is far smaller."""

LISTS = frozenset(
    {
        b"accept", b"accept-language", b"access-control-request-headers", b"anthropic-beta", b"connection",
        b"openai-beta", b"prefer", b"sec-fetch-site", b"tracestate",
    }
)  # fmt: skip
"""Kept headers that RFC 9110, 5.3 lets come in several lines; they are joined by a comma. So is `sec-fetch-site`: it
matters on few ports, and the others need not refuse a request that repeats it."""
KEPT = LISTS | {
    b"access-control-request-method", b"anthropic-version", b"api-key", b"authorization", b"content-encoding",
    b"content-length", b"content-type", b"expect", b"host", b"origin", b"traceparent", b"transfer-encoding",
    b"user-agent", b"x-api-key", b"x-model", b"x-priority", b"x-request-id", b"x-stainless-read-timeout",
}  # fmt: skip
"""All headers that anything here reads, lower-case."""


class Head:
    """A request's head as the client sent it, nothing decoded. Shared between requests, so never changed.

    `headers` holds KEPT names only, without what frames the body.
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
        """False: the answer is the connection's last. HTTP/1.0 is answered close-delimited, so never kept."""
        self.expects_continue = expects_continue
        """The client waits for `100 Continue` before it sends the body (ignored on HTTP/1.0, RFC 9110, 10.1.1)."""
        self.host = host
        """The name or address in Host (`gateway.http.host_check.host_name`)."""
        self.passed: HostCheck | None = None
        """The last host check that it passed: the result holds until the settings change."""
        self.derived: object = None
        """A value that a caller derives from the head, once for all requests that share it."""


class Request:
    """One whole request."""

    __slots__ = ("body", "head")

    def __init__(self, head: Head, body: Body) -> None:
        self.head = head
        self.body = body

    def __repr__(self) -> str:
        return f"<Request {self.head.method!r} {self.head.path!r} 1.{self.head.minor} {len(self.body)} bytes>"


class CachedHead:
    """A head that was read: what stands before the digits of its length, and after them up to the body."""

    __slots__ = ("after", "before", "head")

    def __init__(self, before: bytes, after: bytes, head: Head) -> None:
        self.before = before
        self.after = after
        self.head = head


def read_head(data: bytes, start: int, end: int) -> tuple[Head, int, CachedHead | None]:
    """The head in data[start:end], without its closing CRLFCRLF, and its body's length in bytes or CHUNKED.

    What differs between two heads of one client is nearly always the length alone. A head with one can be Known; then
    the same bytes around other digits need not be read again.
    """
    found = _LENGTH.search(data, start, end) if end - start <= KNOWN_BYTES_MAX else None
    if found is None:
        return *parse_head(data[start:end]), None
    begin, stop = found.span(1)
    known = cached_head(data[start:begin], data[stop : end + 4])
    return known.head, int(data[begin:stop]), known


@lru_cache(KNOWN_MAX)
def cached_head(before: bytes, after: bytes) -> CachedHead:
    """Reads a head around the digits of its length, and remembers it: nothing else depends on them."""
    return CachedHead(before, after, parse_head(before + b"0" + after[:-4])[0])


def parse_head(data: bytes) -> tuple[Head, int]:
    """A whole head without its closing CRLFCRLF, and its body's length. Raises CallError."""
    match = _HEAD.fullmatch(data)
    if match is None:
        raise malformed_request()
    method, path, query, minor, fields = match.groups()
    headers = _kept(fields)
    persistent = minor == b"1"
    host = _host(headers, needed=persistent)
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
        path=path,
        query=query or b"",
        minor=int(minor),
        headers=headers,
        keep_alive=persistent and b"close" not in connection_names(connection),
        expects_continue=persistent and b"expect" in headers,
        host=host,
    )
    return head, length


def read_line(data: bytes, start: int) -> Head | None:
    """The request line that begins at data[start], of a head that was refused: it tells the dialect of the refusal."""
    match = _FIRST_LINE.match(data, start)
    return None if match is None else Head(match[1], match[2], {}, match[3] or b"", int(match[4]), keep_alive=False)


def check_partial_head(data: bytes | bytearray, start: int, size: int) -> None:
    """Raises when a head that is not complete cannot become one. `size` is its bytes so far (the last ones of data),
    `start` where the new ones begin: old ones are not looked at twice, so that a trickle stays cheap.

    Lets a client that speaks something else (bare line feeds, TLS, HTTP/0.9) know at once instead of at the header
    clock.
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
    """400 for everything that is not the grammar; it does not say which byte, and echoes nothing."""
    return invalid_request("the request is not well-formed HTTP/1.1", close=True)


def _kept(fields: bytes) -> dict[bytes, bytes]:
    """The headers we read, by lower-case name, without the white space around their values."""
    lines = fields.split(b"\r\n")
    if len(lines) > HEADERS_MAX + 1:
        raise header_too_large()
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in KEPT:
            value = value.strip(b" \t")
            if name in headers:
                if name not in LISTS:
                    raise invalid_request(f"header {name.decode()} is sent more than once", close=True)
                value = headers[name] + b", " + value
            headers[name] = value
    return headers


def _host(headers: dict[bytes, bytes], *, needed: bool) -> str | None:
    """The name or address in Host. Raises CallError where it is malformed, or missing but needed (HTTP/1.1)."""
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
    """The members of a Connection header, lower-case: `close`, `keep-alive`, or names that must not travel on."""
    return [name.strip(b" \t") for name in value.lower().split(b",")]


def _body_length(headers: dict[bytes, bytes], minor: int) -> int:
    """RFC 9112, 6.3, without its leniences: one Content-Length, or `chunked` alone on HTTP/1.1, never both."""
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

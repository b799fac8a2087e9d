"""Reads a multipart/form-data body (RFC 7578, RFC 2046), and edits its `model` part. Pure.

The body is a flat list of parts, each with a head of a strict grammar and one `name`. A boundary is recognized only at
the start of a line. Part names are words that no parser trims. The parts that the gateway reads (`model`, `stream`)
must not be repeated. File parts are not inspected, and stay byte for byte. Anything unusual (a preamble, a missing last
boundary, folded headers, encoded parts) is rejected.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.errors import CallError, invalid_request
from gateway.http.body_buffers import Body, ChunkedBody, Edit, Part, StreamingBody, copy_range
from gateway.http.body_scan import Scan
from gateway.http.request_head import FIELD, TOKEN
from gateway.request import forbidden_fields

PARTS_MAX = 1000
"""Parts of one form; above it 400."""
PART_HEAD_BYTES_MAX = 8 << 10
VALUE_BYTES_MAX = 4 << 10
"""Size of a part that the gateway reads; above it 400."""


class Form(NamedTuple):
    """The parts of a multipart body that the gateway reads."""

    body: Body
    model: str
    """The requested model: from the path, the form, or the header."""
    stream: bool
    start: int
    """The value of part `model` is body[start:end]; without such a part both are 0."""
    end: int
    boundary: bytes
    has_model: bool
    wants_usage: bool = False


_BOUNDARY = re.compile(
    rb'multipart/form-data[ \t]*;[ \t]*boundary=(?:"([0-9A-Za-z\'()+_,./:=? -]{0,69}[0-9A-Za-z\'()+_,./:=?-])"'
    rb"|([0-9A-Za-z'+_.-]{1,70}))(?:[ \t]*;[ \t]*charset=\"?utf-8\"?)?",
    re.IGNORECASE,
)
_PART_HEAD = re.compile(rb"(?:" + FIELD + rb")++")
_DISPOSITION = re.compile(
    rb'\r\ncontent-disposition:[ \t]*form-data[ \t]*;[ \t]*name="([A-Za-z0-9_.\[\]-]++)"'
    rb'(?:[ \t]*;[ \t]*filename\*?=(?:"(?:[^"\\]|\\.)*+"|' + TOKEN + rb"++))*+[ \t]*(?=\r\n|\Z)",
    re.IGNORECASE,
)
_ENCODED = re.compile(rb"\r\ncontent-transfer-encoding:[ \t]*(?!(?:7bit|8bit|binary)[ \t]*(?:\r|\Z))", re.IGNORECASE)
_FLAGS = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False, "": False}


def scan_multipart(pieces: ChunkedBody, content_type: bytes) -> None:
    """Start reading a large body while it arrives, if its boundary is valid."""
    try:
        pieces.scan = FormScan(pieces.parts, _boundary(content_type))
    except CallError:
        return  # read_multipart reports the error


def names_model(pieces: ChunkedBody) -> bool:
    """Return whether the part `model` has been read."""
    scan = pieces.scan
    return isinstance(scan, FormScan) and scan.error is None and any(name == b"model" for name, _, _ in scan.found)


def read_multipart(
    body: Body, content_type: bytes, *, path_model: str | None = None, header_model: str | None = None
) -> Form:
    """Find the parts `model` and `stream` (in a StreamingBody: so far). Raises CallError 400."""
    boundary = _boundary(content_type)
    spans: dict[bytes, tuple[int, int]] = {}
    for name, start, end in _parts(body, boundary) if isinstance(body, bytes) else _scanned(body, boundary):
        if name in (b"model", b"stream"):
            if name in spans:
                raise invalid_request(f"the form has more than one part {name.decode()}", param=name.decode())
            spans[name] = (start, end)
        else:
            forbidden_fields.check_part(name.decode())
    form_model = _value(body, spans[b"model"], "model") if b"model" in spans else None
    model = path_model or form_model or header_model
    if not model:
        raise invalid_request("name the model in the part model of the form", param="model")
    if header_model is not None and header_model != model:
        raise invalid_request("header x-model and the form name different models; send one of them", param="model")
    stream = _FLAGS.get(_value(body, spans[b"stream"], "stream")) if b"stream" in spans else False
    if stream is None:
        raise invalid_request("stream must be true or false", param="stream")
    start, end = spans.get(b"model", (0, 0))
    return Form(body, model, stream, start, end, boundary, b"model" in spans)


def edit_multipart(form: Form, *, model: str) -> Body:
    """Return the body with the value of `model` replaced (or the part inserted first, if the form has none)."""
    value, body = model.encode(), form.body
    if b"\r" in value or b"\n" in value:
        raise invalid_request("the model's name has a line end", param="model")
    if not form.has_model:
        head = b'--%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n' % (form.boundary, value)
        return head + body if isinstance(body, bytes) else body.edited([Edit(0, 0, head)])
    if _cut(body, form.start, form.end) == value:
        return body
    if not isinstance(body, bytes):
        return body.edited([Edit(form.start, form.end, value)])
    return b"".join((memoryview(body)[: form.start], value, memoryview(body)[form.end :]))


def _malformed() -> CallError:
    return invalid_request("the body is not well-formed multipart/form-data")


def _boundary(content_type: bytes) -> bytes:
    match = _BOUNDARY.fullmatch(content_type)
    if match is None:
        raise invalid_request("header content-type needs one boundary parameter")
    return match[1] or match[2]


def _parts(body: bytes, boundary: bytes) -> list[tuple[bytes, int, int]]:
    """Return name and span of every part's value. The body starts and ends with a boundary line."""
    mark = b"\r\n--" + boundary
    # Some parsers also accept a boundary after a bare line feed.
    if not body.startswith(mark[2:]) or body.count(mark) != body.count(mark[1:]):
        raise _malformed()
    at = len(mark) - 2
    parts: list[tuple[bytes, int, int]] = []
    while body[at : at + 2] != b"--":
        head_end = body.find(b"\r\n\r\n", at, at + PART_HEAD_BYTES_MAX)
        if head_end < 0 or len(parts) >= PARTS_MAX:
            raise _malformed()
        start = head_end + 4
        end = body.find(mark, start)
        # Parsers differ on a boundary inside a head, or right after it without a value in between.
        if end < 0 or body.find(mark, at, start + len(mark) - 2) >= 0:
            raise _malformed()
        parts.append((_part_name(body, at, head_end), start, end))
        at = end + len(mark)
    if body[at + 2 :] not in (b"", b"\r\n"):
        raise _malformed()
    return parts


_WINDOW_BYTES = 64 << 10
_BEGIN, _AFTER_MARK, _IN_VALUE, _TAIL = range(4)


class FormScan(Scan):
    """The incremental scan for the parts of a large body."""

    __slots__ = ("_line", "_name", "_start", "_state", "found")

    def __init__(self, parts: list[Part], boundary: bytes) -> None:
        super().__init__(parts, PART_HEAD_BYTES_MAX + 256)
        self.found: list[tuple[bytes, int, int]] = []
        self._line = b"\n--" + boundary
        self._name = b""
        self._start = 0
        """Start of the part's value."""
        self._state = _BEGIN

    def _wanted(self) -> int:
        return _WINDOW_BYTES if self._state == _IN_VALUE else self._token_bytes_max

    def _read(self, window: bytes) -> int:
        if self._state == _IN_VALUE:
            return self._value(window)
        if self._state == _AFTER_MARK:
            return self._head(window)
        if self._state == _TAIL:
            return 0  # `_ended` checks that at most a line end follows
        mark = self._line[1:]
        if not window.startswith(mark):
            if len(window) < len(mark):
                return 0
            raise _malformed()
        self._state = _AFTER_MARK
        return len(mark)

    def _head(self, window: bytes) -> int:
        """Read what follows a boundary: the end, or a part's head."""
        if len(window) < 2:
            return 0
        if window[:2] == b"--":
            self._state = _TAIL
            return 2
        end = window.find(b"\r\n\r\n", 0, PART_HEAD_BYTES_MAX)
        if end < 0 or len(self.found) >= PARTS_MAX:
            if len(window) < PART_HEAD_BYTES_MAX and len(self.found) < PARTS_MAX:
                return 0
            raise _malformed()
        start = end + 4
        if len(window) < start + len(self._line):
            return 0
        if window.find(self._line, 0, start + len(self._line) - 1) >= 0:
            raise _malformed()
        self._name = _part_name(window, 0, end)
        self._start = self.offset + start
        self._state = _IN_VALUE
        return start

    def _value(self, window: bytes) -> int:
        """Scan to the next boundary. The last bytes, which may be a CR and the start of a boundary, are scanned again
        together with further ones.
        """
        at = window.find(self._line)
        if at < 0:
            return max(0, len(window) - len(self._line))
        if at == 0 or window[at - 1 : at] != b"\r":
            raise _malformed()
        self.found.append((self._name, self._start, self.offset + at - 1))
        self._state = _AFTER_MARK
        self._units -= 2000
        return at + len(self._line)

    def _ended(self) -> None:
        if self._state != _TAIL or copy_range(self.parts, self.offset, min(self.size, self.offset + 3)) not in (
            b"",
            b"\r\n",
        ):
            raise _malformed()

    def _refusal(self) -> CallError:
        return _malformed()


def _part_name(body: bytes, at: int, end: int) -> bytes:
    """Return the name in a part's head, body[at:end]; exactly one disposition, with one name."""
    if _PART_HEAD.fullmatch(body, at, end) is None:
        raise _malformed()
    head = body[at:end]
    names = _DISPOSITION.findall(head)
    if len(names) != 1 or head.lower().count(b"\r\ncontent-disposition:") != 1 or _ENCODED.search(head):
        raise _malformed()
    return bytes(names[0])


def _scanned(body: ChunkedBody | StreamingBody, boundary: bytes) -> list[tuple[bytes, int, int]]:
    if isinstance(body, StreamingBody):
        scan = body.pieces.scan
        return scan.found if isinstance(scan, FormScan) else []
    found = body.scan = body.scan if isinstance(body.scan, FormScan) else FormScan(body.parts, boundary)
    found.check(len(body))
    return found.found


def _cut(body: Body, start: int, end: int) -> bytes:
    return body[start:end] if isinstance(body, bytes) else copy_range(body.parts, start, end)


def _value(body: Body, span: tuple[int, int], name: str) -> str:
    start, end = span
    if end - start > VALUE_BYTES_MAX:
        raise invalid_request(f"part {name} is too long", param=name)
    try:
        value = _cut(body, start, end).decode()
    except UnicodeDecodeError:
        raise invalid_request(f"part {name} is not UTF-8", param=name) from None
    if "\r" in value or "\n" in value:
        raise invalid_request(f"part {name} has a line end", param=name)
    return value

"""Reads a multipart/form-data body (RFC 7578, RFC 2046), and edits its `model` part. Pure.

The body is a flat list of parts, each with one disposition (RFC 2183) and one `name`. A boundary is recognized only at
the start of a line. The parts that the gateway reads (`model`, `stream`) must not be repeated. File parts are not
inspected, and stay byte for byte. Bytes before the first boundary and after the last one are not forwarded.

An engine must not find a part that the gateway did not see. Therefore a part is rejected if another parser could read a
name in its head that the gateway reads or forbids: by trimming the name, by decoding it, or by splitting a file name.
A missing last boundary, folded headers and encoded parts are rejected, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

from gateway.errors import CallError, invalid_request
from gateway.http.body_buffers import Body, ChunkedBody, Edit, Part, StreamingBody, copy_range
from gateway.http.body_scan import Scan
from gateway.http.request_head import FIELD, TOKEN
from gateway.policy.request_policy import Policy
from gateway.request import forbidden_fields, media_types

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
    first: int
    """Start of the first boundary."""
    after: int
    """End of the last boundary; in a StreamingBody its length."""
    wants_usage: bool = False
    parts: Sequence[tuple[bytes, int, int]] = ()
    """Name and span of the value of each part."""


_PART_HEAD = re.compile(rb"(?:" + FIELD + rb")++")
_DISPOSITION = re.compile(rb"\r\ncontent-disposition:[ \t]*+form-data[ \t]*+(?=;|\r\n|\Z)([^\r]*+)", re.IGNORECASE)
_USUAL = re.compile(
    rb'[ \t]*;[ \t]*name="([A-Za-z0-9_.\[\]-]++)"'
    rb'(?:[ \t]*;[ \t]*filename\*?=(?:"[^"\\;]*+"|' + TOKEN + rb"++))*[ \t]*",
    re.IGNORECASE,
)
"""The parameters as most clients write them."""
_WORD = re.compile(rb"[A-Za-z0-9_.\[\]-]++")
"""A name that no parser trims or decodes."""
_EXTENDED = re.compile(rb"utf-8'[A-Za-z0-9-]*+'([!#$&+.^_`|~%A-Za-z0-9-]*+)", re.IGNORECASE)
"""An extended value (RFC 8187, 3.2)."""
_NAMED = re.compile(rb";[ \t]*\"?name\*?[ \t]*=", re.IGNORECASE)
"""In a quoted file name: a name for parsers that split at each semicolon."""
_ENCODED = re.compile(rb"\r\ncontent-transfer-encoding:[ \t]*+(?!(?:7bit|8bit|binary)[ \t]*(?:\r|\Z))", re.IGNORECASE)
_TEXT = msgspec.json.Decoder(str)
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
    body: Body, content_type: bytes, *, path_model: str | None = None, header_model: str | None = None,
    default_model: str = "",
) -> Form:  # fmt: skip
    """Find the parts `model` and `stream` (in a StreamingBody: so far). Raises CallError 400."""
    boundary = _boundary(content_type)
    spans: dict[bytes, tuple[int, int]] = {}
    parts, first, after = _parts(body, boundary) if isinstance(body, bytes) else _scanned(body, boundary)
    for name, start, end in parts:
        if name in (b"model", b"stream"):
            if name in spans:
                raise invalid_request(f"the form has more than one part {name.decode()}; send one", param=name.decode())
            spans[name] = (start, end)
        else:
            forbidden_fields.check_part(name.decode("utf-8", "replace"))
    form_model = _value(body, spans[b"model"], "model") if b"model" in spans else None
    model = path_model or form_model or header_model or default_model
    if not model:
        raise invalid_request("name the model in the part model of the form", param="model")
    if header_model is not None and header_model != model:
        raise invalid_request("header x-model and the form name different models; send one of them", param="model")
    stream = _FLAGS.get(_value(body, spans[b"stream"], "stream")) if b"stream" in spans else False
    if stream is None:
        raise invalid_request("stream must be true or false", param="stream")
    start, end = spans.get(b"model", (0, 0))
    return Form(body, model, stream, start, end, boundary, b"model" in spans, first, after, parts=parts)


def edit_multipart(form: Form, *, model: str, engine_path: bytes = b"", policy: Policy | None = None) -> Body:
    """Return the body with the value of `model` replaced (or the part inserted first, if the form has none), and with
    the changes of a policy.
    """
    value, body = model.encode(), form.body
    if b"\r" in value or b"\n" in value:
        raise invalid_request("the model's name has a line end", param="model")
    size = len(body)
    edits = [Edit(0, form.first, b"")] if form.first else []
    if not form.has_model:
        head = b'--%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n' % (form.boundary, value)
        edits = [Edit(0, form.first, head)]
    elif _cut(body, form.start, form.end) != value:
        edits.append(Edit(form.start, form.end, value))
    if policy is not None:
        edits = _with_policy(form, policy.edits(engine_path, *_policy_members(form, policy)), edits)
    if size - form.after > _LINE_END_BYTES:
        edits.append(Edit(form.after, size, b"\r\n"))
    if not edits:
        return body
    if not isinstance(body, bytes):
        return body.edited(edits)
    pieces, at, view = list[bytes | memoryview](), 0, memoryview(body)
    for edit in edits:
        pieces += (view[at : edit.start], edit.text)
        at = edit.end
    pieces.append(view[at:])
    return b"".join(pieces)


def _policy_members(form: Form, policy: Policy) -> tuple[set[str], dict[str, Raw]]:
    """Return the names of all parts, and the values of those that the policy may change. Raises CallError 400."""
    names, values = set[str](), dict[str, Raw]()
    for raw, start, end in form.parts:
        name = raw.decode("utf-8", "replace")
        if name in policy.members:
            if name in names and not name.endswith("[]"):
                raise invalid_request(f"the form has more than one part {name}; send one", param=name)
            values[name] = Raw(_cut(form.body, start, end) if end - start <= VALUE_BYTES_MAX else b"")
        elif forbidden_fields.reduce_to_letters(raw) in policy.letters:
            raise _ambiguous()
        names.add(name)
    return names, values


def _with_policy(form: Form, changes: dict[str, bytes | None], edits: list[Edit]) -> list[Edit]:
    """Return the edits together with those that set the parts `changes`, or remove them (None)."""
    out, added, at = [edit for edit in edits if edit.start >= form.first], list[bytes](), form.first
    for raw, _, end in form.parts:
        name = raw.decode("utf-8", "replace")
        if name in changes:  # a changed part is inserted again
            out.append(Edit(at, end + _LINE_END_BYTES, b""))
        at = end + _LINE_END_BYTES
    for name, value in changes.items():
        if value is not None:
            text = _TEXT.decode(value).encode() if value.startswith(b'"') else value
            if b"--" + form.boundary in text:
                raise _malformed()
            added.append(
                b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
                % (form.boundary, name.encode(), text)
            )
    before = next((edit.text for edit in edits if edit.start < form.first), b"")
    head = Edit(0, form.first, before + b"".join(added))
    return [*([head] if form.first or added else ()), *sorted(out)]


def _malformed() -> CallError:
    return invalid_request("the body is not well-formed multipart/form-data")


def _boundary(content_type: bytes) -> bytes:
    boundary = media_types.parse_boundary(content_type)
    if boundary is None:
        raise invalid_request("header content-type needs one boundary parameter")
    return boundary


PREAMBLE_BYTES_MAX = PART_HEAD_BYTES_MAX
"""Bytes up to the end of the first boundary; above it 400."""
_PADDING_BYTES_MAX = 64
_PADDING = re.compile(rb"[ \t]{0,64}+")
"""White space that may follow a boundary (RFC 2046, 5.1.1)."""
_LINE_END_BYTES = 2


def _parts(body: bytes, boundary: bytes) -> tuple[list[tuple[bytes, int, int]], int, int]:
    """Return name and span of every part's value, the start of the first boundary, and the end of the last one."""
    mark = b"\r\n--" + boundary
    first = 0 if body.startswith(mark[2:]) else body.find(mark, 0, PREAMBLE_BYTES_MAX) + 2
    # Some parsers also accept a boundary after a bare line feed.
    if first == 1 or body.count(mark) != body.count(mark[1:]):
        raise _malformed()
    at = first + len(mark) - 2
    parts: list[tuple[bytes, int, int]] = []
    while body[at : at + 2] != b"--":
        head_at = _skip_padding(body, at)
        head_end = body.find(b"\r\n\r\n", head_at, at + PART_HEAD_BYTES_MAX)
        if head_end < 0 or len(parts) >= PARTS_MAX:
            raise _malformed()
        start = head_end + 4
        end = body.find(mark, start)
        # Parsers differ on a boundary inside a head, or right after it without a value in between.
        if end < 0 or body.find(mark, at, start + len(mark) - 2) >= 0:
            raise _malformed()
        parts.append((_part_name(body, head_at, head_end), start, end))
        at = end + len(mark)
    after = at + 2
    rest = _skip_padding(body, after)
    if not (rest == len(body) or body.startswith(b"\r\n", rest)) or body.find(mark, rest) >= 0:
        raise _malformed()
    return parts, first, after


def _skip_padding(body: bytes, at: int) -> int:
    match = _PADDING.match(body, at)
    return at if match is None else match.end()


_WINDOW_BYTES = 64 << 10
_BEGIN, _AFTER_MARK, _IN_VALUE, _TAIL, _EPILOGUE = range(5)


class FormScan(Scan):
    """The incremental scan for the parts of a large body."""

    __slots__ = ("_line", "_name", "_start", "_state", "after", "first", "found")

    def __init__(self, parts: list[Part], boundary: bytes) -> None:
        super().__init__(parts, PART_HEAD_BYTES_MAX + 256)
        self.found: list[tuple[bytes, int, int]] = []
        self._line = b"\n--" + boundary
        self._name = b""
        self._start = 0
        """Start of the part's value."""
        self._state = _BEGIN
        self.first = self.after = 0
        """See Form."""

    def _wanted(self) -> int:
        return _WINDOW_BYTES if self._state in (_IN_VALUE, _EPILOGUE) else self._token_bytes_max

    def _read(self, window: bytes) -> int:
        if self._state == _IN_VALUE:
            return self._value(window)
        if self._state == _AFTER_MARK:
            return self._head(window)
        if self._state == _TAIL:
            return self._tail(window)
        if self._state == _EPILOGUE:
            if window.find(self._line) >= 0:
                raise _malformed()
            return max(0, len(window) - len(self._line))
        return self._begin(window)

    def _begin(self, window: bytes) -> int:
        """Find the first boundary."""
        mark, line = self._line[1:], self._line
        at = 0
        if not window.startswith(mark):
            at = window.find(line, 0, PREAMBLE_BYTES_MAX) + 1
            if at == 0:
                if len(window) < PREAMBLE_BYTES_MAX:
                    return 0
                raise _malformed()
            if not window[:at].endswith(b"\r\n"):
                raise _malformed()
        self.first = self.offset + at
        self._state = _AFTER_MARK
        return at + len(mark)

    def _tail(self, window: bytes) -> int:
        """Read what follows the last boundary."""
        at = _skip_padding(window, 0)
        if window.startswith(b"\r\n", at):
            self._state = _EPILOGUE
            return at + 1  # the line feed may begin a boundary
        if window[at:] not in (b"", b"\r"):
            raise _malformed()
        return 0

    def _head(self, window: bytes) -> int:
        """Read what follows a boundary: the end, or a part's head."""
        if len(window) < 2:
            return 0
        if window[:2] == b"--":
            self._state = _TAIL
            self.after = self.offset + 2
            return 2
        at = _skip_padding(window, 0)
        end = window.find(b"\r\n\r\n", at, PART_HEAD_BYTES_MAX)
        if end < 0 or len(self.found) >= PARTS_MAX:
            if len(window) < PART_HEAD_BYTES_MAX and len(self.found) < PARTS_MAX:
                return 0
            raise _malformed()
        start = end + 4
        if len(window) < start + len(self._line):
            return 0
        if window.find(self._line, 0, start + len(self._line) - 1) >= 0:
            raise _malformed()
        self._name = _part_name(window, at, end)
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
        rest = copy_range(self.parts, self.offset, min(self.size, self.offset + _PADDING_BYTES_MAX + 1))
        if self._state != _EPILOGUE and not (self._state == _TAIL and _PADDING.fullmatch(rest) is not None):
            raise _malformed()

    def _refusal(self) -> CallError:
        return _malformed()


def _part_name(body: bytes, at: int, end: int) -> bytes:
    """Return the name in a part's head, body[at:end]; exactly one disposition, with one name."""
    if _PART_HEAD.fullmatch(body, at, end) is None:
        raise _malformed()
    head = body[at:end]
    found = _DISPOSITION.findall(head)
    if len(found) != 1 or head.lower().count(b"\r\ncontent-disposition:") != 1 or _ENCODED.search(head):
        raise _malformed()
    parameters: bytes = found[0]
    match = _USUAL.fullmatch(parameters)
    return _unusual_name(parameters) if match is None else match[1]


def _unusual_name(parameters: bytes) -> bytes:
    """Return the name in a disposition that is not of the usual form."""
    found = media_types.parse_parameters(parameters, 0)
    if found is None:
        raise _malformed()
    name = found.get(b"name")
    extended = found.pop(b"name*", None)
    if name is not None and extended is not None:
        raise _ambiguous()
    if extended is not None:  # as aiohttp writes a name that is not ASCII
        match = _EXTENDED.fullmatch(extended)
        name = b"" if match is None else forbidden_fields.unescape(match[1])
        if match is None or forbidden_fields.resembles_known(name):
            raise _ambiguous()
    if name is None:
        raise _malformed()
    before = True
    for parameter, value in found.items():
        if parameter.startswith(b"name*") or _NAMED.search(value) is not None:
            raise _ambiguous()
        if parameter == b"name":
            before = False
        elif before and forbidden_fields.resembles_known(value):
            raise _ambiguous()  # some parsers search for `name=`, which is also a part of `filename=`
    if _WORD.fullmatch(name) is None and forbidden_fields.resembles_known(name):
        raise _ambiguous()
    return name


def _ambiguous() -> CallError:
    return invalid_request('parsers differ on the name of a part of the form; write name="NAME" first, without escapes')


def _scanned(body: ChunkedBody | StreamingBody, boundary: bytes) -> tuple[list[tuple[bytes, int, int]], int, int]:
    if isinstance(body, StreamingBody):
        scan = body.pieces.scan
        return (scan.found, scan.first, len(body)) if isinstance(scan, FormScan) else ([], 0, len(body))
    found = body.scan = body.scan if isinstance(body.scan, FormScan) else FormScan(body.parts, boundary)
    found.check(len(body))
    return found.found, found.first, found.after


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
    for line_end in ("\r\n", "\n", "\r"):
        if value.endswith(line_end):  # as `curl -F model=@FILE` and `<FILE` send it
            value = value[: -len(line_end)]
            break
    if "\r" in value or "\n" in value:
        raise invalid_request(f"part {name} has a line end", param=name)
    return value

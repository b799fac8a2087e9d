"""Incremental scan of a large JSON object: its top-level members, and the positions of those to edit. Pure.

An accepted body is unambiguous: all of it is UTF-8; the top level is strict JSON without repeated names; strings in
values are strict (control characters, escapes), brackets match by kind, and only characters of JSON occur between
strings. So no comment, other quote or escape can hide a bracket or a quote from another parser. Not checked inside
brackets: the positions of commas, colons, words and numbers; the engine parses these and rejects errors. Names, numbers
and nesting have tighter limits than in a small body.
"""

from __future__ import annotations

import codecs
import re
from array import array
from itertools import accumulate

import msgspec

from gateway.errors import CallError, invalid_request
from gateway.http.body_buffers import Edit, Part, copy_range
from gateway.http.body_scan import WINDOW_BYTES, Scan
from gateway.request.forbidden_fields import READ, SLOTS, STATE

MEMBERS_MAX = 1000
"""Top-level members of one body; above it 400."""
NESTING_MAX = 200
"""Nesting depth within one member of a large body; above it 400."""
VALUE_BYTES_MAX = 4 << 10
"""Size of a member that the gateway reads; above it 400."""
TOKEN_BYTES_MAX = 2 << 10
"""Size of a top-level name, number or word; above it 400."""
_FIRST_BYTES, _LAST_BYTES = 256, 64
"""Window sizes at the start of a value, and near its end."""
_BRACKETS = 2 << 10
"""A window with more brackets is reduced to twice this number of bytes."""

_START, _FIRST, _NAME, _COLON, _VALUE, _COMMA, _END, _STRING, _NEST = range(9)

_WS = re.compile(rb"[ \t\r\n]*+")
_ESCAPE = rb'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})'
_KEY = re.compile(rb'"(?:[^"\\\x00-\x1f]++|' + _ESCAPE + rb')*+"')
_SCALAR = re.compile(rb"(?:true|false|null|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)(?=[ \t\r\n,}])")
_BAD_ESCAPE = re.compile(rb'\\(?!["/bfnrt]|u[0-9A-Fa-f]{4})')
_UNFINISHED = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,3})?")
_MARKS = re.compile(rb'["\[\]{}]')
_RUNS = re.compile(rb"[\[{]+|[\]}]+")
_CONTROLS = bytes(range(32))
_BRACKETS_ONLY = bytes(byte for byte in range(256) if byte not in b"[]{}")
_BETWEEN = b"[]{},: \t\r\n0123456789+-.eEtrufalsn"
"""All characters of strict JSON outside of strings."""
_OPENING = b"[{"
_RISE = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_CLOSING = bytes.maketrans(b"[{", b"]}")
_TEXT = msgspec.json.Decoder(str)


_RECORDED = READ | SLOTS | STATE
_NONE = frozenset[str]()
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Member:
    """Position of a member that is read or edited."""

    __slots__ = ("after", "before", "end", "start")

    def __init__(self, before: int, start: int) -> None:
        self.before = before
        """Start of its comma, or of its name if it is the first."""
        self.start = start
        """Start of its value."""
        self.end = self.after = -1
        """End of its value (`end`), and of the following comma (`after`); -1 if there is none."""


class JsonScan(Scan):
    """The scan of a JSON object."""

    __slots__ = (
        "_before", "_brace", "_checked", "_decoder", "_first", "_inside", "_member", "_name", "_near",
        "_pending", "_size", "_stack", "_state", "begin", "members", "names", "recorded", "values",
    )  # fmt: skip

    def __init__(self, parts: list[Part], watched: frozenset[str] = _NONE) -> None:
        super().__init__(parts, TOKEN_BYTES_MAX)
        self.recorded = _RECORDED | watched if watched else _RECORDED
        """Members whose values and positions are kept."""
        self.values: dict[str, bytes] = {}
        """The members of READ and SLOTS as written; for `cache_salt` only its presence, for SLOTS the first bytes.
        Other members of `recorded` as written; empty if they are long.
        """
        self.members: dict[str, Member] = {}
        """Their positions."""
        self.names: set[str] = set()
        """All top-level names so far."""
        self.begin = 0
        """Where the object may begin: after a byte order mark, which is not forwarded."""
        self._state = _START
        self._name = ""
        self._member: Member | None = None
        """The most recent member of `recorded`, until the comma after it has been read."""
        self._before = self._brace = self._first = -1
        """Start of the current member, end of the object, and start of its first name."""
        self._stack = b""
        """Open brackets within the member."""
        self._inside = False
        """Within a string inside brackets."""
        self._size, self._near = _FIRST_BYTES, False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._checked, self._pending = 0, False
        """Bytes checked as UTF-8; whether the last character is incomplete."""

    def splices(self, edits: dict[str, bytes | None]) -> list[Edit]:
        """Return the edits that set members of `recorded`, or remove them (None)."""
        found = [Edit(0, self.begin, b"")] if self.begin else []
        added: list[bytes] = []
        removed: list[Member] = []
        for name, value in edits.items():
            member = self.members.get(name)
            if member is None:
                if value is not None:
                    added.append(b'"%b":%b' % (name.encode(), value))
            elif value is not None:
                found.append(Edit(member.start, member.end, value))
            else:
                removed.append(member)
        found += self._removals(removed)
        found.sort()
        if added:
            found.append(Edit(self._brace, self._brace, b"," * (len(self.names) > len(removed)) + b",".join(added)))
        return found

    def _removals(self, removed: list[Member]) -> list[Edit]:
        """Return the edits that remove members, each with its comma; at the beginning with the following one."""
        removed.sort(key=_begin_of)
        begin, end = self._first, -1
        out: list[Edit] = []
        for member in removed:
            if member.before == begin:  # the first member, or one that follows removed ones at the beginning
                begin, end = member.after - 1, member.after if member.after > 0 else member.end
            else:
                out.append(Edit(member.before, member.end, b""))
        return [Edit(self._first, end, b""), *out] if end >= 0 else out

    def _wanted(self) -> int:
        return self._size if self._state == _NEST else TOKEN_BYTES_MAX if self._state < _STRING else WINDOW_BYTES

    def _read(self, window: bytes) -> int:
        self._check_utf8(window)
        if self._state == _NEST:
            return self._nest(window)
        if self._state == _STRING:
            return self._string(window)
        return self._outer(window)

    def _ended(self) -> None:
        if self._state != _END or self._pending:
            raise _invalid()

    def _refusal(self) -> CallError:
        return _invalid()

    def _check_utf8(self, window: bytes) -> None:
        known = self._checked - self.offset
        if known >= len(window):
            return
        fresh = window[known:]
        self._checked += len(fresh)
        if self._pending or not fresh.isascii():
            self._units -= 4 * len(fresh)
            try:
                self._decoder.decode(fresh)
            except UnicodeDecodeError:
                raise _invalid() from None
            self._pending = bool(self._decoder.getstate()[0])

    # --- the top level -----------------------------------------------------------------------------------------------

    def _outer(self, window: bytes) -> int:
        at = 0
        while self._state < _STRING:
            space = _WS.match(window, at)
            if space is not None:
                at = space.end()
            if at == len(window):
                break
            step = self._token(window, at)
            self._units -= 2000
            if step < 0:
                break
            at = step
        return at

    def _token(self, window: bytes, at: int) -> int:
        """Return the end of the token at `at`; -1 while it is incomplete."""
        byte, state = window[at : at + 1], self._state
        if state in (_FIRST, _NAME) and byte == b'"':
            return self._key(window, at)
        if state == _VALUE:
            return self._begin(window, at)
        if state == _START and byte == b"\xef" and self.offset + at == 0:
            mark = window[:3]
            if mark != _BYTE_ORDER_MARK:
                if len(mark) < 3:
                    return -1
                raise invalid_request("the body must be one JSON object")
            self.begin = 3
            return 3
        if state == _START and byte == b"{":
            self._state = _FIRST
        elif state == _COLON and byte == b":":
            self._state = _VALUE
        elif state == _COMMA and byte == b",":
            self._state = _NAME
            if self._member is not None:
                self._member.after = self.offset + at + 1
                self._member = None
            self._before = self.offset + at
        elif state in (_COMMA, _FIRST) and byte == b"}":
            self._state = _END
            self._brace = self.offset + at
        elif state == _START:
            raise invalid_request("the body must be one JSON object")
        else:
            raise _invalid()
        return at + 1

    def _key(self, window: bytes, at: int) -> int:
        match = _KEY.match(window, at)
        if match is None:
            return -1
        key = match[0]
        try:
            name = self._name = _TEXT.decode(key) if b"\\" in key else key[1:-1].decode()
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _invalid() from None
        if name in self.names:
            raise invalid_request("a top-level member of the body occurs more than once; send it once")
        if len(self.names) == MEMBERS_MAX:
            raise invalid_request(f"the body has more than {MEMBERS_MAX} top-level members")
        if self._state == _FIRST:
            self._before = self._first = self.offset + at
        self.names.add(name)
        self._state = _COLON
        return match.end()

    def _begin(self, window: bytes, at: int) -> int:
        """Start a value."""
        byte = window[at : at + 1]
        end = at + 1
        if byte == b'"':
            state = _STRING
        elif byte in b"[{":
            state = _NEST
            self._stack, self._inside = byte, False
            self._size, self._near = _FIRST_BYTES, False
        else:
            match = _SCALAR.match(window, at)
            if match is None:
                return -1
            state, end = _COMMA, match.end()
        if self._name in self.recorded:
            self.members[self._name] = self._member = Member(self._before, self.offset + at)
        self._state = state
        if state == _COMMA:
            self._end(self.offset + end)
        return end

    def _end(self, end: int) -> None:
        """End a value."""
        self._state = _COMMA
        member, name = self._member, self._name
        if member is None or name not in self.recorded:
            return
        member.end = end
        if name == "cache_salt":
            self.values[name] = b"null"
        elif name in SLOTS:
            self.values[name] = copy_range(self.parts, member.start, min(end, member.start + 3))
        elif end - member.start > VALUE_BYTES_MAX:
            if name in READ:
                raise invalid_request(f"{name} is too long", param=name)
            self.values[name] = b""
        else:
            self.values[name] = copy_range(self.parts, member.start, end)

    # --- values ------------------------------------------------------------------------------------------------------

    def _blank(self, window: bytes) -> bytes:
        """Blank escaped quotes and backslashes, up to an incomplete escape. Raises CallError for an invalid escape."""
        escapes = window.count(b"\\")
        if escapes == 0:
            return window
        self._units -= 30 * escapes + len(window)
        window = window.replace(b"\\\\", b"__")
        last = window.rfind(b"\\", max(0, len(window) - 5))
        if last >= 0 and _UNFINISHED.fullmatch(window, last) is not None:
            window = window[:last]
        if _BAD_ESCAPE.search(window) is not None:
            raise _invalid()
        return window.replace(b'\\"', b"__")

    def _string(self, window: bytes) -> int:
        """Scan within a string that is a top-level value."""
        window = self._blank(window)
        quote = window.find(b'"')
        end = len(window) if quote < 0 else quote
        text = window[:end]
        if len(text.translate(None, _CONTROLS)) != end:
            raise _invalid()
        if quote >= 0:
            self._end(self.offset + quote + 1)
            end += 1
        return end

    def _nest(self, window: bytes) -> int:
        """Scan a nested value window by window. Only the last window is searched for the end of the value."""
        blank = self._blank(window)
        size, inside = len(blank), int(self._inside)
        if size == 0:
            return 0
        stretches = blank.split(b'"')
        self._units -= 40 * len(stretches) + 2 * size + 5000
        between = b"".join(stretches[inside::2])
        brackets = between.translate(None, _BRACKETS_ONLY)
        if len(brackets) > _BRACKETS and size > 2 * _BRACKETS:
            self._size = 2 * _BRACKETS
            return self._nest(window[: self._size])
        closing, opening, height = self._balance(brackets)
        if len(closing) >= len(self._stack):
            self._near = True
            if size > _LAST_BYTES:
                self._size = max(size // 2, _LAST_BYTES)
                return self._nest(window[: self._size])
            return self._last(blank)
        text = b"".join(stretches[1 - inside :: 2])
        if between.translate(None, _BETWEEN) or len(text.translate(None, _CONTROLS)) != len(text):
            raise _invalid()
        depth = len(self._stack)
        if depth + height > NESTING_MAX and depth + _peak(brackets) > NESTING_MAX:
            raise invalid_request("the body is nested too deeply; nest fewer lists and objects")
        kept = depth - len(closing)
        if self._stack[kept:].translate(_CLOSING)[::-1] != closing:
            raise _invalid()
        self._stack = self._stack[:kept] + opening
        if len(stretches) & 1 == 0:
            self._inside = not self._inside
        if not self._near:
            self._size = min(2 * self._size, WINDOW_BYTES)
        return size

    def _balance(self, brackets: bytes) -> tuple[bytes, bytes, int]:
        """Cancel matching brackets: return those closing earlier ones, those left open, and a bound on the depth.

        Adjacent pairs are removed until a pass removes less than an eighth of the brackets. Then each run of
        opening or closing brackets is processed as a whole.
        """
        passes, size = 0, 2 * len(brackets)
        while 8 * len(brackets) < 7 * size:
            size = len(brackets)
            brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
            self._units -= 8 * size
            passes += 1
        self._units -= 60 * len(brackets)
        closing, opening, highest = b"", bytearray(), 0
        for match in _RUNS.finditer(brackets):
            run = match[0]
            if run[0] in _OPENING:
                opening += run
                highest = max(highest, len(opening))
                continue
            count = min(len(run), len(opening))
            kept = len(opening) - count
            if opening[kept:].translate(_CLOSING)[::-1] != run[:count]:
                raise _invalid()
            del opening[kept:]
            closing += run[count:]
        return closing, bytes(opening), passes + highest

    def _last(self, window: bytes) -> int:
        """Find the end of the value, which is in this short (blanked) window."""
        depth, inside = len(self._stack), self._inside
        for match in _MARKS.finditer(window):
            byte = match[0]
            if byte == b'"':
                inside = not inside
            elif not inside:
                depth += 1 if byte in b"[{" else -1
            if depth == 0:
                end = match.start()
                if end:
                    self._nest(window[:end])
                if self._stack.translate(_CLOSING) != byte:
                    raise _invalid()
                self._end(self.offset + end + 1)
                return end + 1
        raise _invalid()


def _invalid() -> CallError:
    return invalid_request("the body is not valid JSON in UTF-8")


def _begin_of(member: Member) -> int:
    return member.before


def _peak(brackets: bytes) -> int:
    """Return the maximum depth above the start."""
    return max(accumulate(array("b", brackets.translate(_RISE))))

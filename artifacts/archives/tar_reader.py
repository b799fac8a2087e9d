"""Streaming tar parser: pieces of bytes in, members out, one after another. Pure.

Supports POSIX ustar, GNU long names and pax (IEEE Std 1003.1, pax, "ustar Interchange Format"). Anything that two
readers could interpret differently is rejected: contradictory sizes, repeated names, sizes of members without content,
fields of GNU incremental archives. Modes, owners and times are ignored, so setuid bits have no effect.
`artifacts.archives.member_filter` decides which members are extracted. Nothing is extracted with Python's `tarfile`,
since its filters have been bypassed repeatedly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from artifacts.oci.descriptor import BLOB_BYTES_MAX

BLOCK_BYTES = 512
ENTRIES_MAX = 200_000
"""Maximum number of members in an archive; an image that contains software has tens of thousands."""
TRAILING_BYTES_MAX = 16 << 20
"""Maximum zeros after the end marker; tools pad their last record."""
META_BYTES_MAX = 256 << 10
"""Maximum size of a long name, or of the pax records of one member."""
OCTAL_MAX = 0o77777777777
"""Largest size that fits the octal header field; larger ones need pax records or GNU's binary form."""

Kind = Literal["file", "folder", "link", "special"]
"""Type of a member. `special`: a device, a pipe, part of a sparse or split file, or an unknown type."""
_KINDS: dict[bytes, Kind] = {b"0": "file", b"\0": "file", b"5": "folder", b"1": "link", b"2": "link"}
_POSIX, _GNU = b"ustar\x0000", b"ustar  \x00"
_ZEROS = bytes(BLOCK_BYTES)
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*")
_RECORD_HEAD = re.compile(rb"([1-9][0-9]{0,6}) ")
_SIZE = re.compile(rb"0|[1-9][0-9]{0,18}")
_MEANING = frozenset({b"path", b"size", b"linkpath"})
"""pax records that change how a member is read; they are rejected in a global header."""
_SPARSE = (b"GNU.sparse.", b"SCHILY.realsize", b"SUN.holesdata")
_CHARSETS = frozenset({b"ISO-IR 10646 2000 UTF-8", b""})


class BadArchiveError(ValueError):
    """The archive is rejected; the message is one line with the reason."""


class Member(NamedTuple):
    """Start of a member; its content follows."""

    path: str
    """As written in the archive, without the trailing `/` of a folder."""
    size: int
    kind: Kind


class End(NamedTuple):
    """The content of a member is complete."""


Event = Member | memoryview | End


class Reader:
    """Parses one archive from pieces of any size."""

    def __init__(self) -> None:
        self.at = 0
        """Archive bytes read when the last event was emitted: the offset of a member's content."""
        self._part = bytearray()
        """Partial header or metadata block."""
        self._wanted = BLOCK_BYTES
        self._meta = ""
        """Type flag of the metadata in `_part`; empty for a header."""
        self._meta_bytes = 0
        self._left = 0
        """Remaining content bytes of the current member."""
        self._padding = 0
        self._open = False
        self._named: dict[bytes, bytes] = {}
        """pax records or long name for the next member."""
        self.entries = 0
        """Members parsed so far."""
        self._ended = False
        self._after = 0

    def feed(self, piece: bytes | memoryview) -> Iterator[Event]:
        """Parse a piece and yield its events; views are valid until the next piece. Raises BadArchiveError."""
        view = memoryview(piece)
        while True:
            if self._open and not self._left:
                self._open = False
                yield End()
            if not view:
                return
            if self._left:
                data, view = view[: self._left], view[self._left :]
                self._left -= len(data)
                self.at += len(data)
                yield data
            elif self._padding:
                skipped = min(self._padding, len(view))
                self._padding, view = self._padding - skipped, view[skipped:]
                self.at += skipped
            elif self._ended:
                self._after += len(view)
                if bytes(view).strip(b"\0") or self._after > TRAILING_BYTES_MAX:
                    raise BadArchiveError("the archive has data after its end")
                return
            else:
                taken = view[: self._wanted - len(self._part)]
                self._part += taken
                view = view[len(taken) :]
                self.at += len(taken)
                if len(self._part) == self._wanted:
                    member = self._block(bytes(self._part))
                    if member is not None:
                        yield member

    def close(self) -> None:
        """Finish the input. Raises BadArchiveError if the archive is incomplete."""
        if not self._ended or self._part:
            raise BadArchiveError("the archive is truncated: its end is missing")

    def _block(self, block: bytes) -> Member | None:
        """Process a complete header or metadata block."""
        self._part.clear()
        self._wanted = BLOCK_BYTES
        if self._meta:
            meta, self._meta = self._meta, ""
            self._take_meta(meta, block[: self._meta_bytes])
            return None
        if block == _ZEROS:
            if self._named:
                raise BadArchiveError("the archive ends after the metadata of a member")
            self._ended = True
            return None
        self.entries += 1
        if self.entries > ENTRIES_MAX:
            raise BadArchiveError(f"the archive has more than {ENTRIES_MAX} members")
        return self._head(block)

    def _head(self, block: bytes) -> Member | None:
        name, flag, size = _checked(block)
        if flag in {b"x", b"g", b"L", b"K"}:
            if not 0 < size <= META_BYTES_MAX:
                raise BadArchiveError(f"the metadata of a member are empty or larger than {META_BYTES_MAX >> 10} KiB")
            self._meta, self._meta_bytes = flag.decode(), size
            self._wanted = size + -size % BLOCK_BYTES
            return None
        named, self._named = self._named, {}
        raw = named.get(b"path", name)
        kind = _KINDS.get(flag, "special")
        size = _size_of(named, size)
        try:
            path = raw.decode()
        except UnicodeDecodeError:
            raise BadArchiveError(f"the name {raw[:80]!r} is not UTF-8") from None
        if kind != "file" and size:
            raise BadArchiveError(f"{path[:80]!r} is not a file but has a size")
        if any(key.startswith(_SPARSE) for key in named):
            kind = "special"
        if kind == "file" and b"linkpath" in named:
            kind = "link"
        self._left, self._padding, self._open = size, -size % BLOCK_BYTES, True
        return Member(path.removesuffix("/") if kind == "folder" else path, size, kind)

    def _take_meta(self, meta: str, content: bytes) -> None:
        if meta == "g":
            if any(key in _MEANING or key.startswith(_SPARSE) for key in _records(content)):
                raise BadArchiveError("the archive has global pax records that change its members")
            return
        if meta == "x":
            found = _records(content)
        else:
            text = content.removesuffix(b"\0")
            if not text or b"\0" in text:
                raise BadArchiveError("a long name in the archive is invalid")
            found = {b"path" if meta == "L" else b"linkpath": text}
        if found.keys() & self._named.keys():
            raise BadArchiveError(
                "the archive has two extended headers that set the same property of a member, such as its name"
            )
        self._named |= found


def _checked(block: bytes) -> tuple[bytes, bytes, int]:
    """Return (name, type, size) of a header with a valid checksum. Raises BadArchiveError."""
    said = _number(block[148:156])
    if said != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise BadArchiveError("a header in the archive is corrupt: its checksum is wrong")
    magic, name = block[257:265], block[:100].partition(b"\0")[0]
    if magic == _POSIX:
        prefix = block[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    elif magic != _GNU:
        raise BadArchiveError("this is not an archive in a supported format (POSIX ustar, pax, GNU)")
    elif any(block[345:500]) and block[156:157] != b"S":
        raise BadArchiveError("the archive is an incremental backup")
    return name, block[156:157], _number(block[124:136])


def _number(field: bytes) -> int:
    """Parse octal digits or GNU's binary form. Raises BadArchiveError."""
    found = _OCTAL.fullmatch(field)
    if found is not None:
        return int(found[1] or b"0", 8)
    number = int.from_bytes(field[1:])
    if field[0] != 0x80 or number > BLOB_BYTES_MAX:
        raise BadArchiveError(f"a number in the archive is invalid, or larger than {BLOB_BYTES_MAX}")
    return number


def _size_of(named: dict[bytes, bytes], size: int) -> int:
    """Return the member size; record and header may differ only if the size does not fit the header."""
    text = named.get(b"size")
    if text is None:
        return size
    if not _SIZE.fullmatch(text) or int(text) > BLOB_BYTES_MAX:
        raise BadArchiveError(f"a size in the archive is invalid, or larger than {BLOB_BYTES_MAX}")
    said = int(text)
    if said != size and said <= OCTAL_MAX:
        raise BadArchiveError("the archive states two sizes for a member")
    return said


def _records(content: bytes) -> dict[bytes, bytes]:
    """Parse pax records into a dictionary. Raises BadArchiveError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(content):
        head = _RECORD_HEAD.match(content, at)
        end = at + int(head[1]) if head is not None else 0
        key, equals, value = content[head.end() : end - 1].partition(b"=") if head is not None else (b"", b"", b"")
        if end > len(content) or not equals or not key or content[end - 1 : end] != b"\n":
            raise BadArchiveError("a pax record in the archive is corrupt")
        if key in found:
            raise BadArchiveError(f"a pax record in the archive occurs twice: {key[:80]!r}")
        found[key] = value
        at = end
    if found.get(b"hdrcharset", b"") not in _CHARSETS:
        raise BadArchiveError("the archive's names are not UTF-8")
    if not all(found.get(key, b"x") for key in _MEANING):
        raise BadArchiveError("a pax record in the archive is empty")
    return found

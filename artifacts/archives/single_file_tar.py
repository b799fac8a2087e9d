"""Writes tar archives of one file each, deterministically: the same file always gives the same bytes. Pure.

Builds the bytes before and after the file's content: a ustar header without times and owners, pax records only if the
name or the size (8 GiB and more) does not fit the header, and the end marker. The content starts at a multiple of 512.
"""

from __future__ import annotations

from typing import NamedTuple

from artifacts.archives.tar_reader import BLOCK_BYTES, OCTAL_MAX

MODE = 0o644
_NAME_BYTES_MAX = 100
_END = bytes(2 * BLOCK_BYTES)


class Frame(NamedTuple):
    """The archive bytes before and after a file's content."""

    head: bytes
    tail: bytes


def build_frame(path: str, size: int) -> Frame:
    """Build the frame of an archive with this file alone. `path`: must have passed `artifacts.safe_paths`."""
    name, records = path.encode(), b""
    if len(name) > _NAME_BYTES_MAX or not path.isascii():
        records += _record(b"path", name)
        name = b"file"
    if size > OCTAL_MAX:
        records += _record(b"size", b"%d" % size)
    said = _header(b"pax", len(records), b"x") + records + bytes(-len(records) % BLOCK_BYTES) if records else b""
    return Frame(said + _header(name, size if size <= OCTAL_MAX else 0, b"0"), bytes(-size % BLOCK_BYTES) + _END)


def _header(name: bytes, size: int, flag: bytes) -> bytes:
    fields = (
        *(name.ljust(100, b"\0"), b"%07o\0" % MODE, b"0000000\0", b"0000000\0", b"%011o\0" % size),
        *(b"00000000000\0", b" " * 8, flag, bytes(100), b"ustar\x0000", bytes(64), b"0000000\0", b"0000000\0"),
    )
    block = b"".join(fields).ljust(BLOCK_BYTES, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _record(key: bytes, value: bytes) -> bytes:
    """Encode a pax record, which starts with its own length including the length digits."""
    rest = b" %s=%s\n" % (key, value)
    length = len(rest) + len(str(len(rest)))
    length = len(rest) + len(str(length))
    return b"%d%s" % (length, rest)

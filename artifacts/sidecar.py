"""Sidecars: which parts of a blob are on the disk, as a text that only grows. Pure.

Owns the format: a line with digest, size and layout, then a line for each part, each with a sum of its own. A line is
added only after its part is on the disk, so a text that was cut off, or whose end is noise, says less than is there and
never more. What it says is a reason not to fetch bytes again; it is no evidence: the digest of the whole is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from artifacts.digests import Digest
from artifacts.parts import Ledger

FORMAT = "pilotlight-parts-1"
BYTES_MAX = 4 << 20


def head(digest: Digest, size: int, part: int) -> bytes:
    """How the text begins. `part`: bytes of one."""
    return _line(f"{FORMAT} {digest} {size} {part}")


def lines(parts: Iterable[int]) -> bytes:
    """What is added when these are on the disk."""
    return b"".join(_line(str(part)) for part in sorted(parts))


def read(text: bytes, digest: Digest, size: int) -> Ledger | None:
    """What is there of this blob; None: the text says nothing of it that can be believed."""
    first, *rest = text[:BYTES_MAX].split(b"\n")
    words = (_checked(first) or "").split(" ")
    if len(words) != 4 or words[:3] != [FORMAT, digest, str(size)] or not _number(words[3]):
        return None
    done = {int(said) for said in map(_checked, rest) if said is not None and _number(said)}
    try:
        return Ledger(size, int(words[3]), frozenset(done))
    except ValueError:
        return None


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _line(said: str) -> bytes:
    return f"{said} {zlib.crc32(said.encode()):08x}\n".encode()


def _checked(line: bytes) -> str | None:
    """What a line says, where its sum holds."""
    said, _, summed = line.rpartition(b" ")
    if not said.isascii() or summed != b"%08x" % zlib.crc32(said):
        return None
    return said.decode()

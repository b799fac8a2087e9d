"""Sidecars: which parts of a blob are there, as a text that only grows. Pure.

Owns the format: a line with digest, size and layout, then lines for parts, each with a sum of its own. One with a boot
id says that the part is in the file, or so many bytes of its begin: true for as long as the machine runs, whatever ends
the process. One without says that it is on the disk, and is added only after it is. So a text that was cut off, or
whose end is noise, says less than is there and never more. What it says is a reason not to fetch bytes again; it is no
evidence: the digest of the whole is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from artifacts.digest import Digest
from artifacts.oci.spans import BlobProgress

FORMAT = "pilotlight-parts-1"
BYTES_MAX = 4 << 20


def format_header(digest: Digest, size: int, part: int) -> bytes:
    """How the text begins. `part`: bytes of one."""
    return _line(f"{FORMAT} {digest} {size} {part}")


def format_parts(parts: Iterable[int], boot: str = "") -> bytes:
    """What is added when these are on the disk; `boot`: when they are in the file, in this run of the machine."""
    return b"".join(_line(f"{part} {boot}" if boot else str(part)) for part in sorted(parts))


def format_marks(begun: Mapping[int, int], boot: str) -> bytes:
    """What is added when so many bytes of the begin of each of these are in the file, in this run of the machine."""
    return b"".join(_line(f"{part} {boot} {count}") for part, count in sorted(begun.items()))


def parse_progress(text: bytes, digest: Digest, size: int, boot: str) -> BlobProgress | None:
    """What is there of this blob; None: the text says nothing of it that can be believed.

    `boot`: the machine's run now; what was only in the memory of another one is not there.
    """
    first, *rest = text[:BYTES_MAX].split(b"\n")
    words = (_checked(first) or "").split(" ")
    if len(words) != 4 or words[:3] != [FORMAT, digest, str(size)] or not _number(words[3]):
        return None
    said = [(_checked(line) or "").split(" ") for line in rest]
    done = {int(part) for part, *run in said if _number(part) and run in ([], [boot])}
    begun: dict[int, int] = {}
    for part, *run in said:
        if _number(part) and len(run) == 2 and run[0] == boot and _number(run[1]):
            begun[int(part)] = max(int(run[1]), begun.get(int(part), 0))
    try:
        return BlobProgress(size, int(words[3]), frozenset(done), begun)
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

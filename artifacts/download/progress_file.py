"""Sidecar format: records which parts of a blob are present, as an append-only text. Pure.

A header line with digest, size and part size is followed by lines for parts; every line has its own checksum. A line
with a boot id states that the part, or a number of its first bytes, is in the file, which holds until the machine
restarts. A line without one states that the part is on disk and is added only after the sync. A truncated or corrupted
text therefore never claims too much. It only avoids repeated downloads; the digest of the whole blob is the proof.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from artifacts.digest import Digest
from artifacts.oci.blob_progress import BlobProgress

FORMAT = "pilotlight-parts-1"
BYTES_MAX = 4 << 20


def format_header(digest: Digest, size: int, part: int) -> bytes:
    """Format the header. `part`: bytes per part."""
    return _line(f"{FORMAT} {digest} {size} {part}")


def format_parts(parts: Iterable[int], boot: str = "") -> bytes:
    """Format lines for parts that are on disk or, with `boot`, in the file during this boot of the machine."""
    return b"".join(_line(f"{part} {boot}" if boot else str(part)) for part in sorted(parts))


def format_marks(begun: Mapping[int, int], boot: str) -> bytes:
    """Format lines for the number of leading bytes of each part that are in the file during this boot."""
    return b"".join(_line(f"{part} {boot} {count}") for part, count in sorted(begun.items()))


def parse_progress(text: bytes, digest: Digest, size: int, boot: str) -> BlobProgress | None:
    """Parse the progress of this blob; None if the header is invalid or of another blob.

    `boot`: current boot id; entries of another boot are ignored.
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
    """Return the content of a line if its checksum is valid."""
    said, _, summed = line.rpartition(b" ")
    if not said.isascii() or summed != b"%08x" % zlib.crc32(said):
        return None
    return said.decode()

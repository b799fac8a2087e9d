"""Handcrafted archives: tar headers written field by field, including content that no regular tool writes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator

from artifacts import digest
from artifacts.archives.tar_reader import End, Event, Kind, Member, Reader
from artifacts.dialects.artifact_contents import File
from artifacts.dialects.base import Encoding
from artifacts.file_kinds import Role

END = bytes(1024)
Said = tuple[str, int, Kind, bytes]
"""Path, size, kind and bytes of a member."""


def header(
    name: bytes, size: int | bytes = 0, flag: bytes = b"0", *, link: bytes = b"", mode: int = 0o644,
    magic: bytes = b"ustar\x0000", prefix: bytes = b"", changed: dict[int, bytes] | None = None,
) -> bytes:  # fmt: skip
    """One header. `size` as bytes sets the raw field; `changed` overwrites bytes at an offset before the checksum."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(512)
    for at, text in (
        (0, name), (100, b"%07o\0" % mode), (108, b"0000000\0"), (116, b"0000000\0"), (124, field),
        (136, b"00000000000\0"), (148, b" " * 8), (156, flag), (157, link), (257, magic), (345, prefix),
        *(changed or {}).items(),
    ):  # fmt: skip
        block[at : at + len(text)] = text
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: bytes, content: bytes = b"", flag: bytes = b"0", **fields: object) -> bytes:
    """A header, followed by the content that it announces."""
    return header(name, len(content), flag, **fields) + padded(content)  # type: ignore[arg-type]  # those of `header`


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(records: dict[bytes, bytes], flag: bytes = b"x") -> bytes:
    """Pax records that precede a member."""
    return member(b"PaxHeader", b"".join(record(key, value) for key, value in records.items()), flag)


def record(key: bytes, value: bytes) -> bytes:
    """One pax record; its length field includes the field itself."""
    rest = b" %s=%s\n" % (key, value)
    length = len(rest) + 1
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def honest(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT, folders: Iterable[str] = ()) -> bytes:
    """An archive as Python's tarfile writes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name in folders:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1_700_000_000
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def read(content: bytes, step: int = 0) -> list[Said]:
    """Returns what our reader yields for an archive fed in pieces of `step` bytes. Raises BadArchiveError."""
    reader, reported = Reader(), list[Said]()
    for piece in cut(content, step or len(content) or 1):
        gather(reader.feed(piece), reported)
    reader.close()
    return reported


def gather(events: Iterator[Event], reported: list[Said]) -> None:
    """Appends the members that the events describe."""
    for event in events:
        if isinstance(event, Member):
            reported.append((event.path, event.size, event.kind, b""))
        elif not isinstance(event, End):
            path, size, kind, before = reported.pop()
            reported.append((path, size, kind, before + bytes(event)))


def cut(content: bytes, step: int) -> Iterator[bytes]:
    return (content[at : at + step] for at in range(0, len(content), step))


def layer(content: bytes, encoding: Encoding = "tar", role: Role = "mixed", under: str = "") -> File:
    """An archive as an artifact's layer."""
    return File("", len(content), digest.compute_digest(content), role, encoding, under)

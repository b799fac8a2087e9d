"""The record of a copy (`copy.json`), and the key and folder names by which a copy is found. I/O."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from artifacts.dialects.artifact_contents import File
from artifacts.digest import BadDigestError, Digest, parse_digest
from artifacts.disk.durable_writes import Disk

RECORD_BYTES_MAX = 64 << 20
"""Enough for 16,384 files with the longest paths."""


ROOM_DIGITS = 16


class CopyKey(NamedTuple):
    """Identifies a Copy."""

    origin: str
    """Its registry, as in `Reference.host`, or another source's name."""
    digest: Digest
    """Digest of its manifest."""

    @property
    def room(self) -> str:
        """Folder name of its registry."""
        return origin_folder_name(self.origin)

    @property
    def name(self) -> str:
        """Unique in the store."""
        return f"{self.room}-{digest_file_name(self.digest)}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`copy.json`: written when the Copy is published, and again when all of it is on disk."""

    reference: str
    """As requested."""
    origin: str
    digest: str
    files: tuple[File, ...]
    unpacked_bytes: int
    """Size of the files extracted from archives."""
    unpacked: tuple[File, ...] = ()
    """The extracted files, each with its own digest, if the fetch reported them."""
    fetched_unix_s: float
    fetch_s: float
    private: bool
    """Fetched with a login: only callers with an accepted login get it."""
    unsafe: bool = False
    """Contains code or pickles: only callers that allow them get it."""
    documents: tuple[str, ...] = ()
    """Digests of its indexes, manifest and config, which are stored with the raw files."""
    boot: str = ""
    """Boot in which the Copy is valid before all of it is on disk; empty once it is (`unsynced_copies`)."""

    @property
    def key(self) -> CopyKey:
        """Key of the Copy. Raises BadDigestError."""
        return CopyKey(self.origin, parse_digest(self.digest))

    @property
    def blobs(self) -> dict[Digest, int]:
        """Raw files by digest -> bytes."""
        return {one.digest: one.size for one in self.files if one.encoding == "raw"}

    @property
    def laid(self) -> tuple[File, ...]:
        """All files in the Copy's folder."""
        return (*(one for one in self.files if one.encoding == "raw"), *self.unpacked)

    @property
    def bytes(self) -> int:
        """Size of the whole Copy."""
        return self.unpacked_bytes + sum(self.blobs.values())


def origin_folder_name(origin: str) -> str:
    """Return the folder name for content of this origin."""
    return hashlib.sha256(origin.encode()).hexdigest()[:ROOM_DIGITS]


def digest_file_name(digest: Digest) -> str:
    """Return the file name of a digest."""
    return parse_digest(digest).replace(":", "-")


def parse_file_name(name: str) -> Digest | None:
    """Parse the result of `digest_file_name`; None for other names."""
    try:
        return parse_digest(name.replace("-", ":", 1))
    except BadDigestError:
        return None


def load_current_record(copy: Path, disk: Disk) -> Record | None:
    """Return the record in a Copy's folder; None if there is none that is valid in this boot."""
    found = load_record(copy)
    return found if found is not None and found.boot in {"", disk.boot} else None


def load_record(copy: Path) -> Record | None:
    """Return the record in a Copy's folder, of whatever boot; None if it is unreadable."""
    path = copy / "copy.json"
    try:
        if path.stat().st_size > RECORD_BYTES_MAX:
            return None
        found = msgspec.json.decode(path.read_bytes(), type=Record)
        parse_digest(found.digest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, BadDigestError):
        return None
    return found

"""The record of a copy (`copy.json`): its fields, and reading it. I/O."""

from __future__ import annotations

from pathlib import Path

import msgspec

from artifacts.dialects.artifact_contents import File
from artifacts.digest import BadDigestError, Digest, parse_digest
from artifacts.disk.durable_writes import Disk
from artifacts.store.file_names import CopyKey

RECORD_BYTES_MAX = 64 << 20
"""Enough for 16,384 files with the longest paths."""


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

"""Where things lie in a node's store, and what is written about a Copy. I/O.

Owns names and the form of `copy.json`. Promises: only digests that were checked stand in a path. Nothing that lies here
is shared between registries: one could name another's digest, say yes to its own question, and so get what it never
had. Within one registry a file that two artifacts have is kept once, as hard links.

    blobs/ORIGIN/ALG-HEX          a file that was verified, read-only
    copies/ORIGIN/ALG-HEX/        one Copy, published by one rename: copy.json, lease, files/...
    partial/ORIGIN-ALG-HEX/       what a pull has so far: reservation, blobs/, tree/
    locks/, pins/, trash/         locks of pulls; names of pinned digests; what is being removed
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from artifacts import digest as digests
from artifacts.dialects.contents import File
from artifacts.digest import Digest
from artifacts.disk.disk import Disk, list_entries, walk_folder

RECORD_BYTES_MAX = 64 << 20
"""Of 16,384 files with the longest paths, and more."""
ROOM_DIGITS = 16
PARTS = ("blobs", "copies", "partial", "locks", "pins", "trash", "aside")


class StoreError(Exception):
    """The store cannot do it; the text is one line that says why and what to do."""


class NoRoomError(StoreError):
    """There is no room, and none can be made."""


class ForbiddenError(StoreError):
    """Who asks may not have it."""


class HeldError(StoreError):
    """It is pinned or in use."""


class CopyKey(NamedTuple):
    """One Copy."""

    origin: str
    """The registry it came from, as `Reference.host`, or another source's name."""
    digest: Digest
    """Of its manifest."""

    @property
    def room(self) -> str:
        """The folder of its registry."""
        return origin_folder_name(self.origin)

    @property
    def name(self) -> str:
        """Unique in the store."""
        return f"{self.room}-{digest_file_name(self.digest)}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`copy.json`: written when the Copy is published, and again when all of it is on the disk."""

    reference: str
    """As it was asked for."""
    origin: str
    digest: str
    files: tuple[File, ...]
    unpacked_bytes: int
    """Of files that came out of archives."""
    unpacked: tuple[File, ...] = ()
    """Those files, each with its own digest, where whoever fetched them said so."""
    fetched_unix_s: float
    fetch_s: float
    private: bool
    """It was fetched with a login: nobody gets it without one."""
    unsafe: bool = False
    """It holds what is refused else (code, pickles): nobody gets it who does not allow that."""
    documents: tuple[str, ...] = ()
    """Digests of its manifest, of what led to that, and of its config, which lie among the raw files."""
    boot: str = ""
    """Not all of it may be on the disk: it is there in this run of the machine. Empty: for good (`settling`)."""

    @property
    def key(self) -> CopyKey:
        """Whose record it is. Raises BadDigestError."""
        return CopyKey(self.origin, digests.parse_digest(self.digest))

    @property
    def blobs(self) -> dict[Digest, int]:
        """Its raw files -> bytes, each once."""
        return {one.digest: one.size for one in self.files if one.encoding == "raw"}

    @property
    def laid(self) -> tuple[File, ...]:
        """Every file below the Copy's folder."""
        return (*(one for one in self.files if one.encoding == "raw"), *self.unpacked)

    @property
    def bytes(self) -> int:
        """Of the whole Copy."""
        return self.unpacked_bytes + sum(self.blobs.values())


def origin_folder_name(origin: str) -> str:
    """The name of the folder of all that came from there."""
    return hashlib.sha256(origin.encode()).hexdigest()[:ROOM_DIGITS]


def digest_file_name(digest: Digest) -> str:
    """As a file is called."""
    digests.parse_digest(digest)
    return f"{digests.get_algorithm(digest)}-{digests.get_hex(digest)}"


def parse_file_name(name: str) -> Digest | None:
    """What `digest_file_name` had; None: it is no such name."""
    try:
        return digests.parse_digest(name.replace("-", ":", 1))
    except digests.BadDigestError:
        return None


class StoreLayout:
    """The paths below one folder."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.disk = disk or Disk()
        """Knows which run of the machine this is."""
        self.lock = root / "store.lock"
        """Held for moments, by whoever counts or changes what others count."""
        self.judged = root / "store.boot"
        """Names the run of the machine in which what the one before had left was judged (`settling`)."""
        self.blobs, self.copies, self.partials, self.locks, self.pins, self.trash, self.asides = (
            root / part for part in PARTS
        )

    def make(self, disk: Disk) -> None:
        """All folders that are always there."""
        for part in PARTS:
            disk.folder(self.root / part)

    def blob(self, key: CopyKey, digest: Digest) -> Path:
        """A raw file of the Copy."""
        return self.blobs / key.room / digest_file_name(digest)

    def blob_lock(self, key: CopyKey, digest: Digest) -> Path:
        """Held while it is fetched."""
        return self.locks / f"blob-{key.room}-{digest_file_name(digest)}"

    def copy(self, key: CopyKey) -> Path:
        """The folder of a Copy."""
        return self.copies / key.room / digest_file_name(key.digest)

    def lease(self, key: CopyKey) -> Path:
        """Held, shared, by who uses the Copy; its time is that of the last use."""
        return self.copy(key) / "lease"

    def flight(self, key: CopyKey) -> Path:
        """The lock of who fetches the Copy."""
        return self.locks / key.name

    def partial(self, key: CopyKey) -> Path:
        """What is fetched of it so far."""
        return self.partials / key.name

    def pin(self, digest: Digest) -> Path:
        """There while the digest is pinned."""
        return self.pins / digest_file_name(digest)

    def record(self, key: CopyKey) -> Record | None:
        """What is written about the Copy; None: there is none that can be believed."""
        found = load_current_record(self.copy(key), self.disk)
        return found if found is not None and found.key == key else None

    def records(self, *, every: bool = False) -> Iterator[Record]:
        """Of all Copies; `every`: also of those that cannot be believed in this run of the machine."""
        for room in list_entries(self.copies):
            for one in list_entries(Path(room.path)):
                found = load_record(Path(one.path)) if every else load_current_record(Path(one.path), self.disk)
                whole = found is not None and Path(one.path, "lease").exists()
                if found is not None and whole and self.copy(found.key) == Path(one.path):
                    yield found


def load_current_record(copy: Path, disk: Disk) -> Record | None:
    """The record in a Copy's folder; None: there is none that can be believed in this run of the machine."""
    found = load_record(copy)
    return found if found is not None and found.boot in {"", disk.boot} else None


def load_record(copy: Path) -> Record | None:
    """As it was written, whenever that was."""
    path = copy / "copy.json"
    try:
        if path.stat().st_size > RECORD_BYTES_MAX:
            return None
        found = msgspec.json.decode(path.read_bytes(), type=Record)
        digests.parse_digest(found.digest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, digests.BadDigestError):
        return None
    return found


def exclusive_disk_bytes(path: Path) -> int:
    """What a folder takes of the disk by itself: without files that have another name elsewhere."""
    found = 0
    for one in walk_folder(path):
        with contextlib.suppress(FileNotFoundError):  # a pull goes on meanwhile
            said = one.stat(follow_symlinks=False)
            found += said.st_blocks * 512 if said.st_nlink == 1 and one.is_file(follow_symlinks=False) else 0
    return found

"""Paths in a node's store, and the record of a Copy. I/O.

Defines names and the format of `copy.json`. Only validated digests are used in paths. Nothing is shared between
registries. Otherwise a registry could list a digest of another registry, permit access to it, and so give its callers
content that it never had. Within a registry, files that two artifacts share are stored once, as hard links.

    blobs/ORIGIN/ALG-HEX          a verified file, read-only
    copies/ORIGIN/ALG-HEX/        one Copy, published by one rename: copy.json, lease, files/...
    partial/ORIGIN-ALG-HEX/       the state of a pull: reservation, blobs/, tree/
    locks/, pins/, trash/         locks of pulls; names of pinned digests; what is being removed
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from artifacts.dialects.artifact_contents import File
from artifacts.digest import BadDigestError, Digest, parse_digest
from artifacts.disk.durable_writes import Disk, list_entries, walk_folder

RECORD_BYTES_MAX = 64 << 20
"""Enough for 16,384 files with the longest paths."""
ROOM_DIGITS = 16
PARTS = ("blobs", "copies", "partial", "locks", "pins", "trash", "aside")


class StoreError(Exception):
    """A store operation failed; the message is one line with the reason and the fix."""


class NoRoomError(StoreError):
    """There is not enough space, and none can be freed."""


class ForbiddenError(StoreError):
    """The caller may not access the Copy."""


class HeldError(StoreError):
    """The Copy is pinned or in use."""


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
    """Boot in which the Copy is valid before all of it is on disk; empty once it is (`deferred_sync`)."""

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


class StoreLayout:
    """The paths below one root folder."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.disk = disk or Disk()
        """Also knows the current boot id."""
        self.lock = root / "store.lock"
        """Held briefly by processes that measure the store or change what is measured."""
        self.judged = root / "store.boot"
        """Holds the boot id of the last recovery (`deferred_sync`)."""
        self.blobs, self.copies, self.partials, self.locks, self.pins, self.trash, self.asides = (
            root / part for part in PARTS
        )

    def make(self, disk: Disk) -> None:
        """Create the permanent folders."""
        for part in PARTS:
            disk.folder(self.root / part)

    def blob(self, key: CopyKey, digest: Digest) -> Path:
        """Path of a raw file of the Copy."""
        return self.blobs / key.room / digest_file_name(digest)

    def blob_lock(self, key: CopyKey, digest: Digest) -> Path:
        """Path of the lock that is held while the file is fetched."""
        return self.locks / f"blob-{key.room}-{digest_file_name(digest)}"

    def copy(self, key: CopyKey) -> Path:
        """Path of a Copy's folder."""
        return self.copies / key.room / digest_file_name(key.digest)

    def lease(self, key: CopyKey) -> Path:
        """Path of the Copy's lock, held in shared mode by its users; its mtime is the last use."""
        return self.copy(key) / "lease"

    def flight(self, key: CopyKey) -> Path:
        """Path of the lock held by the process that fetches the Copy."""
        return self.locks / key.name

    def partial(self, key: CopyKey) -> Path:
        """Path of the pull's folder."""
        return self.partials / key.name

    def pin(self, digest: Digest) -> Path:
        """Path of a file that exists while the digest is pinned."""
        return self.pins / digest_file_name(digest)

    def record(self, key: CopyKey) -> Record | None:
        """Return the Copy's record; None if there is no valid one."""
        found = load_current_record(self.copy(key), self.disk)
        return found if found is not None and found.key == key else None

    def records(self, *, every: bool = False) -> Iterator[Record]:
        """Yield the records of all Copies; `every`: also of those that are invalid in this boot."""
        for room in list_entries(self.copies):
            for one in list_entries(Path(room.path)):
                found = load_record(Path(one.path)) if every else load_current_record(Path(one.path), self.disk)
                whole = found is not None and Path(one.path, "lease").exists()
                if found is not None and whole and self.copy(found.key) == Path(one.path):
                    yield found


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


def exclusive_disk_bytes(path: Path) -> int:
    """Return a folder's own disk usage, without files that are hard-linked elsewhere."""
    found = 0
    for one in walk_folder(path):
        with contextlib.suppress(FileNotFoundError):  # a pull may be running
            said = one.stat(follow_symlinks=False)
            found += said.st_blocks * 512 if said.st_nlink == 1 and one.is_file(follow_symlinks=False) else 0
    return found

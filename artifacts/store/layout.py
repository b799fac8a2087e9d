"""Paths in a node's store. I/O.

Only validated digests are used in paths. Nothing is shared between
registries. Otherwise a registry could list a digest of another registry, permit access to it, and so give its callers
content that it never had. Within a registry, files that two artifacts share are stored once, as hard links.

    blobs/ORIGIN/ALG-HEX          a verified file, read-only
    copies/ORIGIN/ALG-HEX/        one Copy, published by one rename: copy.json, lease, files/...
    partial/ORIGIN-ALG-HEX/       the state of a pull: reservation, blobs/, tree/
    locks/, pins/, trash/         locks of pulls; names of pinned digests; what is being removed
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from artifacts.digest import Digest
from artifacts.disk.durable_writes import Disk, list_entries, walk_folder
from artifacts.store.copy_record import Record, load_current_record, load_record
from artifacts.store.file_names import CopyKey, digest_file_name

PARTS = ("blobs", "copies", "partial", "locks", "pins", "trash", "aside")


class StoreError(Exception):
    """A store operation failed; the message is one line with the reason and the fix."""


class NoRoomError(StoreError):
    """There is not enough space, and none can be freed."""


class ForbiddenError(StoreError):
    """The caller may not access the Copy."""


class HeldError(StoreError):
    """The Copy is pinned or in use."""


class StoreLayout:
    """The paths below one root folder."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.disk = disk or Disk()
        """Also knows the current boot id."""
        self.lock = root / "store.lock"
        """Held briefly by processes that measure the store or change what is measured."""
        self.judged = root / "store.boot"
        """Holds the boot id of the last recovery (`unsynced_copies`)."""
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


def exclusive_disk_bytes(path: Path) -> int:
    """Return a folder's own disk usage, without files that are hard-linked elsewhere."""
    found = 0
    for one in walk_folder(path):
        with contextlib.suppress(FileNotFoundError):  # a pull may be running
            said = one.stat(follow_symlinks=False)
            found += said.st_blocks * 512 if said.st_nlink == 1 and one.is_file(follow_symlinks=False) else 0
    return found

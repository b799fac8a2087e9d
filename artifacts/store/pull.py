"""One pull into a node's store, from the specification and space reservation to the published Copy. I/O.

Manages the pull's folder until the one rename that publishes it. A file that is already stored is not fetched again and
cannot be evicted meanwhile. A published Copy has the sizes stated by the manifest, holds only regular files and
folders, is on disk or recorded as not yet synced (`unsynced_copies`), and is locked before others can see it.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from artifacts import file_policy, safe_paths
from artifacts.dialects.artifact_contents import File
from artifacts.digest import Digest, compute_digest
from artifacts.disk.durable_writes import Disk, list_entries, walk_folder
from artifacts.disk.locks import try_lock
from artifacts.store import unsynced_copies
from artifacts.store.copies import Copy, CopyStore
from artifacts.store.copy_record import Record
from artifacts.store.file_names import CopyKey, digest_file_name
from artifacts.store.layout import StoreError, exclusive_disk_bytes
from artifacts.store.reservations import Reservation, Reservations

RECIPES = "recipes"
"""Subfolder of a Copy for the recipes of its archives."""
RECORD_BYTES = 1 << 20
"""Space reserved for metadata and for the last blocks of files."""


class CopySpec(NamedTuple):
    """Specification of a Copy."""

    reference: str
    """The reference as the user wrote it."""
    key: CopyKey
    files: tuple[File, ...]
    """From `Contents.files()`."""
    unpacked_bytes: int = 0
    """Size of the files placed into the tree, if known; `Job.more` reserves more."""
    allow_unsafe: bool = False
    """Whether archives may contain code."""
    unsafe: bool = False
    """Whether some of its files are accepted only with `allow_unsafe`."""
    documents: tuple[bytes, ...] = ()
    """Its indexes, manifest and config: stored with the raw files, to be served to peers."""


@dataclass(frozen=True, slots=True)
class Job:
    """The input and output of a fetch."""

    files: tuple[File, ...]
    """Raw files that are not stored yet, and all archives."""
    blobs: Path
    """Folder for raw files, each as `blob(digest)`, which may exist only once it is complete, verified and synced (as
    far as `durable_writes` syncs). Other files are from an earlier attempt and may be resumed."""
    tree: Path
    """Empty folder into which archives are extracted, as regular files and folders."""
    more: Callable[[int], Awaitable[None]]
    """Reserves this many additional bytes. Raises NoRoomError."""
    disk: Disk = field(default_factory=Disk, repr=False)
    """Performs and syncs all writes."""
    unpacked: list[File] = field(default_factory=list)
    """Output: the files extracted from archives, each with its own digest."""
    recipes: dict[Digest, bytes] = field(default_factory=dict)
    """Output: recipes that rebuild archives from those files (`artifacts.archives.archive_recipe`)."""

    def blob(self, digest: Digest) -> Path:
        """Path of a raw file."""
        return self.blobs / digest_file_name(digest)


class Pull:
    """The pull of one Copy; the caller holds the Copy's pull lock (`StoreLayout.flight`). All methods block."""

    def __init__(self, wanted: CopySpec, shelf: CopyStore, ledger: Reservations, disk: Disk) -> None:
        self._wanted, self._shelf, self._ledger, self._disk = wanted, shelf, ledger, disk
        self._layout = shelf.layout
        self.folder = shelf.layout.partial(wanted.key)
        self._blobs, self._tree = self.folder / "blobs", self.folder / "tree"
        self._room = Reservation(self.folder / "reservation")
        self._raw = {one.digest: one.size for one in wanted.files if one.encoding == "raw"}
        self._documents = {compute_digest(body): body for body in wanted.documents}
        self._began_s = time.monotonic()
        self._unpacked = list[File]()
        self._recipes = dict[Digest, bytes]()

    def begin(self, more: Callable[[int], Awaitable[None]]) -> Job:
        """Reserve space and link the files that are already stored. Raises NoRoomError, OSError."""
        for one in self._wanted.files:
            if one.encoding == "raw":
                safe_paths.check_path(one.path)
        with self._shelf.locked():
            self._disk.folder(self._blobs)
        unsynced_copies.discard_corrupt_blobs(self.folder, self._disk.boot)
        with self._shelf.locked():
            self._disk.remove(self._tree)
            self._disk.folder(self._tree / "files")
            for digest in self._raw:
                there, own = self._layout.blob(self._wanted.key, digest), self._blobs / digest_file_name(digest)
                if there.exists():
                    self._disk.remove(own)  # of an earlier attempt; another pull has stored the blob since
                    self._disk.link(there, own)
            missing = tuple(one for one in self._wanted.files if not self._is_here(one))
            wanted_bytes = self._own_bytes() + RECORD_BYTES
            self._ledger.reserve(self._room, self._wanted.key, wanted_bytes, len(self._wanted.files))
        return Job(missing, self._blobs, self._tree / "files", more, self._disk, self._unpacked, self._recipes)

    def _own_bytes(self) -> int:
        """Return the final size of the pull without files that the store already has."""
        shared = {one.name for one in list_entries(self._blobs) if one.stat(follow_symlinks=False).st_nlink > 1}
        archives = sum(one.size for one in self._wanted.files if one.encoding != "raw")
        raw = sum(size for digest, size in self._raw.items() if digest_file_name(digest) not in shared)
        documents = sum(len(body) for body in self._documents.values())
        return raw + documents + max(archives, self._wanted.unpacked_bytes)

    def more(self, more_bytes: int) -> None:
        """Reserve more bytes. Raises NoRoomError."""
        with self._shelf.locked():
            self._ledger.reserve(self._room, self._wanted.key, self._room.bytes + more_bytes)

    def _is_here(self, file: File) -> bool:
        if file.encoding != "raw":
            return False
        path = self._blobs / digest_file_name(file.digest)
        if not path.exists():
            return False
        if path.stat().st_size == file.size:
            return True
        path.unlink()
        return False

    def publish(self, *, private: bool) -> Copy:
        """Publish the Copy and return it locked. Raises StoreError, NoRoomError, OSError."""
        unpacked_bytes = self._checked_tree()
        for digest, size in self._raw.items():
            path = self._blobs / digest_file_name(digest)
            said = path.lstat() if path.exists() else None
            if said is None or not stat.S_ISREG(said.st_mode) or said.st_size != size:
                raise StoreError(f"the pull of {self._wanted.key.digest} ended without {digest} of {size} bytes")
            path.chmod(0o444)
            self._disk.sync(path)
        taken = exclusive_disk_bytes(self.folder) + sum(map(len, self._recipes.values()))
        if taken > self._room.bytes:
            self.more(taken - self._room.bytes)
        with self._shelf.locked():
            self._link()
            return self._out(self._record(unpacked_bytes, private=private))

    def _checked_tree(self) -> int:
        """Check and sync the extracted files; return their size."""
        found = 0
        for one in walk_folder(self._tree):
            mode = one.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                Path(one.path).chmod(0o444)
                self._disk.sync(Path(one.path))
                found += one.stat(follow_symlinks=False).st_size
            elif not stat.S_ISDIR(mode):
                raise StoreError(f"the pull of {self._wanted.key.digest} left an entry that is no file: {one.name!r}")
        return found

    def _link(self) -> None:
        """Link every raw file into the store, and from there into the Copy."""
        key = self._wanted.key
        self._disk.folder(self._layout.blobs / key.room)
        for digest, body in self._documents.items():
            if digest not in self._raw:
                self._disk.write(self._blobs / digest_file_name(digest), body)
        for digest in (*self._raw, *self._documents):
            with suppress(FileExistsError):
                self._disk.link(self._blobs / digest_file_name(digest), self._layout.blob(key, digest))
        self._disk.sync(self._layout.blobs / key.room)
        if self._documents:
            self._disk.folder(self._tree / "documents")
        for digest in self._documents:
            self._disk.link(self._layout.blob(key, digest), self._tree / "documents" / digest_file_name(digest))
        for digest, recipe in self._recipes.items():
            self._disk.folder(self._tree / RECIPES)
            self._disk.write(self._tree / RECIPES / digest_file_name(digest), recipe)
        for one in self._wanted.files:
            if one.encoding == "raw":
                path = self._tree / "files" / one.path
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._disk.link(self._layout.blob(key, one.digest), path)
                except FileExistsError:
                    raise StoreError(f"{one.path!r} of {key.digest} is also in an archive") from None

    def _record(self, unpacked_bytes: int, *, private: bool) -> Record:
        wanted = self._wanted
        return Record(
            reference=wanted.reference,
            origin=wanted.key.origin,
            digest=wanted.key.digest,
            files=wanted.files,
            unpacked=tuple(self._unpacked),
            unpacked_bytes=unpacked_bytes,
            fetched_unix_s=time.time(),
            fetch_s=time.monotonic() - self._began_s,
            private=private,
            unsafe=wanted.unsafe or (wanted.allow_unsafe and any(map(_unsafe, self._unpacked))),
            documents=tuple(self._documents),
            boot=self._disk.owed,
        )

    def _out(self, record: Record) -> Copy:
        """Lock the Copy and publish it with one rename."""
        for one in walk_folder(self._tree):
            if one.is_dir(follow_symlinks=False):
                self._disk.sync(Path(one.path))
        lease = try_lock(self._tree / "lease", shared=True, make=True)
        if lease is None:
            raise StoreError(
                f"{self._tree / 'lease'} is locked by another process; only the pull that writes this folder may "
                f"lock it: stop that process, and pull again"
            )
        try:
            self._disk.write(self._tree / "copy.json", msgspec.json.encode(record))
            to = self._layout.copy(self._wanted.key)
            self._disk.folder(to.parent)
            if to.exists():  # a Copy whose record is not readable
                self._shelf.discard(to)
                self._shelf.clean()
            self._disk.move(self._tree, to)
        except BaseException:
            lease.close()
            raise
        return Copy(record, to / "files", lease)

    def end(self, *, keep: bool) -> None:
        """Release the reservation; `keep`: keep the folder so that the next pull can resume."""
        self._room.close()
        if not keep:
            with suppress(OSError):  # the rest is removed when space is needed, or when a store is opened
                self._disk.remove(self.folder)


def _unsafe(file: File) -> bool:
    role = None if file.role in {"mixed", "unknown"} else file.role
    return bool(file_policy.evaluate_file(file.path, role).refusal)

"""One pull into a node's store: what is wanted, what it may take, and the Copy that comes of it. I/O.

Owns the folder of the pull from its reservation to the one rename that publishes it. Promises: a file that is here
already is not asked for again, and nobody takes it away meanwhile; what is published has the sizes that the manifest
says, holds regular files and folders only, lies on the disk or says that it may not yet (`settling`), and is held
before anybody can see it.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from artifacts import digest as digests
from artifacts import file_policy, safe_paths
from artifacts.dialects.contents import File
from artifacts.digest import Digest
from artifacts.disk import locks
from artifacts.disk.disk import Disk, list_entries, walk_folder
from artifacts.disk.locks import Flock
from artifacts.store import durability
from artifacts.store.copies import CopyStore
from artifacts.store.layout import CopyKey, Record, StoreError, digest_file_name, exclusive_disk_bytes
from artifacts.store.reservations import Reservation, Reservations

RECIPES = "recipes"
"""Below a Copy's folder: of its archives."""
RECORD_BYTES = 1 << 20
"""Reserved for what is written beside the weights, and for the last blocks of files."""


class CopySpec(NamedTuple):
    """What a Copy is to be."""

    reference: str
    """As a person wrote it."""
    key: CopyKey
    files: tuple[File, ...]
    """`Contents.files()`."""
    unpacked_bytes: int = 0
    """What is laid into the tree will take, where that is known; `Job.more` takes more."""
    allow_unsafe: bool = False
    """What comes out of archives may be code, too."""
    unsafe: bool = False
    """Of its files some are."""
    documents: tuple[bytes, ...] = ()
    """Its manifest, what led to that, and its config: kept among the raw files, to be given to peers."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be fetched, and where to."""

    files: tuple[File, ...]
    """Raw files that are not here yet, and all archives."""
    blobs: Path
    """Raw files come here, each as `blob(digest)`, and under that name only when it is whole, verified and synced, as
    far as `disk` syncs at all. What else is here was left by the try before: a fetch may go on from it."""
    tree: Path
    """Archives are unpacked here, into regular files and folders; it is empty."""
    more: Callable[[int], Awaitable[None]]
    """Reserves so many bytes more than were asked for. Raises NoRoomError."""
    disk: Disk = field(default_factory=Disk, repr=False)
    """What is written goes through it, and is synced by it."""
    unpacked: list[File] = field(default_factory=list)
    """The fetch says here what came out of archives, each file with its own digest."""
    recipes: dict[Digest, bytes] = field(default_factory=dict)
    """And here how archives come out of those files again (`artifacts.archives.reassembly`)."""

    def blob(self, digest: Digest) -> Path:
        """Where this raw file belongs."""
        return self.blobs / digest_file_name(digest)


@dataclass(slots=True)
class Copy:
    """One that is here, and stays until it is closed. Use as `with`, or give `lease.fd` to who uses it."""

    record: Record
    folder: Path
    """Of its files."""
    lease: Flock = field(repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """It is not used here any more."""
        self.lease.close()


class Pull:
    """Of one Copy; whoever makes it holds the Copy's flight. All methods block."""

    def __init__(self, wanted: CopySpec, shelf: CopyStore, ledger: Reservations, disk: Disk) -> None:
        self._wanted, self._shelf, self._ledger, self._disk = wanted, shelf, ledger, disk
        self._layout = shelf.layout
        self.folder = shelf.layout.partial(wanted.key)
        self._blobs, self._tree = self.folder / "blobs", self.folder / "tree"
        self._room = Reservation(self.folder / "reservation")
        self._raw = {one.digest: one.size for one in wanted.files if one.encoding == "raw"}
        self._documents = {digests.compute_digest(body): body for body in wanted.documents}
        self._began_s = time.monotonic()
        self._unpacked = list[File]()
        self._recipes = dict[Digest, bytes]()

    def begin(self, more: Callable[[int], Awaitable[None]]) -> Job:
        """Room is promised, and what is here already is at hand. Raises NoRoomError, OSError."""
        for one in self._wanted.files:
            if one.encoding == "raw":
                safe_paths.check_path(one.path)
        with self._shelf.locked():
            self._disk.folder(self._blobs)
        durability.discard_corrupt_blobs(self.folder, self._disk.boot)
        with self._shelf.locked():
            self._disk.remove(self._tree)
            self._disk.folder(self._tree / "files")
            for digest in self._raw:
                there, own = self._layout.blob(self._wanted.key, digest), self._blobs / digest_file_name(digest)
                if there.exists():
                    self._disk.remove(own)  # of a try before, while another pull brought it, too
                    self._disk.link(there, own)
            missing = tuple(one for one in self._wanted.files if not self._is_here(one))
            wanted_bytes = self._own_bytes() + RECORD_BYTES
            self._ledger.reserve(self._room, self._wanted.key, wanted_bytes, len(self._wanted.files))
        return Job(missing, self._blobs, self._tree / "files", more, self._disk, self._unpacked, self._recipes)

    def _own_bytes(self) -> int:
        """What the pull will have taken by itself at its end: all but the files that the store has already."""
        shared = {one.name for one in list_entries(self._blobs) if one.stat(follow_symlinks=False).st_nlink > 1}
        archives = sum(one.size for one in self._wanted.files if one.encoding != "raw")
        raw = sum(size for digest, size in self._raw.items() if digest_file_name(digest) not in shared)
        documents = sum(len(body) for body in self._documents.values())
        return raw + documents + max(archives, self._wanted.unpacked_bytes)

    def more(self, more_bytes: int) -> None:
        """Reserves more. Raises NoRoomError."""
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
        """The Copy, held. Raises StoreError, NoRoomError, OSError."""
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
        """What came out of archives, synced; its bytes."""
        found = 0
        for one in walk_folder(self._tree):
            mode = one.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                Path(one.path).chmod(0o444)
                self._disk.sync(Path(one.path))
                found += one.stat(follow_symlinks=False).st_size
            elif not stat.S_ISDIR(mode):
                raise StoreError(f"the pull of {self._wanted.key.digest} left what is no file: {one.name!r}")
        return found

    def _link(self) -> None:
        """Every raw file into the store, and from there to where the Copy has it."""
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
                    raise StoreError(f"{one.path!r} of {key.digest} came out of an archive, too") from None

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
        """Seen by others from the rename on, and then held."""
        for one in walk_folder(self._tree):
            if one.is_dir(follow_symlinks=False):
                self._disk.sync(Path(one.path))
        lease = locks.try_lock(self._tree / "lease", shared=True, make=True)
        if lease is None:
            raise StoreError(f"{self._tree} is held by somebody; only pulls may touch it")
        try:
            self._disk.write(self._tree / "copy.json", msgspec.json.encode(record))
            to = self._layout.copy(self._wanted.key)
            self._disk.folder(to.parent)
            if to.exists():  # one that could not be read
                self._shelf.discard(to)
                self._shelf.clean()
            self._disk.move(self._tree, to)
        except BaseException:
            lease.close()
            raise
        return Copy(record, to / "files", lease)

    def end(self, *, keep: bool) -> None:
        """Gives back what was promised; `keep`: the next may go on from what is here."""
        self._room.close()
        if not keep:
            with suppress(OSError):  # what could not be removed goes when room is needed, or a store is opened
                self._disk.remove(self.folder)


def _unsafe(file: File) -> bool:
    role = None if file.role in {"mixed", "unknown"} else file.role
    return bool(file_policy.evaluate_file(file.path, role).refusal)

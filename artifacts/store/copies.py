"""The Copies in a node's store: locking, use by processes, removal, and cleanup after crashes. I/O.

Holds the store's global lock, lists the eviction candidates and removes Copies. A Copy is removed atomically with one
rename, and eviction never removes one whose lock (the file `lease`) is held. Files shared with another Copy stay. All
remains of a crash are found and removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Self

import msgspec

from artifacts.disk.durable_writes import FULL, Disk, describe_os_error, list_entries
from artifacts.disk.locks import Flock, remove_lock, try_lock, wait_for_lock
from artifacts.store import unsynced_copies
from artifacts.store.copy_record import Record
from artifacts.store.file_names import ORIGIN_DIGITS, CopyKey, digest_file_name
from artifacts.store.layout import StoreError, StoreLayout, exclusive_disk_bytes
from artifacts.store.victim_selection import Candidate

log = logging.getLogger("pilotlight.artifacts.store")

SPOILS = FULL | {errno.EIO, errno.ESTALE}
"""Errors of a disk that lost data."""
LOCK_S_MAX = 60.0
"""Removing large Copies takes a while."""
LEASE_S_MAX = 5.0
"""Removal and usage checks hold a Copy's lock only briefly."""
LEFT_S_MAX = 86_400.0
"""Seconds for which the data of an incomplete pull is kept, so that the next pull can resume it."""


class CopyStore:
    """All published Copies and all remains of pulls."""

    def __init__(self, layout: StoreLayout, disk: Disk) -> None:
        self.layout = layout
        self._disk = disk

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock, exclusive among all processes. Blocks briefly. Raises StoreError."""
        try:
            lock = wait_for_lock(self.layout.lock, LOCK_S_MAX, make=True)
        except TimeoutError as error:
            raise StoreError(f"the store is busy: {error}") from None
        with lock:
            unsynced_copies.recover_after_reboot(self.layout)
            yield

    def lease(self, key: CopyKey) -> Flock | None:
        """Take the Copy's lock in shared mode, which prevents eviction. None if there is no such Copy."""
        try:
            return wait_for_lock(self.layout.lease(key), LEASE_S_MAX, shared=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except TimeoutError as error:
            raise StoreError(f"the state of a copy is unknown: {error}") from None

    def in_use(self, copy: Path) -> bool:
        """Whether a process holds the Copy's lock."""
        lock = try_lock(copy / "lease")
        if lock is None:
            return True
        lock.close()
        return False

    def candidates(self) -> list[Candidate]:
        """Return everything that could be removed, named by its path below the root."""
        now_s, layout = time.time(), self.layout
        found = [
            self._candidate(record, layout.copy(record.key).relative_to(layout.root), now_s)
            for record in layout.records()
        ]
        return found + [self._pull(Path(one.path)) for one in list_entries(layout.partials)]

    def _pull(self, path: Path) -> Candidate:
        """Build the eviction candidate for a pull. A running pull keeps the stored files that it uses; an abandoned
        pull may be removed.
        """
        lock_path = self.layout.locks / path.name
        lock = try_lock(lock_path, make=True)
        if lock is not None:
            remove_lock(lock, lock_path)
        room = path.name[:ORIGIN_DIGITS]
        blobs = {
            f"{room}/{one.name}": said.st_size
            for one in list_entries(path / "blobs")
            if (said := one.stat(follow_symlinks=False)).st_nlink > 1 and one.is_file(follow_symlinks=False)
        }
        name = str(path.relative_to(self.layout.root))
        return Candidate(name, blobs, exclusive_disk_bytes(path), left=lock is not None, in_use=lock is None)

    def _candidate(self, record: Record, path: Path, now_s: float) -> Candidate:
        key, copy = record.key, self.layout.root / path
        return Candidate(
            str(path),
            {f"{key.room}/{digest_file_name(digest)}": size for digest, size in record.blobs.items()},
            record.unpacked_bytes,
            age_s=max(now_s - (copy / "lease").stat().st_mtime, 0.0),
            cost_s=record.fetch_s,
            pinned=self.layout.pin(key.digest).exists(),
            in_use=self.in_use(copy),
        )

    def remove(self, name: str) -> bool:
        """Remove a candidate; requires `locked`. False if it is in use by now."""
        path = self.layout.root / name
        left = path.parent == self.layout.partials
        lease = self.layout.locks / path.name if left else path / "lease"
        try:
            lock = try_lock(lease, make=left)
        except FileNotFoundError:
            return True
        if lock is None:
            return False
        with lock:
            self.discard(path)
            if left:
                remove_lock(lock, lease)
        self.clean()
        return True

    @contextlib.contextmanager
    def aside(self) -> Iterator[Path]:
        """Provide a folder for work that makes no Copy, protected from cleanup while in use. Raises OSError."""
        path = self.layout.asides / token_hex(8)
        lock_path = self._aside_lock(path)
        lock = wait_for_lock(lock_path, LEASE_S_MAX, make=True)
        try:
            self._disk.folder(path)
            yield path
        finally:
            self._disk.remove(path)
            remove_lock(lock, lock_path)

    def _aside_lock(self, path: Path) -> Path:
        return self.layout.locks / f"aside-{path.name}"

    def discard(self, path: Path) -> None:
        """Move to the trash with one rename, even if it is in use; requires `locked`."""
        self._disk.move(path, self.layout.trash / token_hex(8))

    def clean(self) -> None:
        """Delete files that belong to no Copy, and the trash; requires `locked`."""
        for one in list_entries(self.layout.trash):
            self._disk.remove(Path(one.path))
        for room in list_entries(self.layout.blobs):
            for one in list_entries(Path(room.path)):
                if one.stat(follow_symlinks=False).st_nlink == 1:
                    self._disk.remove(Path(one.path))

    def settle(self) -> None:
        """Sync every Copy that is not yet on disk and update its record; must not run under `locked`. A Copy that the
        disk has lost is removed even if in use, since later reads may return anything. Raises OSError.
        """
        for record in [one for one in self.layout.records() if one.boot]:
            spoilt: OSError | None = None
            try:
                unsynced_copies.sync_copy(self.layout, record)
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError as error:
                if error.errno not in SPOILS:
                    raise
                spoilt = error
            copy = self.layout.copy(record.key)
            with self.locked():
                if self.layout.record(record.key) != record:
                    continue
                if spoilt is None:
                    self._disk.write(copy / "copy.json", msgspec.json.encode(msgspec.structs.replace(record, boot="")))
                    continue
                log.error("event=store_copy_lost digest=%s reason=%r", record.digest, describe_os_error(spoilt))
                self.discard(copy)
                for digest in record.blobs:
                    self._disk.remove(self.layout.blob(record.key, digest))
                self.clean()

    def sweep(self) -> None:
        """Remove all remains of crashes; requires `locked`."""
        now_s, layout = time.time(), self.layout
        keys = {record.key for record in layout.records(every=True)}
        whole, names = {layout.copy(key) for key in keys}, {key.name for key in keys}
        for room in list_entries(layout.copies):
            for one in list_entries(Path(room.path)):
                if Path(one.path) not in whole:  # caused by a faulty disk, never by a crash
                    self.discard(Path(one.path))
        for one in list_entries(layout.partials):
            if one.name in names or now_s - one.stat(follow_symlinks=False).st_mtime > LEFT_S_MAX:
                self.remove(f"{layout.partials.name}/{one.name}")
        for one in list_entries(layout.asides):
            lock = try_lock(self._aside_lock(Path(one.path)), make=True)
            if lock is not None:
                with lock:
                    self.discard(Path(one.path))
        for one in list_entries(layout.locks):
            with contextlib.suppress(FileNotFoundError):  # its holder has just released it
                lock = try_lock(Path(one.path))
                if lock is not None:
                    remove_lock(lock, Path(one.path))
        for folder in (layout.root, layout.pins):
            for one in list_entries(folder):
                if one.name.startswith(".pilotlight-"):
                    self._disk.remove(Path(one.path))
        self.clean()


@dataclass(slots=True)
class Copy:
    """A Copy that is not evicted until closed. Use as a context manager, or pass `lease.fd` to the process using it."""

    record: Record
    folder: Path
    """Folder of its files."""
    lease: Flock = field(repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the Copy's lock."""
        self.lease.close()

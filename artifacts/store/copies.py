"""What lies in a node's store: which Copies, who holds them, and how they and what breaks left are taken away. I/O.

Owns the store's one lock, the look at all that could go, and the going. Promises: a Copy goes whole, by one rename, and
never while somebody holds its lease; a file that another Copy has stays; whatever a break left is found and removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import msgspec

from artifacts.disk import locks
from artifacts.disk.disk import FULL, Disk, describe_os_error, list_entries
from artifacts.disk.locks import Flock
from artifacts.store import durability
from artifacts.store.eviction import Candidate
from artifacts.store.layout import (
    ROOM_DIGITS,
    CopyKey,
    Record,
    StoreError,
    StoreLayout,
    digest_file_name,
    exclusive_disk_bytes,
)

log = logging.getLogger("pilotlight.store")

SPOILS = FULL | {errno.EIO, errno.ESTALE}
"""What a disk says that lost what it was given."""
LOCK_S_MAX = 60.0
"""Removing large Copies takes a while."""
LEASE_S_MAX = 5.0
"""Who takes a Copy away, or looks whether it is used, holds its lease for moments."""
LEFT_S_MAX = 86_400.0
"""What a pull left is kept so long, so that the next goes on from there."""


class CopyStore:
    """All that is published, and all that was left."""

    def __init__(self, layout: StoreLayout, disk: Disk) -> None:
        self.layout = layout
        self._disk = disk

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among all processes. Blocks for moments. Raises StoreError."""
        try:
            lock = locks.wait_for_lock(self.layout.lock, LOCK_S_MAX, make=True)
        except TimeoutError as error:
            raise StoreError(f"the store is busy: {error}") from None
        with lock:
            durability.recover_after_reboot(self.layout)
            yield

    def lease(self, key: CopyKey) -> Flock | None:
        """Shared: nobody takes the Copy away while it is held. None: there is no such Copy."""
        try:
            return locks.wait_for_lock(self.layout.lease(key), LEASE_S_MAX, shared=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except TimeoutError as error:
            raise StoreError(f"a Copy is neither there nor gone: {error}") from None

    def in_use(self, copy: Path) -> bool:
        """Somebody holds its lease."""
        lock = locks.try_lock(copy / "lease")
        if lock is None:
            return True
        lock.close()
        return False

    def candidates(self) -> list[Candidate]:
        """All that could go, named by its path below the root."""
        now_s, layout = time.time(), self.layout
        found = [
            self._candidate(record, layout.copy(record.key).relative_to(layout.root), now_s)
            for record in layout.records()
        ]
        return found + [self._pull(Path(one.path)) for one in list_entries(layout.partials)]

    def _pull(self, path: Path) -> Candidate:
        """One that goes on holds the files that it found here; one that was left may go."""
        lock_path = self.layout.locks / path.name
        lock = locks.try_lock(lock_path, make=True)
        if lock is not None:
            locks.remove_lock(lock, lock_path)
        room = path.name[:ROOM_DIGITS]
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
        """Takes a candidate away; under `locked`. False: somebody holds it by now."""
        path = self.layout.root / name
        left = path.parent == self.layout.partials
        lease = self.layout.locks / path.name if left else path / "lease"
        try:
            lock = locks.try_lock(lease, make=left)
        except FileNotFoundError:
            return True
        if lock is None:
            return False
        with lock:
            self.discard(path)
            if left:
                locks.remove_lock(lock, lease)
        self.clean()
        return True

    @contextlib.contextmanager
    def aside(self) -> Iterator[Path]:
        """A folder for work that makes no Copy: nobody takes it away while the process is in here. Raises OSError."""
        path = self.layout.asides / token_hex(8)
        lock_path = self._aside_lock(path)
        lock = locks.wait_for_lock(lock_path, LEASE_S_MAX, make=True)
        try:
            self._disk.folder(path)
            yield path
        finally:
            self._disk.remove(path)
            locks.remove_lock(lock, lock_path)

    def _aside_lock(self, path: Path) -> Path:
        return self.layout.locks / f"aside-{path.name}"

    def discard(self, path: Path) -> None:
        """Out of sight by one rename, whoever holds it; under `locked`."""
        self._disk.move(path, self.layout.trash / token_hex(8))

    def clean(self) -> None:
        """What nobody has: files of no Copy, and what is on its way out; under `locked`."""
        for one in list_entries(self.layout.trash):
            self._disk.remove(Path(one.path))
        for room in list_entries(self.layout.blobs):
            for one in list_entries(Path(room.path)):
                if one.stat(follow_symlinks=False).st_nlink == 1:
                    self._disk.remove(Path(one.path))

    def settle(self) -> None:
        """Every Copy comes onto the disk that is not there, and its record says so; not under `locked`. One that the
        disk cannot keep goes, whoever holds it: what is read of it later may be anything. Raises OSError.
        """
        for record in [one for one in self.layout.records() if one.boot]:
            spoilt: OSError | None = None
            try:
                durability.sync_copy(self.layout, record)
            except FileNotFoundError:  # it went away meanwhile
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
        """All that breaks left; under `locked`."""
        now_s, layout = time.time(), self.layout
        keys = {record.key for record in layout.records(every=True)}
        whole, names = {layout.copy(key) for key in keys}, {key.name for key in keys}
        for room in list_entries(layout.copies):
            for one in list_entries(Path(room.path)):
                if Path(one.path) not in whole:  # no break of ours leaves one; a disk may
                    self.discard(Path(one.path))
        for one in list_entries(layout.partials):
            if one.name in names or now_s - one.stat(follow_symlinks=False).st_mtime > LEFT_S_MAX:
                self.remove(f"{layout.partials.name}/{one.name}")
        for one in list_entries(layout.asides):
            lock = locks.try_lock(self._aside_lock(Path(one.path)), make=True)
            if lock is not None:
                with lock:
                    self.discard(Path(one.path))
        for one in list_entries(layout.locks):
            with contextlib.suppress(FileNotFoundError):  # who held it has just let go
                lock = locks.try_lock(Path(one.path))
                if lock is not None:
                    locks.remove_lock(lock, Path(one.path))
        for folder in (layout.root, layout.pins):
            for one in list_entries(folder):
                if one.name.startswith(".pilotlight-"):
                    self._disk.remove(Path(one.path))
        self.clean()

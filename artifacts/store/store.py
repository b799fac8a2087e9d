"""A node's weight store: fetches each Copy once, keeps it while it is useful, and gives it to authorized callers. I/O.

Only one process of a node fetches a digest at a time. Space is reserved before the first byte, so that the fetch fails
before the disk is full. A Copy becomes visible atomically, also after a crash at any point, without waiting for the
disk (`unsynced_copies`). A caller that did not fetch a private Copy itself gets it only if the registry authorizes the
caller. A Copy in use is never evicted. The given `Fetch` downloads and verifies the content.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from time import time as unix_s
from typing import NamedTuple, Self

from artifacts.dialects.artifact_contents import File
from artifacts.digest import Digest
from artifacts.disk import locks as flocks
from artifacts.disk.durable_writes import FULL, SHUT, Disk, describe_os_error
from artifacts.disk.thread_wait import run_in_thread
from artifacts.registry_errors import MismatchError, UnreachableError
from artifacts.store.copies import Copy, CopyStore
from artifacts.store.copy_record import Record
from artifacts.store.file_names import CopyKey
from artifacts.store.layout import ForbiddenError, HeldError, NoRoomError, StoreError, StoreLayout
from artifacts.store.permission_cache import Permits
from artifacts.store.pull import CopySpec, Job, Pull
from artifacts.store.reservations import SPARE_BYTES, Evicted, Free, Reservations
from artifacts.store.victim_selection import Choice, select_victims

LOCKS_MAX = 256
"""Maximum locked files per artifact; if there are more, the smaller ones may be fetched twice."""
AWAY_WAIT_S = 5.0
"""Timeout of the access check for a caller with an earlier grant; after it the registry counts as down."""

log = logging.getLogger("pilotlight.artifacts.store")

Fetch = Callable[[Job], Awaitable[None]]
"""Fetches the files of a job. Raises RegistryError, OSError, NoRoomError."""


class Caller(NamedTuple):
    """The caller of a request."""

    fingerprint: str
    """Fingerprint of its login; unique per login and not reversible."""
    permitted: Callable[[], Awaitable[bool]]
    """Asks the registry whether this login has access (`manifests.can_pull_manifest`). Raises RegistryError."""
    vouched: bool = True
    """Whether the registry itself just granted access; a fetch from a mirror or peer proves no grant."""


class Row(NamedTuple):
    """A Copy as listed for users."""

    record: Record
    used_unix_s: float
    pinned: bool
    in_use: bool


class Store:
    """The store below `root`. `bytes_max`: `weights.storeBytesMax`; `while_away`: earlier grants are valid while the
    registry is down.
    """

    def __init__(
        self, root: Path, *, bytes_max: int | None = None, spare_bytes: int = SPARE_BYTES, while_away: bool = True,
        permits: Permits | None = None, disk: Disk | None = None, free: Free = os.statvfs,
        evicted: Evicted = lambda _: None,
    ) -> None:  # fmt: skip
        self._disk = disk or Disk()
        self.layout = StoreLayout(root, self._disk)
        self._shelf = CopyStore(self.layout, self._disk)
        self._ledger = Reservations(self._shelf, bytes_max, spare_bytes, free, evicted)
        self.permits = Permits(root / "permits", self._disk) if permits is None else permits
        self._while_away = while_away
        self._settling = threading.Lock()
        self._to_settle: set[asyncio.Task[None]] = set()

    def open(self) -> Self:
        """Create the folders and remove the remains of crashes. A read-only store can still be read. Blocks.

        Raises StoreError.
        """
        try:
            self.layout.make(self._disk)
            with self._shelf.locked():
                self._shelf.sweep()
        except OSError as error:
            if error.errno not in SHUT:
                raise self._said(error) from None
            log.warning("event=store_read_only reason=%r", error.strerror)
        return self

    def find(self, key: CopyKey) -> Copy | None:
        """Return the Copy, locked, without an access check. Raises StoreError."""
        lease = self._shelf.lease(key)
        if lease is None:
            return None
        record = self.layout.record(key)
        if record is None:  # it will be fetched again
            lease.close()
            return None
        with suppress(OSError):  # the store may be read-only
            os.utime(lease.fd)
        return Copy(record, self.layout.copy(key) / "files", lease)

    async def ensure(self, wanted: CopySpec, fetch: Fetch, caller: Caller | None) -> Copy:
        """Return the Copy, locked; fetch it if it is not stored. `caller`: None only for weights that need no login.

        Raises StoreError, and what `fetch` raises.
        """
        key, wait_s = wanted.key, flocks.FIRST_WAIT_S
        with self._store_errors():
            while True:
                found = await run_in_thread(lambda: self.find(key), _closed)
                if found is not None:
                    return await self._admitted(found, key, caller)
                copy = await self._flown(wanted, fetch, caller)
                if copy is not None:
                    return copy
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, flocks.WAIT_S_MAX)

    async def admit(self, key: CopyKey, caller: Caller | None) -> Copy | None:
        """Return a stored Copy, locked, after an access check, or None. Raises StoreError, RegistryError."""
        with self._store_errors():
            found = await run_in_thread(lambda: self.find(key), _closed)
            return None if found is None else await self._admitted(found, key, caller)

    async def _flown(self, wanted: CopySpec, fetch: Fetch, caller: Caller | None) -> Copy | None:
        """Fetch the Copy; None if another process is fetching it or has just done so."""
        flight = self.layout.flight(wanted.key)
        lock = flocks.try_lock(flight, make=True)
        if lock is None:
            return None
        try:
            if self.layout.lease(wanted.key).exists() and self.layout.record(wanted.key) is not None:
                return None
            return await self._fetched(wanted, fetch, caller)
        finally:
            flocks.remove_lock(lock, flight)

    async def _fetched(self, wanted: CopySpec, fetch: Fetch, caller: Caller | None) -> Copy:
        pull, keep, copy = Pull(wanted, self._shelf, self._ledger, self._disk.later()), True, None

        async def more(more_bytes: int) -> None:
            await run_in_thread(lambda: pull.more(more_bytes))

        try:
            async with AsyncExitStack() as locks:
                for digest in list_blobs_to_lock(wanted.files):
                    await locks.enter_async_context(flocks.hold_lock(self.layout.blob_lock(wanted.key, digest)))
                job = await run_in_thread(lambda: pull.begin(more))
                if job.files or wanted.unpacked_bytes:
                    await fetch(job)
                copy = await run_in_thread(lambda: pull.publish(private=caller is not None), _closed)
                keep = False
        except OSError as error:
            keep = error.errno not in FULL
            raise
        except (StoreError, MismatchError):  # nothing valid to resume, or no space to keep it
            keep = False
            raise
        finally:
            try:
                await run_in_thread(lambda: pull.end(keep=keep))
            except BaseException:
                _closed(copy)
                raise
        try:
            if caller is not None and caller.vouched:
                asked, now_s = (caller.fingerprint, wanted.key.origin, wanted.key.digest), unix_s()
                await run_in_thread(lambda: self.permits.answered(asked, now_s, yes=True))
        except BaseException:
            copy.close()
            raise
        if copy.record.boot:
            self.settle_soon()
        return copy

    def settle_soon(self) -> None:
        """Start syncing all Copies that are not on disk yet, also those of other processes. They are usable meanwhile;
        only the end of the event loop waits for the disk.
        """
        task = asyncio.create_task(run_in_thread(self._settle))
        self._to_settle.add(task)
        task.add_done_callback(self._to_settle.discard)

    def _settle(self) -> None:
        with self._settling:
            try:
                self._shelf.settle()
            except (OSError, StoreError) as error:  # the next sync reports it again
                said = describe_os_error(error) if isinstance(error, OSError) else str(error)
                log.warning("event=store_sync_failed reason=%r", said)

    async def settled(self) -> None:
        """Wait until all started syncs are done."""
        await asyncio.gather(*self._to_settle)

    async def _admitted(self, found: Copy, key: CopyKey, caller: Caller | None) -> Copy:
        """Return the Copy if the caller may access it. Raises ForbiddenError, RegistryError."""
        try:
            if found.record.private:
                await self._judge(key, caller)
        except BaseException:
            found.close()
            raise
        return found

    async def _judge(self, key: CopyKey, caller: Caller | None) -> None:
        if caller is None:
            raise ForbiddenError(f"{key.digest} was fetched with a login, and this caller has none")
        asked = (caller.fingerprint, key.origin, key.digest)
        now_s = unix_s()
        if self.permits.fresh(asked, now_s):
            return
        was_let_in = self._while_away and self.permits.while_away(asked, now_s)
        try:
            async with asyncio.timeout(AWAY_WAIT_S if was_let_in else None):
                yes = await caller.permitted()
        except (UnreachableError, TimeoutError):
            if not was_let_in:
                raise
            log.warning("event=registry_unreachable digest=%s", key.digest)
            return
        await run_in_thread(lambda: self.permits.answered(asked, unix_s(), yes=yes))
        if not yes:
            raise ForbiddenError(f"{key.origin} denies this login access to {key.digest}")

    async def forbid(self, key: CopyKey, caller: Caller) -> None:
        """Revoke an earlier grant after the source denied access to the caller. Raises StoreError."""
        asked = (caller.fingerprint, key.origin, key.digest)
        with self._store_errors():
            await run_in_thread(lambda: self.permits.answered(asked, unix_s(), yes=False))

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """Provide a folder on the store's disk for work that makes no Copy; removed at the end or, after a crash, when
        the store is next opened. Blocks. Raises StoreError.
        """
        with self._store_errors(), self._shelf.aside() as folder:
            yield folder

    def rows(self) -> list[Row]:
        """Return all Copies, most recently used first. Raises StoreError."""
        with ExitStack() as stack:
            with suppress(OSError):  # in a read-only store nothing is removed meanwhile
                stack.enter_context(self._shelf.locked())
            found = [self._row(record) for record in self.layout.records()]
        return sorted(found, key=lambda row: (-row.used_unix_s, row.record.digest))

    def _row(self, record: Record) -> Row:
        key = record.key
        used_unix_s, pinned = self.layout.lease(key).stat().st_mtime, self.layout.pin(key.digest).exists()
        return Row(record, used_unix_s, pinned, self._shelf.in_use(self.layout.copy(key)))

    def pin(self, digest: Digest) -> None:
        """Protect all current and future Copies of the digest from eviction. Raises StoreError."""
        with self._store_errors():
            self._disk.write(self.layout.pin(digest), b"")

    def unpin(self, digest: Digest) -> None:
        """Allow eviction again. Raises StoreError."""
        with self._store_errors():
            self._disk.remove(self.layout.pin(digest))
            self._disk.sync(self.layout.pins)

    def evict(self, key: CopyKey, bad: Iterable[Digest] = ()) -> None:
        """Remove a Copy, and its `bad` files so that later Copies do not reuse them. Raises HeldError, StoreError."""
        if self.layout.pin(key.digest).exists():
            raise HeldError(f"{key.digest} is pinned: `pilotlight weights unpin` first")
        with self._store_errors(), self._shelf.locked():
            if not self._shelf.remove(str(self.layout.copy(key).relative_to(self.layout.root))):
                raise HeldError(f"{key.digest} is in use: stop its users first")
            for digest in bad:
                self._disk.remove(self.layout.blob(key, digest))

    def free(self, needed_bytes: int) -> Choice:
        """Evict the least valuable Copies for this many bytes. Raises StoreError."""
        with self._store_errors(), self._shelf.locked():
            choice = select_victims(self._shelf.candidates(), needed_bytes)
            return choice._replace(gone=tuple(name for name in choice.gone if self._shelf.remove(name)))

    def stored_bytes(self) -> int:
        """Return the size of all Copies, counting shared files once."""
        return self._ledger.stored_bytes()

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise StoreError for an OSError."""
        try:
            yield
        except OSError as error:
            raise self._said(error) from None

    def _said(self, error: OSError) -> StoreError:
        if error.errno in FULL:
            return NoRoomError(f"the store's disk became full because of other files: {describe_os_error(error)}")
        if error.errno in SHUT:
            return StoreError(f"the store {self.layout.root} cannot be written: {describe_os_error(error)}")
        return StoreError(f"the store {self.layout.root}: {describe_os_error(error)}")


def list_blobs_to_lock(files: Iterable[File]) -> list[Digest]:
    """Return the raw files to lock, in a global order that avoids deadlocks."""
    sizes = {one.digest: one.size for one in files if one.encoding == "raw"}
    return sorted(sorted(sizes, key=lambda digest: (-sizes[digest], digest))[:LOCKS_MAX])


def _closed(copy: Copy | None) -> None:
    if copy is not None:
        copy.close()

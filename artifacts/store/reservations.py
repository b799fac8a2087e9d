"""Room in a node's store: who has how much, who may have more, and what goes for it. I/O.

Owns reservations: room is promised before the first byte comes, over all processes of the node. Promises: what is there
and what is promised stay together below `bytes_max`, and leave `spare_bytes` of the disk free; a promise ends with the
process that has it, since it is a lock on a file, and no process id is believed. All of it under the shelf's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.disk import locks
from artifacts.disk.disk import list_entries
from artifacts.disk.locks import Flock
from artifacts.store import eviction
from artifacts.store.copies import CopyStore
from artifacts.store.layout import CopyKey, NoRoomError, exclusive_disk_bytes

SPARE_BYTES = 1 << 30
"""Of the disk, left for others: logs, images, the kubelet."""
SPARE_FILES = 1024
TRIES_MAX = 8
"""Of a choice that somebody's lease overtook."""
Free = Callable[[Path], os.statvfs_result]
Evicted = Callable[[str], None]
"""Hears of each that goes for a pull's room: `room` of a Copy, `left` of what a broken pull left."""


@dataclass(slots=True)
class Reservation:
    """Room that is promised to one pull."""

    path: Path
    bytes: int = 0
    lock: Flock | None = field(default=None, repr=False)

    def close(self) -> None:
        """Gives back what was not used."""
        lock, self.lock = self.lock, None
        if lock is not None:
            locks.remove_lock(lock, self.path)


class Reservations:
    """`bytes_max`: of the store, None: the disk is the bound; `free`: what a disk has left."""

    def __init__(
        self, shelf: CopyStore, bytes_max: int | None, spare_bytes: int, free: Free = os.statvfs,
        evicted: Evicted = lambda _: None,
    ) -> None:  # fmt: skip
        self._shelf = shelf
        self._layout = shelf.layout
        self._bytes_max = bytes_max
        self._spare_bytes = spare_bytes
        self._free = free
        self._evicted = evicted

    def reserve(self, room: Reservation, key: CopyKey, wanted_bytes: int, files: int = 0) -> tuple[str, ...]:
        """`wanted_bytes` in all for this pull, what it has already included; what went for it. Raises NoRoomError."""
        gone: list[str] = []
        for _ in range(TRIES_MAX):
            short = self._short_bytes(key, wanted_bytes, files)
            if short <= 0:
                self._write(room, wanted_bytes)
                return tuple(gone)
            choice = eviction.select_victims(self._shelf.candidates(), short)
            if not choice.gone:
                raise NoRoomError(
                    f"no room for {wanted_bytes} bytes: {choice.lacking_bytes} are missing, with "
                    f"{choice.in_use_bytes} in use and {choice.pinned_bytes} pinned; "
                    "unpin or stop something, raise storeBytesMax, or give the store a larger disk"
                )
            for name in [name for name in choice.gone if self._shelf.remove(name)]:
                gone.append(name)
                self._evicted("room" if name.startswith(f"{self._layout.copies.name}/") else "left")
        raise NoRoomError(f"no room for {wanted_bytes} bytes: what could go is in use again each time")

    def _write(self, room: Reservation, wanted_bytes: int) -> None:
        if room.lock is None:
            room.path.unlink(missing_ok=True)
            room.lock = locks.try_lock(room.path, make=True)
        room.path.write_text(str(wanted_bytes))
        room.bytes = wanted_bytes

    def _short_bytes(self, key: CopyKey, wanted_bytes: int, files: int) -> int:
        """How many bytes must come free first."""
        promised, to_come = 0, 0
        for one in list_entries(self._layout.partials):
            path = Path(one.path)
            taken = exclusive_disk_bytes(path)
            said = wanted_bytes if one.name == key.name else reserved_bytes(path / "reservation")
            promised += max(said, taken)
            to_come += max(said - taken, 0)
        left = self._free(self._layout.root)
        if left.f_files and left.f_favail < files + SPARE_FILES:
            raise NoRoomError(f"no room for {files} files: the store's disk has {left.f_favail} inodes left")
        over = self.stored_bytes() + promised - self._bytes_max if self._bytes_max is not None else 0
        return max(over, to_come + self._spare_bytes - left.f_bavail * left.f_frsize)

    def stored_bytes(self) -> int:
        """Of all Copies, files that several have once."""
        blobs = (one for room in list_entries(self._layout.blobs) for one in list_entries(Path(room.path)))
        return sum(one.stat(follow_symlinks=False).st_size for one in blobs) + sum(
            record.unpacked_bytes for record in self._layout.records()
        )


def reserved_bytes(path: Path) -> int:
    """What this reservation promises; nothing where nobody has it any more."""
    try:
        lock = locks.try_lock(path, shared=True)
        if lock is not None:
            lock.close()
            return 0
        return int(path.read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0

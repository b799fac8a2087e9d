"""Space in a node's store: reserves it for pulls before the first byte arrives, and evicts for it. I/O.

Reservations hold across all processes of the node. Stored and reserved bytes together stay below `bytes_max` and leave
`spare_bytes` of the disk free. A reservation is a file lock and therefore ends with its process; process ids are not
used. All methods require the store's lock (`CopyStore.locked`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.disk.durable_writes import list_entries
from artifacts.disk.locks import Flock, remove_lock, try_lock
from artifacts.store import victim_selection
from artifacts.store.copies import CopyStore
from artifacts.store.file_names import CopyKey
from artifacts.store.layout import NoRoomError, exclusive_disk_bytes

SPARE_BYTES = 1 << 30
"""Disk space reserved for other uses: logs, images, the kubelet."""
SPARE_FILES = 1024
TRIES_MAX = 8
"""Maximum number of times that victims are selected: they may come into use before they are removed."""
Free = Callable[[Path], os.statvfs_result]
Evicted = Callable[[str], None]
"""Called per eviction: `room` for a Copy evicted for space, `left` for the remains of an interrupted pull."""


@dataclass(slots=True)
class Reservation:
    """Space reserved for one pull."""

    path: Path
    bytes: int = 0
    lock: Flock | None = field(default=None, repr=False)

    def close(self) -> None:
        """Release the reservation."""
        lock, self.lock = self.lock, None
        if lock is not None:
            remove_lock(lock, self.path)


class Reservations:
    """`bytes_max`: limit of the store, None: only the disk limits it; `free`: returns the disk's free space."""

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
        """Reserve `wanted_bytes` in total for this pull; return the evicted candidates. Raises NoRoomError."""
        gone: list[str] = []
        for _ in range(TRIES_MAX):
            short = self._short_bytes(key, wanted_bytes, files)
            if short <= 0:
                self._write(room, wanted_bytes)
                return tuple(gone)
            choice = victim_selection.select_victims(self._shelf.candidates(), short)
            if not choice.gone:
                raise NoRoomError(
                    f"no room for {wanted_bytes} bytes: {choice.lacking_bytes} are missing, with "
                    f"{choice.in_use_bytes} in use and {choice.pinned_bytes} pinned; "
                    "unpin copies, stop replicas, raise storeBytesMax, or use a larger disk"
                )
            for name in [name for name in choice.gone if self._shelf.remove(name)]:
                gone.append(name)
                self._evicted("room" if name.startswith(f"{self._layout.copies.name}/") else "left")
        raise NoRoomError(f"no room for {wanted_bytes} bytes: the copies to evict were in use again each time")

    def _write(self, room: Reservation, wanted_bytes: int) -> None:
        if room.lock is None:
            room.path.unlink(missing_ok=True)
            room.lock = try_lock(room.path, make=True)
        room.path.write_text(str(wanted_bytes))
        room.bytes = wanted_bytes

    def _short_bytes(self, key: CopyKey, wanted_bytes: int, files: int) -> int:
        """Return how many bytes must be freed first."""
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
        """Return the size of all Copies, counting shared files once."""
        blobs = (one for room in list_entries(self._layout.blobs) for one in list_entries(Path(room.path)))
        return sum(one.stat(follow_symlinks=False).st_size for one in blobs) + sum(
            record.unpacked_bytes for record in self._layout.records()
        )


def reserved_bytes(path: Path) -> int:
    """Return the bytes of a reservation; 0 if no process holds it any more."""
    try:
        lock = try_lock(path, shared=True)
        if lock is not None:
            lock.close()
            return 0
        return int(path.read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0

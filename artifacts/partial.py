"""One blob's file while it comes: written anywhere, summed from its front, remembered, and at last given its name. I/O.

Owns `partial/<digest>` and its sidecar. Blocks: runs in threads. Promises: a part is remembered only when it is on the
disk; the file gets its final name only with all of its bytes summed and on the disk, so no crash leaves a file there
that is not the blob; one whose sum does not hold goes away whole, since nobody knows which of its bytes lied. One
process at a time has it (flock).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from pathlib import Path

from artifacts import digests, parts, sidecar
from artifacts.digests import Digest
from artifacts.disk import Disk, DiskError, Opened
from artifacts.parts import Ledger

FOLDER = "partial"
CHECKPOINT_BYTES = 32 << 20
"""So much more on the disk is worth a line in the sidecar."""
SUM_BYTES = 1 << 20
TURN_BYTES = 4 << 20
"""So much is summed in one go by a thread that has a connection to look after."""
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_room = threading.local()


class Partial:
    """Of one blob. Close it."""

    def __init__(self, folder: Path, digest: Digest, size: int, disk: Disk | None = None) -> None:
        """Goes on with what is there. Raises DiskError where another process has it, and OSError."""
        self.digest = digest
        self.size = size
        self._disk = disk or Disk()
        self._folder = folder / FOLDER
        self._path = self._folder / str(digest)
        self._sidecar_path = self._folder / f"{digest}.parts"
        self._lock = threading.Lock()
        self._summing = threading.Lock()
        self._keeping = threading.Lock()
        self._summed = hashlib.new(digests.algorithm(digest))
        self._summed_bytes = 0
        self._sidecar: Opened | None = None
        self._disk.folder(self._folder)
        self.file = Opened(self._own(), self._path)
        try:
            self.ledger = self._resumed()
            self._begin()
        except BaseException:
            self.close()
            raise
        self.resumed = self.ledger.came
        """Bytes that were there before."""
        self._kept = set(self.ledger.full)

    def close(self) -> None:
        """Leaves it as it is, for the next."""
        for one in (self._sidecar, self.file):
            if one is not None and one.number >= 0:
                os.close(one.number)
        self.file, self._sidecar = Opened(-1, self._path), None

    def put(self, at: int, pieces: list[bytes]) -> None:
        """Bytes from `at` on."""
        self._disk.put(self.file, pieces, at)
        self.wrote(at, sum(len(piece) for piece in pieces))

    def wrote(self, at: int, count: int) -> None:
        """`count` bytes from `at` on are in the file; sums a little of what is ready."""
        with self._lock:
            self.ledger.wrote(at, count)
        self.sum_up(TURN_BYTES)

    def sum_up(self, most: int) -> None:
        """Up to `most` bytes before the frontier, unless another thread is at it."""
        if not self._summing.acquire(blocking=False):
            return
        try:
            self._sum(most)
        finally:
            self._summing.release()

    @property
    def wants_keeping(self) -> bool:
        """There is enough that the sidecar does not say."""
        return (len(self.ledger.full) - len(self._kept)) * self.ledger.part >= CHECKPOINT_BYTES

    def keep(self) -> None:
        """Parts that have come onto the disk, then into the sidecar."""
        with self._keeping:
            with self._lock:
                new = self.ledger.full - self._kept
            if not new:
                return
            self._disk.sync(self.file)
            if self._sidecar is not None:
                self._disk.append(self._sidecar, sidecar.lines(new))
            self._kept |= new

    def publish(self, path: Path) -> bool:
        """Where the sum of all bytes holds: gives the file its name `path`. Else drops it, and is False."""
        with self._summing:
            self._sum(self.size)
        if not self.ledger.complete or self._summed_bytes != self.size:
            raise RuntimeError(f"{self.digest} is not complete")
        if self._summed.hexdigest() != digests.encoded(self.digest):
            self.drop()
            return False
        self._disk.folder(path.parent)
        self._disk.sync(self.file)
        self._disk.move(self._path, path)
        self._disk.remove(self._sidecar_path)
        return True

    def drop(self) -> None:
        """The sidecar first: a file without one is begun anew, a sidecar without its file says nothing."""
        self._disk.remove(self._sidecar_path)
        self._disk.sync(self._folder)
        self._disk.remove(self._path)
        self._disk.sync(self._folder)

    def _own(self) -> int:
        """The file, with nobody else at it."""
        while True:
            number = os.open(self._path, _OPEN, 0o644)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(number), self._path.lstat()):
                    return number
            except BlockingIOError:
                os.close(number)
                raise DiskError(f"{self.digest} is being fetched into {self._folder} by another process") from None
            except FileNotFoundError:
                pass  # it got its name, or went away, while we waited
            os.close(number)

    def _resumed(self) -> Ledger:
        """What is there. Without a sidecar, or with another length, nothing."""
        try:
            text = self._sidecar_path.read_bytes()
        except FileNotFoundError:
            text = b""
        found = sidecar.read(text, self.digest, self.size)
        if found is None or os.fstat(self.file.number).st_size != self.size:
            return Ledger(self.size, parts.part_bytes(self.size))
        return found

    def _begin(self) -> None:
        """A file of its length, and a sidecar that says what is there, both with names that are on the disk."""
        if not self.ledger.full:
            if self._sidecar_path.exists():
                self._disk.remove(self._sidecar_path)
                self._disk.sync(self._folder)
            os.ftruncate(self.file.number, 0)
            os.ftruncate(self.file.number, self.size)
        self._disk.sync(self.file)
        new = self._sidecar_path.with_name(f"{self.digest}.new")
        self._sidecar = Opened(os.open(new, _OPEN | os.O_TRUNC | os.O_APPEND, 0o644), new)
        head = sidecar.head(self.digest, self.size, self.ledger.part)
        self._disk.append(self._sidecar, head + sidecar.lines(self.ledger.full))
        self._disk.move(new, self._sidecar_path)
        self._sidecar = self._sidecar._replace(path=self._sidecar_path)

    def _sum(self, most: int) -> None:
        with self._lock:
            end = min(self.ledger.frontier, self._summed_bytes + most)
        room: bytearray = _room.__dict__.setdefault("bytes", bytearray(SUM_BYTES))
        view = memoryview(room)
        while self._summed_bytes < end:
            count = os.preadv(self.file.number, [view[: end - self._summed_bytes]], self._summed_bytes)
            if not count:
                raise OSError(5, "the file is shorter than what was written")
            self._summed.update(view[:count])
            self._summed_bytes += count

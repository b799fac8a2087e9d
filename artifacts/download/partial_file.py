"""Partial file of one blob: written in any order, hashed from the front, resumable, and finally published. I/O.

Manages `partial/<digest>` and its sidecar. Calls block: run them in threads. Progress is recorded as soon as bytes are
in the file, valid while the machine runs, and again permanently once they are synced to disk. The file gets its final
name only after all bytes are hashed and synced, so no crash leaves a wrong file under that name. If the digest does not
match, the file is deleted except for parts that match known part digests. A flock admits one process at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from artifacts.digest import Digest, get_algorithm, get_hex, parse_digest
from artifacts.disk.durable_writes import Disk, DiskError, OpenFile
from artifacts.download import progress_file
from artifacts.oci import blob_progress
from artifacts.oci.blob_progress import BlobProgress

FOLDER = "partial"
CHECKPOINT_BYTES = 256 << 20
"""When this many bytes of complete parts are unsynced, they are synced before the blob is complete. A power loss costs
about this much at most."""
LATE_CHECKPOINT_BYTES = 2 << 30
"""The same limit if syncs are deferred. It is higher, since this sync waits for the disk even then."""
SUM_BYTES = 256 << 10
"""Bytes read back and hashed at once; fits into a core's cache."""
TURN_BYTES = 4 << 20
"""Bytes hashed in one go by a thread that also serves a connection."""
LAG_BYTES = 8 << 20
"""Unhashed bytes that justify a separate thread."""
START_BYTES = 8 << 20
"""Writeback starts after this many bytes, so that the final sync is short."""
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_room = threading.local()


class Partial:
    """The partial file of one blob. Must be closed."""

    def __init__(
        self,
        folder: Path,
        digest: Digest,
        size: int,
        disk: Disk | None = None,
        *,
        learned: Callable[[Digest], None] | None = None,
    ) -> None:
        """Open or resume the file. `learned`: as in `blob_download.BlobTarget`. Raises OSError, DiskError if another
        process holds the file.
        """
        self.digest = digest
        self.size = size
        self._learned = learned
        self._disk = disk or Disk()
        self._folder = folder / FOLDER
        self._path = self._folder / str(digest)
        self._sidecar_path = self._folder / f"{digest}.parts"
        self._lock = threading.Lock()
        self._summing = threading.Lock()
        self._keeping = threading.Lock()
        self._summed = hashlib.new(get_algorithm(digest))
        self._summed_bytes = 0
        self._sidecar: OpenFile | None = None
        self._disk.folder(self._folder)
        self.file = OpenFile(self._own(), self._path)
        try:
            self.ledger = self._resumed()
            self._begin()
        except BaseException:
            self.close()
            raise
        self.resumed = self.ledger.came
        """Bytes present before this process started."""
        self._ready = self.ledger.frontier
        """All bytes before this offset may be hashed."""
        self._kept = set(self.ledger.full)
        """Parts that are synced and recorded as such."""
        self._noted = set(self.ledger.full)
        """Parts that the sidecar records as present."""
        self._marked = self.ledger.begun()
        """Recorded progress of incomplete parts."""
        self._mark_bytes = blob_progress.mark_bytes(size)

    def close(self) -> None:
        """Close the file and leave it for resumption."""
        for one in (self._sidecar, self.file):
            if one is not None and one.number >= 0:
                os.close(one.number)
        self.file, self._sidecar = OpenFile(-1, self._path), None

    def put(self, at: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Write bytes at offset `at`."""
        self._disk.put(self.file, pieces, at)
        self.wrote(at, sum(len(piece) for piece in pieces), pieces)

    def wrote(self, at: int, count: int, pieces: Sequence[bytes | memoryview] = ()) -> None:
        """Record that `count` bytes from `at` on are in the file; `pieces`: all of them, if they passed through memory.

        A small blob, fetched by one request, is hashed immediately, while the bytes are in a core's cache.
        """
        with self._lock:
            self.ledger.wrote(at, count)
            self._ready = self.ledger.frontier
            self._note(max(at, at + count - 1) // self.ledger.part)
        first, end = at // START_BYTES * START_BYTES, (at + count) // START_BYTES * START_BYTES
        end = self.size if at + count == self.size else end
        if first < end:
            self._disk.start(self.file, first, end - first)
        if self.size <= blob_progress.WHOLE_BYTES_MAX and self._summing.acquire(blocking=False):
            try:
                if pieces and self._summed_bytes == at:
                    for piece in pieces:
                        self._summed.update(piece)
                    self._summed_bytes += count
                self._sum(TURN_BYTES)
            finally:
                self._summing.release()

    def wants(self) -> list[Callable[[], None]]:
        """Return background jobs for an idle thread; each may run only once at a time."""
        jobs = []  # called after each piece
        waiting = (len(self.ledger.full) - len(self._kept)) * self.ledger.part
        limit = LATE_CHECKPOINT_BYTES if self._disk.owed else CHECKPOINT_BYTES
        if waiting >= limit and not self.ledger.complete and not self._keeping.locked():
            jobs.append(self.keep)  # a complete blob is synced when it is published
        if self._ready - self._summed_bytes >= LAG_BYTES and not self._summing.locked():
            jobs.append(self.sum_up)
        return jobs

    def sum_up(self) -> None:
        """Hash all ready bytes, including those that become ready meanwhile."""
        with self._summing:
            while self._summed_bytes < self._ready:
                self._sum(TURN_BYTES)

    def keep(self) -> None:
        """Sync complete parts to disk, then record them in the sidecar."""
        with self._keeping:
            with self._lock:
                new = self.ledger.full - self._kept
                if not new:
                    return
                noted = self._opened()
            self._disk.settle(self.file)
            self._disk.append(noted, progress_file.format_parts(new))
            self._disk.settle(noted)
            self._disk.settle(self._folder)
            self._kept |= new

    def publish(self, path: Path) -> bool:
        """Rename the file to `path` if its digest matches, or if it was unknown and has been computed. Returns False on
        a mismatch; then call `keep_matching_parts`.
        """
        with self._summing:
            late = self.size - self._summed_bytes >= LAG_BYTES
            if late:  # hash and sync concurrently
                with ThreadPoolExecutor(1, thread_name_prefix="sync") as pool:
                    synced = pool.submit(self._disk.sync, self.file)
                    self._sum(self.size)
                synced.result()
            else:
                self._sum(self.size)
        if not self.ledger.complete or self._summed_bytes != self.size:
            raise RuntimeError(f"{self.digest} is not complete")
        if self._learned is not None:
            self._learned(parse_digest(f"{get_algorithm(self.digest)}:{self._summed.hexdigest()}"))
        elif self._summed.hexdigest() != get_hex(self.digest):
            return False
        self._disk.folder(path.parent)
        if not late:
            self._disk.sync(self.file)
        self._disk.move(self._path, path)
        self._disk.remove(self._sidecar_path)
        return True

    def keep_matching_parts(self, sums: Sequence[str]) -> bool:
        """After a digest mismatch keep the parts that match `sums` (SHA-256, one per part) for the next open. If bad
        parts cannot be identified, delete everything and return False.
        """
        good = set[int]()
        if len(sums) == self.ledger.count:
            good = {part for part, summed in enumerate(sums) if self._part_sum(part) == summed}
        if good and len(good) < self.ledger.count:
            self._rewrite_sidecar(good, {})
            return True
        self.drop()
        return False

    def _part_sum(self, part: int) -> str:
        at, end = self.ledger.span(part)
        summed, room = hashlib.sha256(), memoryview(bytearray(SUM_BYTES))
        while at < end:
            count = os.preadv(self.file.number, [room[: end - at]], at)
            if not count:
                break
            summed.update(room[:count])
            at += count
        return summed.hexdigest()

    def drop(self) -> None:
        """Remove the sidecar first: a file without one is started over, a sidecar without its file is ignored."""
        self._disk.remove(self._sidecar_path)
        self._disk.sync(self._folder)
        self._disk.remove(self._path)
        self._disk.sync(self._folder)

    def _own(self) -> int:
        """Open the file with an exclusive lock."""
        while True:
            number = os.open(self._path, _OPEN, 0o644)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                said = os.fstat(number)
                if os.path.samestat(said, self._path.lstat()):
                    if said.st_nlink == 1:
                        return number
                    self._disk.remove(self._path)  # a power loss left both names: the published file stays unchanged
            except BlockingIOError:
                os.close(number)
                raise DiskError(f"{self.digest} is being fetched into {self._folder} by another process") from None
            except FileNotFoundError:
                pass  # it was published or removed while we waited
            os.close(number)

    def _resumed(self) -> BlobProgress:
        """Read the recorded progress; empty without a sidecar or if the file has another length."""
        try:
            text = self._sidecar_path.read_bytes()
        except FileNotFoundError:
            text = b""
        found = progress_file.parse_progress(text, self.digest, self.size, self._disk.boot)
        if found is None or os.fstat(self.file.number).st_size != self.size:
            return BlobProgress(self.size, blob_progress.part_bytes(self.size))
        return found

    def _begin(self) -> None:
        """Prepare a file of full length; when resuming, sync it and rewrite the sidecar."""
        if not self.ledger.came:
            if self._sidecar_path.exists():
                self._disk.remove(self._sidecar_path)
                self._disk.sync(self._folder)
            os.ftruncate(self.file.number, 0)
            os.ftruncate(self.file.number, self.size)
            return
        self._rewrite_sidecar(self.ledger.full, self.ledger.begun())

    def _rewrite_sidecar(self, good: set[int], begun: Mapping[int, int]) -> None:
        """Sync the file and write a new sidecar with exactly these parts and the progress of incomplete ones."""
        self._disk.settle(self.file)
        if self._sidecar is not None:
            os.close(self._sidecar.number)
        new = self._sidecar_path.with_name(f"{self.digest}.new")
        self._sidecar = self._headed(new)
        self._disk.append(
            self._sidecar, progress_file.format_parts(good) + progress_file.format_marks(begun, self._disk.boot)
        )
        self._disk.settle(self._sidecar)
        self._disk.move(new, self._sidecar_path)
        self._sidecar = self._sidecar._replace(path=self._sidecar_path)

    def _note(self, part: int) -> None:
        """Record progress that survives this process but not a reboot: the bytes are in the page cache. Does not wait.
        `part`: the part that was written to.
        """
        if self.ledger.complete:
            return
        if len(self._noted) < len(self.ledger.full):
            new = self.ledger.full - self._noted
            self._disk.append(self._opened(), progress_file.format_parts(new, self._disk.boot))
            self._noted |= new
        filled = self.ledger.filled(part)
        if part not in self.ledger.full and filled - self._marked.get(part, 0) >= self._mark_bytes:
            self._disk.append(self._opened(), progress_file.format_marks({part: filled}, self._disk.boot))
            self._marked[part] = filled

    def _opened(self) -> OpenFile:
        """Return the sidecar, created on first use since most blobs need none; no old one exists under its name."""
        if self._sidecar is None:
            self._sidecar = self._headed(self._sidecar_path)
        return self._sidecar

    def _headed(self, path: Path) -> OpenFile:
        made = OpenFile(os.open(path, _OPEN | os.O_TRUNC | os.O_APPEND, 0o644), path)
        self._disk.append(made, progress_file.format_header(self.digest, self.size, self.ledger.part))
        return made

    def _sum(self, most: int) -> None:
        at, end = self._summed_bytes, min(self._ready, self._summed_bytes + most)
        room = _summing_room()
        while at < end:
            count = os.preadv(self.file.number, [room if end - at >= SUM_BYTES else room[: end - at]], at)
            if not count:
                raise OSError(5, "the file is shorter than what was written")
            self._summed.update(room if count == SUM_BYTES else room[:count])
            at += count
            self._summed_bytes = at


def _summing_room() -> memoryview:
    """Return the thread's own buffer."""
    found: memoryview | None = getattr(_room, "bytes", None)
    if found is None:
        found = _room.bytes = memoryview(bytearray(SUM_BYTES))
    return found

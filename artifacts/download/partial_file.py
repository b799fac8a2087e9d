"""One blob's file while it comes: written anywhere, summed from its front, remembered, and at last given its name. I/O.

Owns `partial/<digest>` and its sidecar. Blocks: runs in threads. Promises: a part is remembered as soon as it is there,
and how far it is meanwhile, for as long as the machine runs, and for good when it is on the disk; the file gets its
final name only with all of its bytes summed and on the disk, so no crash leaves a file there that is not the blob; one
whose sum does not hold goes away, but for the parts whose own sums somebody knows and that hold. One process at a time
has it (flock).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from artifacts import digest as digests
from artifacts.digest import Digest
from artifacts.disk.disk import Disk, DiskError, OpenFile
from artifacts.download import progress_file
from artifacts.oci import spans
from artifacts.oci.spans import BlobProgress

FOLDER = "partial"
CHECKPOINT_BYTES = 256 << 20
"""So much more is worth being brought onto the disk before the blob is whole: what a power cut costs."""
LATE_CHECKPOINT_BYTES = 2 << 30
"""The same where nobody waits for the disk: it would be waited for then."""
SUM_BYTES = 256 << 10
"""Read back at once to be summed: what fits beside it into the cache of a core."""
TURN_BYTES = 4 << 20
"""So much is summed in one go by a thread that has a connection to look after."""
LAG_BYTES = 8 << 20
"""So much that is not summed yet is worth a thread of its own."""
START_BYTES = 8 << 20
"""So much begins to go onto the disk at once, while more comes: the last wait for it is short then."""
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_room = threading.local()


class Partial:
    """Of one blob. Close it."""

    def __init__(
        self,
        folder: Path,
        digest: Digest,
        size: int,
        disk: Disk | None = None,
        *,
        learned: Callable[[Digest], None] | None = None,
    ) -> None:
        """Goes on with what is there. `learned`: as `pull.BlobTarget`. Raises DiskError where another process has it,
        and OSError.
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
        self._summed = hashlib.new(digests.get_algorithm(digest))
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
        """Bytes that were there before."""
        self._ready = self.ledger.frontier
        """All before this byte may be summed."""
        self._kept = set(self.ledger.full)
        """Parts that are on the disk, and said to be."""
        self._noted = set(self.ledger.full)
        """Parts of which the sidecar says that they are there."""
        self._marked = self.ledger.begun()
        """How far the sidecar says others are."""
        self._mark_bytes = spans.mark_bytes(size)

    def close(self) -> None:
        """Leaves it as it is, for the next."""
        for one in (self._sidecar, self.file):
            if one is not None and one.number >= 0:
                os.close(one.number)
        self.file, self._sidecar = OpenFile(-1, self._path), None

    def put(self, at: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Bytes from `at` on."""
        self._disk.put(self.file, pieces, at)
        self.wrote(at, sum(len(piece) for piece in pieces), pieces)

    def wrote(self, at: int, count: int, pieces: Sequence[bytes | memoryview] = ()) -> None:
        """`count` bytes from `at` on are in the file; `pieces`: all of them, where they came through this process.

        Of a blob that comes by one request they are summed at once, while a core's cache has them.
        """
        with self._lock:
            self.ledger.wrote(at, count)
            self._ready = self.ledger.frontier
            self._note(max(at, at + count - 1) // self.ledger.part)
        first, end = at // START_BYTES * START_BYTES, (at + count) // START_BYTES * START_BYTES
        end = self.size if at + count == self.size else end
        if first < end:
            self._disk.start(self.file, first, end - first)
        if self.size <= spans.WHOLE_BYTES_MAX and self._summing.acquire(blocking=False):
            try:
                if pieces and self._summed_bytes == at:
                    for piece in pieces:
                        self._summed.update(piece)
                    self._summed_bytes += count
                self._sum(TURN_BYTES)
            finally:
                self._summing.release()

    def wants(self) -> list[Callable[[], None]]:
        """What is to be done by a thread that has nothing else to do; each once at a time."""
        jobs = []  # asked for after each piece
        waiting = (len(self.ledger.full) - len(self._kept)) * self.ledger.part
        if (
            waiting >= (LATE_CHECKPOINT_BYTES if self._disk.owed else CHECKPOINT_BYTES)
            and not self.ledger.complete
            and not self._keeping.locked()
        ):
            jobs.append(self.keep)  # one that is complete comes onto the disk by its end
        if self._ready - self._summed_bytes >= LAG_BYTES and not self._summing.locked():
            jobs.append(self.sum_up)
        return jobs

    def sum_up(self) -> None:
        """Whatever is ready, also what becomes so meanwhile."""
        with self._summing:
            while self._summed_bytes < self._ready:
                self._sum(TURN_BYTES)

    def keep(self) -> None:
        """Parts that have come onto the disk, then into the sidecar."""
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
        """Where the sum of all bytes holds, or is learned: gives the file its name `path`. Else it is False; then comes
        `mend`.
        """
        with self._summing:
            late = self.size - self._summed_bytes >= LAG_BYTES
            if late:  # neither waits for the other
                with ThreadPoolExecutor(1, thread_name_prefix="sync") as beside:
                    synced = beside.submit(self._disk.sync, self.file)
                    self._sum(self.size)
                synced.result()
            else:
                self._sum(self.size)
        if not self.ledger.complete or self._summed_bytes != self.size:
            raise RuntimeError(f"{self.digest} is not complete")
        if self._learned is not None:
            self._learned(digests.parse_digest(f"{digests.get_algorithm(self.digest)}:{self._summed.hexdigest()}"))
        elif self._summed.hexdigest() != digests.get_hex(self.digest):
            return False
        self._disk.folder(path.parent)
        if not late:
            self._disk.sync(self.file)
        self._disk.move(self._path, path)
        self._disk.remove(self._sidecar_path)
        return True

    def mend(self, sums: Sequence[str]) -> bool:
        """Of bytes whose sum does not hold: keeps those parts that have theirs of `sums` (SHA-256, one for each part),
        for the next who opens it. Else nobody knows which of its bytes lied, all of it goes, and this is False.
        """
        good = set[int]()
        if len(sums) == self.ledger.count:
            good = {part for part, summed in enumerate(sums) if self._part_sum(part) == summed}
        if good and len(good) < self.ledger.count:
            self._say_anew(good, {})
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
                said = os.fstat(number)
                if os.path.samestat(said, self._path.lstat()):
                    if said.st_nlink == 1:
                        return number
                    self._disk.remove(self._path)  # a power cut left it both names: the whole one stays as it is
            except BlockingIOError:
                os.close(number)
                raise DiskError(f"{self.digest} is being fetched into {self._folder} by another process") from None
            except FileNotFoundError:
                pass  # it got its name, or went away, while we waited
            os.close(number)

    def _resumed(self) -> BlobProgress:
        """What is there. Without a sidecar, or with another length, nothing."""
        try:
            text = self._sidecar_path.read_bytes()
        except FileNotFoundError:
            text = b""
        found = progress_file.parse_progress(text, self.digest, self.size, self._disk.boot)
        if found is None or os.fstat(self.file.number).st_size != self.size:
            return BlobProgress(self.size, spans.part_bytes(self.size))
        return found

    def _begin(self) -> None:
        """A file of its length. Of what is gone on with, all is brought onto the disk, and said anew."""
        if not self.ledger.came:
            if self._sidecar_path.exists():
                self._disk.remove(self._sidecar_path)
                self._disk.sync(self._folder)
            os.ftruncate(self.file.number, 0)
            os.ftruncate(self.file.number, self.size)
            return
        self._say_anew(self.ledger.full, self.ledger.begun())

    def _say_anew(self, good: set[int], begun: Mapping[int, int]) -> None:
        """The file is on the disk, and its sidecar says these parts alone, and how far those are that have begun."""
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
        """For who goes on when this process alone has ended: the kernel has what was written. Costs no wait.
        `part`: where something was written.
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
        """The sidecar; made late, since most blobs need none: no old one is there under its name."""
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
    """A thread's own, for as long as it lives."""
    found: memoryview | None = getattr(_room, "bytes", None)
    if found is None:
        found = _room.bytes = memoryview(bytearray(SUM_BYTES))
    return found

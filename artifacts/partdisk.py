"""What a fetch asks of a file system, one durable step each. I/O.

Owns the steps, so that a test can end the world before any of them, and the words for what a disk refuses. Promises: a
step that returned has reached the disk as far as the kernel can say.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FIXES = {
    errno.ENOSPC: "the disk is full; free space or give the cache a larger volume",
    errno.EDQUOT: "the quota is used up; raise it or give the cache a larger volume",
    errno.EROFS: "the file system is read-only; mount it writable",
    errno.EACCES: "no right to write there; give the folder to the user that fetches",
    errno.EPERM: "no right to write there; give the folder to the user that fetches",
    errno.EIO: "the disk fails (input/output error); look into the kernel's log and change the volume",
}


class DiskError(Exception):
    """A folder cannot keep what comes: one line with the fix."""


class Disk:
    """The machine's own."""

    def write(self, number: int, pieces: list[bytes], at: int) -> None:
        """All of the pieces, from byte `at` on, into the page cache."""
        left = [memoryview(piece) for piece in pieces if piece]
        while left:
            count = os.pwritev(number, left[: os.sysconf("SC_IOV_MAX")], at)
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def append(self, number: int, text: bytes) -> None:
        """At the end of a small file, and onto the disk."""
        while text:
            text = text[os.write(number, text) :]
        os.fdatasync(number)

    def sync(self, number: int) -> None:
        """A file's bytes and length onto the disk."""
        os.fdatasync(number)

    def folder(self, path: Path) -> None:
        """Makes it, and those above that are missing, with names that are on the disk."""
        if not path.is_dir():
            self.folder(path.parent)
            path.mkdir(exist_ok=True)
            self.sync_folder(path.parent)

    def sync_folder(self, folder: Path) -> None:
        """The names in it onto the disk."""
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def replace(self, old: Path, new: Path) -> None:
        """A name for another; durable with `sync_folder`."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """A name, where it is; durable with `sync_folder`."""
        path.unlink(missing_ok=True)

    def free_bytes(self, folder: Path) -> int:
        """What a user who is not root may still write there."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


def refusal(error: OSError, folder: Path, what: str) -> DiskError:
    """The line for what a disk refused."""
    fix = _FIXES.get(error.errno or 0, error.strerror or type(error).__name__)
    return DiskError(f"{what} cannot be kept in {folder}: {fix}; what is on the disk is kept, and gone on with")

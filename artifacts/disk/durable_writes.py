"""Durable changes to a node's disk: a crash at any point leaves either the old or the new state. I/O.

Performs writes, fsync, rename and link for the store and for downloads, and describes errors of the operating system.
Before each operation `step` is called with its name and path, so that tests can stop or fail there. When a call
returns, its effect survives a power loss, except for `put`, `append` and `link`, whose callers sync. An instance from
`later` does not wait for syncs: its changes are certain only until the machine restarts, so callers record the boot id
(`owed`) with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
SHUT = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_FIXES = {
    errno.ENOSPC: "the disk is full; free space or use a larger volume",
    errno.EDQUOT: "the quota is used up; raise it or use a larger volume",
    errno.EROFS: "the file system is read-only; mount it writable",
    errno.EACCES: "no permission to write there; make the folder writable for this user",
    errno.EPERM: "no permission to write there; make the folder writable for this user",
    errno.EIO: "the disk failed (input/output error); check the kernel log and replace the volume",
}
_PIECES_MAX = os.sysconf("SC_IOV_MAX")
_LIBC = ctypes.CDLL(None)
_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE of <fcntl.h>; Python has no constant for it."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOBODYS = "nobody's-"

Step = Callable[[str, Path], None]
"""`step(name, path)`: called before each operation; an exception from it replaces the operation."""


class DiskError(Exception):
    """A folder cannot store the data; the message is one line with the fix."""


class OpenFile(NamedTuple):
    """A file that the caller holds open."""

    number: int
    path: Path
    """Its name when it was opened."""


class Disk:
    """Performs all disk changes of a store or a download."""

    def __init__(self, step: Step = lambda _what, _path: None, boot: str | None = None, *, late: bool = False) -> None:
        """`boot`: boot id; None reads the machine's, empty means that other processes cannot know it."""
        self._step = step
        self._boot = boot
        self._late = late

    @property
    def boot(self) -> str:
        """Boot id of the machine. Data written but not synced is valid only while this id is current."""
        if self._boot is None:
            try:
                self._boot = BOOT_ID.read_text(encoding="ascii").strip()
            except OSError:  # a sandbox without the file: no other process will trust unsynced data
                self._boot = ""
        if not self._boot:
            self._boot = f"{_NOBODYS}{secrets.token_hex(16)}"
        return self._boot

    @property
    def lasting(self) -> bool:
        """Whether other processes see the same boot id."""
        return not self.boot.startswith(_NOBODYS)

    @property
    def owed(self) -> str:
        """Boot id for which unsynced changes are valid; empty if changes are synced to disk."""
        return self.boot if self._late else ""

    def later(self) -> Disk:
        """Return a Disk whose `sync` does not wait; if other processes cannot know the boot id, it waits as usual."""
        return Disk(self._step, self.boot, late=self.lasting)

    def sync(self, what: Path | OpenFile) -> None:
        """Sync a file's data and length, or a folder's entries; deferred in an instance from `later`."""
        if self._late:
            self._step("late", what.path if isinstance(what, OpenFile) else what)
        else:
            self.settle(what)

    def settle(self, what: Path | OpenFile) -> None:
        """As `sync`, but never deferred."""
        if isinstance(what, OpenFile):
            self._step("sync", what.path)
            os.fdatasync(what.number)
            return
        self._step("sync", what)
        number = os.open(what, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def folder(self, path: Path) -> None:
        """Create a folder and its missing parents."""
        missing = [one for one in (path, *path.parents) if not one.is_dir()]
        for one in reversed(missing):
            self._step("folder", one)
            one.mkdir(mode=0o755, exist_ok=True)
            self.sync(one.parent)

    def write(self, path: Path, content: bytes) -> None:
        """Write a file atomically: readers see the complete new content or the old one."""
        aside = path.with_name(f".pilotlight-{secrets.token_hex(8)}")
        self._step("write", path)
        try:
            aside.write_bytes(content)
            self.sync(aside)
            self.move(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def put(self, file: OpenFile, pieces: Sequence[bytes | memoryview], at: int) -> None:
        """Write all pieces starting at byte `at`. The caller syncs the file."""
        self._step("put", file.path)
        left = [memoryview(piece) for piece in pieces if piece]
        while left:
            count = os.pwritev(file.number, left[:_PIECES_MAX], at)
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def start(self, file: OpenFile, at: int, count: int) -> None:
        """Start writeback of these bytes, so that a later `sync` has little left to do.

        Guarantees nothing and blocks only if the disk is congested; `sync` reports the errors.
        """
        if begin := getattr(_LIBC, "sync_file_range", None):
            begin(file.number, ctypes.c_int64(at), ctypes.c_int64(count), _START_WRITING)

    def append(self, file: OpenFile, text: bytes) -> None:
        """Append to a small file. The caller syncs it."""
        self._step("append", file.path)
        while text:
            text = text[os.write(file.number, text) :]

    def move(self, one: Path, to: Path) -> None:
        """Rename a file or folder, and sync both parent folders."""
        self._step("rename", to)
        one.rename(to)
        self.sync(to.parent)
        if one.parent != to.parent:
            self.sync(one.parent)

    def link(self, one: Path, to: Path) -> None:
        """Create a hard link. The caller syncs its folder. Raises FileExistsError."""
        self._step("link", to)
        os.link(one, to, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Remove a file or folder tree if it exists. Not synced: if it reappears after a crash, it is removed again."""
        self._step("remove", path)
        try:
            is_folder = stat.S_ISDIR(path.lstat().st_mode)
        except FileNotFoundError:
            return
        if is_folder:
            shutil.rmtree(path)
        else:
            path.unlink()

    def free_bytes(self, folder: Path) -> int:
        """Return the bytes available to a non-root user."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


def write_all(fd: int, content: memoryview) -> None:
    """Write all bytes to an open file."""
    while content:
        content = content[os.write(fd, content) :]


def describe_os_error(error: OSError) -> str:
    """Return the reason and the fix for an operating system error, as used in error messages."""
    return _FIXES.get(error.errno or 0, error.strerror or type(error).__name__)


def list_entries(path: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name; empty if the folder does not exist."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as found:
        return sorted(found, key=lambda one: one.name)
    return []


def walk_folder(path: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a folder, folders before their content; symbolic links are not followed."""
    for one in list_entries(path):
        yield one
        if one.is_dir(follow_symlinks=False):
            yield from walk_folder(Path(one.path))

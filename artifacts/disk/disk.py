"""What is changed on a node's disk, so that it lasts and a break at any point leaves the whole or nothing. I/O.

Owns writes, fsync, rename and link for the store and for a fetch, each a step with a name and a path, before which
`step` is told: tests stop there, or refuse; and the words for what a disk refuses. Promises: when a call returns, what
it did outlives a power cut, but for `put`, `append` and `link`, whose callers sync. One that is `later` waits for
nothing: what it did lasts as long as the machine runs, and whoever says that it is there says `owed` beside it.
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
    errno.ENOSPC: "the disk is full; free space or give it a larger volume",
    errno.EDQUOT: "the quota is used up; raise it or give it a larger volume",
    errno.EROFS: "the file system is read-only; mount it writable",
    errno.EACCES: "no right to write there; give the folder to the user that writes",
    errno.EPERM: "no right to write there; give the folder to the user that writes",
    errno.EIO: "the disk fails (input/output error); look into the kernel's log and change the volume",
}
_PIECES_MAX = os.sysconf("SC_IOV_MAX")
_LIBC = ctypes.CDLL(None)
_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE of <fcntl.h>: Python has no name for it."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOBODYS = "nobody's-"

Step = Callable[[str, Path], None]
"""`step(name, path)`: what comes next, and where to; what it raises comes instead."""


class DiskError(Exception):
    """A folder cannot keep what comes: one line with the fix."""


class OpenFile(NamedTuple):
    """A file that its owner has open."""

    number: int
    path: Path
    """The name it had then."""


class Disk:
    """All changes of a store and of a fetch go through one of these."""

    def __init__(self, step: Step = lambda _what, _path: None, boot: str | None = None, *, late: bool = False) -> None:
        """`boot`: None: the machine's own; empty: no process can know that of another."""
        self._step = step
        self._boot = boot
        self._late = late

    @property
    def boot(self) -> str:
        """Which run of the machine this is: what was written and not synced is there for as long as it lasts."""
        if self._boot is None:
            try:
                self._boot = BOOT_ID.read_text(encoding="ascii").strip()
            except OSError:  # a sandbox without one: nobody after us believes what was not synced
                self._boot = ""
        if not self._boot:
            self._boot = f"{_NOBODYS}{secrets.token_hex(16)}"
        return self._boot

    @property
    def lasting(self) -> bool:
        """Other processes know this run of the machine by the same name."""
        return not self.boot.startswith(_NOBODYS)

    @property
    def owed(self) -> str:
        """In which run of the machine that is true which is said to be there; empty: it lies on the disk for good."""
        return self.boot if self._late else ""

    def later(self) -> Disk:
        """The same, and `sync` waits for nothing; where no other process knows the boot, it is as this one."""
        return Disk(self._step, self.boot, late=self.lasting)

    def sync(self, what: Path | OpenFile) -> None:
        """A file's bytes and length, or a folder's names."""
        if self._late:
            self._step("late", what.path if isinstance(what, OpenFile) else what)
        else:
            self.settle(what)

    def settle(self, what: Path | OpenFile) -> None:
        """As `sync`, and at once in any case."""
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
        """There, with all above it."""
        missing = [one for one in (path, *path.parents) if not one.is_dir()]
        for one in reversed(missing):
            self._step("folder", one)
            one.mkdir(mode=0o755, exist_ok=True)
            self.sync(one.parent)

    def write(self, path: Path, content: bytes) -> None:
        """The whole file, or the one before."""
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
        """All of the pieces, from byte `at` on. The caller syncs the file."""
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
        """These bytes begin to go onto the disk, so that a `sync` finds little left; it promises nothing, and waits for
        nothing but a disk that is behind. What goes wrong there, `sync` says.
        """
        if begin := getattr(_LIBC, "sync_file_range", None):
            begin(file.number, ctypes.c_int64(at), ctypes.c_int64(count), _START_WRITING)

    def append(self, file: OpenFile, text: bytes) -> None:
        """At the end of a small file. The caller syncs it."""
        self._step("append", file.path)
        while text:
            text = text[os.write(file.number, text) :]

    def move(self, one: Path, to: Path) -> None:
        """By one rename, with the names of both folders."""
        self._step("rename", to)
        one.rename(to)
        self.sync(to.parent)
        if one.parent != to.parent:
            self.sync(one.parent)

    def link(self, one: Path, to: Path) -> None:
        """A second name. The caller syncs its folder. Raises FileExistsError."""
        self._step("link", to)
        os.link(one, to, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """A file or a folder with all in it, where it is there; not synced: what comes back is removed again."""
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
        """What a user who is not root may still write there."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


def describe_os_error(error: OSError) -> str:
    """What the disk refused, and the fix, as errors say it."""
    return _FIXES.get(error.errno or 0, error.strerror or type(error).__name__)


def list_entries(path: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, by name; nothing where it is not there."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as found:
        return sorted(found, key=lambda one: one.name)
    return []


def walk_folder(path: Path) -> Iterator[os.DirEntry[str]]:
    """All below a folder, folders before what is in them; links are not followed."""
    for one in list_entries(path):
        yield one
        if one.is_dir(follow_symlinks=False):
            yield from walk_folder(Path(one.path))

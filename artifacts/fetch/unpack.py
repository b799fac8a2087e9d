"""Extracts archives into a folder, opening each component relative to its parent folder, never through a link. I/O.

Modes are 0644 and 0755 whatever the archive says. Existing files are never overwritten, and no more bytes are written
than were reserved. On success everything is on disk; after a rejection or failure nothing is left.
`artifacts.archives.member_filter` decides what may be written. Calls block: run them in a thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from artifacts import safe_paths
from artifacts.archives import decompress, tar_reader
from artifacts.archives.member_filter import AcceptedMember, Sieve
from artifacts.archives.tar_reader import BadArchiveError, Member
from artifacts.dialects.artifact_contents import File
from artifacts.digest import Digest, parse_digest
from artifacts.disk.durable_writes import write_all
from artifacts.file_kinds import Role
from artifacts.oci.descriptor import BLOB_BYTES_MAX

FILE_MODE, FOLDER_MODE = 0o644, 0o755
_NO_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Unpacked(NamedTuple):
    """An extracted file."""

    path: str
    size: int
    role: Role
    digest: Digest
    at: int
    """Offset of its content in the uncompressed archive."""


def iter_members(pieces: Iterable[bytes], of: File) -> Iterator[Member]:
    """Yield the members of an archive without writing anything. Raises BadArchiveError."""
    reader = tar_reader.Reader()
    for piece in decompress.decompress_layer(pieces, of.encoding, BLOB_BYTES_MAX):
        yield from (one for one in reader.feed(piece) if isinstance(one, Member))
    reader.close()


class Unpacking:
    """Extracts all archives of an artifact into one folder; a context manager that keeps everything or nothing."""

    def __init__(
        self, folder: int, tree: safe_paths.Tree, bytes_max: int, *, root: str = "", allow_unsafe: bool = False
    ) -> None:
        """`folder`: open and used exclusively; `tree`: the artifact's other paths; `bytes_max`: limit for all files."""
        self._places = _Places(folder)
        self._tree = tree
        self._left = bytes_max
        self._bytes_max = bytes_max
        self._root = root
        self._allow_unsafe = allow_unsafe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._places.sync()
            else:
                self._places.undo()
        finally:
            self._places.close()

    def archive(self, of: File, pieces: Iterable[bytes], *, may_be_empty: bool = False) -> list[Unpacked]:
        """Extract one archive. `may_be_empty`: for image layers. Raises BadArchiveError, OSError."""
        sieve = Sieve(of, self._tree, self._root, allow_unsafe=self._allow_unsafe)
        reader, done = tar_reader.Reader(), list[Unpacked]()
        fd, taken, summed, at = -1, None, hashlib.sha256(), 0
        try:
            for piece in decompress.decompress_layer(pieces, of.encoding, BLOB_BYTES_MAX):
                for event in reader.feed(piece):
                    if isinstance(event, Member):
                        taken, at = sieve.judge(event), reader.at
                        fd, summed = self._begin(taken) if taken is not None else -1, hashlib.sha256()
                    elif fd >= 0 and isinstance(event, memoryview):
                        summed.update(event)
                        write_all(fd, event)
                    elif fd >= 0 and taken is not None:
                        fd = _finish(fd)
                        digest = parse_digest(f"sha256:{summed.hexdigest()}")
                        done.append(Unpacked(taken.path, taken.size, taken.role, digest, at))
            reader.close()
        finally:
            if fd >= 0:
                os.close(fd)
        if not reader.entries and not may_be_empty:
            raise BadArchiveError(f"the archive{f' of {of.path}' if of.path else ''} is empty: it contains no file")
        return done

    def _begin(self, taken: AcceptedMember) -> int:
        """Create the file and return its descriptor; -1 for a folder."""
        if taken.folder:
            self._places.folder(taken.path)
            return -1
        if taken.size > self._left:
            raise BadArchiveError(f"in the archive: {taken.path}: more than the {self._bytes_max} bytes reserved")
        self._left -= taken.size
        return self._places.file(taken.path)


class _Places:
    """Opens and creates paths folder by folder, and remembers what was created."""

    def __init__(self, folder: int) -> None:
        self._base = folder
        self._way: list[tuple[str, int]] = []
        """The chain of open folders, each inside the previous one."""
        self._made_files: list[str] = []
        self._made_folders: list[str] = []

    def file(self, path: str) -> int:
        """Create a file and return its descriptor."""
        above, _, name = path.rpartition("/")
        folder = self.folder(above)
        try:
            fd = os.open(name, _FILE, FILE_MODE, dir_fd=folder)
        except FileExistsError:
            raise BadArchiveError(f"in the archive: {path}: the path already exists") from None
        self._made_files.append(path)
        os.fchmod(fd, FILE_MODE)  # independent of the umask
        return fd

    def folder(self, path: str, *, make: bool = True) -> int:
        """Open a folder, creating it if missing. Raises BadArchiveError if a link or a file is in its place."""
        parts = path.split("/") if path else []
        same = next(
            (n for n, (part, there) in enumerate(zip(parts, self._way, strict=False)) if part != there[0]), None
        )
        self._close(min(len(parts), len(self._way)) if same is None else same)
        for part in parts[len(self._way) :]:
            above = self._way[-1][1] if self._way else self._base
            try:
                fd = self._enter(part, above, make=make)
            except OSError as error:
                if error.errno not in _NO_FOLDER:
                    raise
                raise BadArchiveError(f"in the archive: {path}: a parent of the path is not a folder") from None
            self._way.append((part, fd))
        return self._way[-1][1] if self._way else self._base

    def _enter(self, name: str, above: int, *, make: bool) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(name, FOLDER_MODE, dir_fd=above)
        self._made_folders.append("/".join([*(part for part, _ in self._way), name]))
        fd = os.open(name, _FOLDER, dir_fd=above)
        os.fchmod(fd, FOLDER_MODE)
        return fd

    def sync(self) -> None:
        """Sync the created folders, the deepest first; files were synced when they were complete."""
        folders = {path.rpartition("/")[0] for path in (*self._made_files, *self._made_folders)}
        for path in sorted({"", *folders, *self._made_folders}, reverse=True):
            os.fsync(self.folder(path))

    def undo(self) -> None:
        """Remove what was created; files created by others meanwhile are kept."""
        made = [(os.rmdir, path) for path in self._made_folders] + [(os.unlink, path) for path in self._made_files]
        for remove, path in reversed(made):
            above, _, name = path.rpartition("/")
            with suppress(OSError, BadArchiveError):
                remove(name, dir_fd=self.folder(above, make=False))

    def close(self) -> None:
        """Close all folders."""
        self._close(0)

    def _close(self, keep: int) -> None:
        while len(self._way) > keep:
            os.close(self._way.pop()[1])


def _finish(fd: int) -> int:
    """Sync and close the file; return -1 (nothing is open)."""
    os.fsync(fd)
    os.close(fd)
    return -1

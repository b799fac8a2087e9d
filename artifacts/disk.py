"""What is changed on a node's disk, so that it lasts and a break at any point leaves the whole or nothing. I/O.

Owns fsync, rename and link, each a step with a name, before which `step` is told: tests stop there. Promises: when a
call returns, what it did outlives a power cut.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path


class Disk:
    """All changes of a store go through one of these."""

    def __init__(self, step: Callable[[str, Path], None] = lambda _what, _path: None) -> None:
        self._step = step

    def sync(self, path: Path) -> None:
        """A file's bytes, or a folder's names."""
        self._step("sync", path)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

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


def entries(path: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, by name; nothing where it is not there."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as found:
        return sorted(found, key=lambda one: one.name)
    return []


def walk(path: Path) -> Iterator[os.DirEntry[str]]:
    """All below a folder, folders before what is in them; links are not followed."""
    for one in entries(path):
        yield one
        if one.is_dir(follow_symlinks=False):
            yield from walk(Path(one.path))

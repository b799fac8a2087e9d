"""A model of power loss over a real folder: a disk that loses everything that was not synced.

The content of a file at its last sync survives. Of later writes, a random set of blocks survives or is zeroed. Of the
changes of names since the last sync of their folder, a random number of steps survives, in order. Folders are names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from artifacts.disk.durable_writes import Disk

BLOCK = 512


class PowerLossError(Exception):
    """The machine lost power."""


class ForgetfulDisk:
    """Implements `durable_writes` and raises before its n-th step. `after` builds the folder that a new start finds."""

    def __init__(self, root: Path, steps: int = -1, boot: str | None = None) -> None:
        """`boot`: as in Disk; None: a new one."""
        self.root = root
        self.disk = Disk(self._step, boot=root.name if boot is None else boot)
        self.steps = 0
        self.last = steps
        self._pinned: dict[int, int] = {}
        """Inodes that are held open so that their numbers are not reused."""
        self._folders: set[int] = set()
        self._synced: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        """Names in each folder, wherever it has been moved to, as in memory."""
        self._kept: dict[int, dict[str, int]] = {}
        """Names in each folder, as on the disk."""
        self._pending: dict[int, list[Callable[[dict[str, int]], object]]] = {}
        self._built: dict[int, Path] = {}
        self._pin(root, root.lstat().st_ino)
        self._look()
        for folder, pending in self._pending.items():  # what exists at the start is on the disk
            for apply in pending:
                apply(self._kept.setdefault(folder, {}))
        self._pending = {}
        self._synced = {inode: _content(number) for inode, number in self._pinned.items() if inode not in self._folders}

    def close(self) -> None:
        for number in self._pinned.values():
            os.close(number)

    def _step(self, what: str, path: Path) -> None:
        if what not in {"put", "append"}:  # what is only in memory may be lost at any time: `_mixed`
            if self.steps == self.last:
                raise PowerLossError
            self.steps += 1
        self._look()
        if what != "sync":
            return
        inode = path.lstat().st_ino
        if inode in self._folders:
            names = self._kept.setdefault(inode, {})
            for apply in self._pending.pop(inode, []):
                apply(names)
        else:
            self._synced[inode] = _content(self._pinned[inode])

    def _look(self) -> None:
        """Notes what the previous step did and what was created outside of it, such as files that were reopened."""
        for folder in (self.root, *(path for path in self.root.rglob("*") if path.is_dir())):
            at = folder.lstat().st_ino
            known = self._names.setdefault(at, {})
            for name in known.keys() - {path.name for path in folder.iterdir()}:
                self._change(at, name, None)
            for path in folder.iterdir():
                inode = path.lstat().st_ino
                if known.get(path.name) != inode:
                    self._pin(path, inode)
                    self._change(at, path.name, inode)

    def _pin(self, path: Path, inode: int) -> None:
        if inode not in self._pinned:
            self._pinned[inode] = os.open(path, os.O_RDONLY)
            if path.is_dir():
                self._folders.add(inode)

    def _change(self, folder: int, name: str, inode: int | None) -> None:
        def apply(names: dict[str, int]) -> None:
            names.pop(name, None)
            if inode is not None:
                names[name] = inode

        apply(self._names.setdefault(folder, {}))
        self._pending.setdefault(folder, []).append(apply)

    def after(self, into: Path, random: Random) -> None:
        """Builds the folder as the next start finds it."""
        self._look()
        self._build(self.root.lstat().st_ino, into, random)

    def _build(self, folder: int, into: Path, random: Random) -> None:
        into.mkdir()
        names = dict(self._kept.get(folder, {}))
        pending = self._pending.get(folder, [])
        for apply in pending[: random.randint(0, len(pending))]:
            apply(names)
        for name, inode in names.items():
            if inode in self._folders:
                self._build(inode, into / name, random)
            elif inode in self._built:
                os.link(self._built[inode], into / name)
            else:
                self._built[inode] = into / name
                content = _content(self._pinned[inode])
                (into / name).write_bytes(_mixed(self._synced.get(inode, b""), content, random))


def _content(number: int) -> bytes:
    """The content of an open file, even if it was opened for appending."""
    return os.pread(number, 1 << 20, 0)


def _mixed(kept: bytes, new: bytes, random: Random) -> bytes:
    """A random mix of old and new blocks, with zeros instead of blocks that were lost."""
    size = random.choice([len(kept), len(new)])
    made = bytearray()
    for at in range(0, size, BLOCK):
        old, now = kept[at : at + BLOCK], new[at : at + BLOCK]
        made += old if old == now else random.choice([old, now, bytes(len(now))]).ljust(BLOCK, b"\0")
    return bytes(made[:size].ljust(size, b"\0"))

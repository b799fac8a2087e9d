"""Verifies a stored Copy against the record of its files, since disks can lose data silently. I/O.

Every file must have the recorded size and digest, and there must be no other files. Calls block: run them in a thread.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from artifacts import digest as digests
from artifacts.dialects.artifact_contents import File
from artifacts.disk.durable_writes import walk_folder
from artifacts.store.copy_record import Record

PIECE_BYTES = 1 << 20


class Bad(NamedTuple):
    """A file that differs from the record."""

    path: str
    why: str
    digest: digests.Digest | None = None
    """Expected digest; None if the file should not exist."""


def verify_copy(record: Record, folder: Path, moved: Callable[[int], None] = lambda _: None) -> Iterator[Bad]:
    """Yield the faults of the Copy whose files are in `folder`. `moved`: called with the bytes read."""
    wanted = {one.path: one for one in record.laid}
    if not record.unpacked and any(one.encoding != "raw" for one in record.files):
        yield Bad("", "the files of its archives are not recorded: remove the copy and pull it again")
        return
    for one in wanted.values():
        why = _why(one, folder / one.path, moved)
        if why:
            yield Bad(one.path, why, one.digest)
    for there in walk_folder(folder):
        path = os.path.relpath(there.path, folder)
        if not there.is_dir(follow_symlinks=False) and path not in wanted:
            yield Bad(path, "it is not a file of the artifact")


def _why(of: File, path: Path, moved: Callable[[int], None]) -> str:
    """Return the fault of a file; empty if it has none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            said = os.fstat(fd)
            if not stat.S_ISREG(said.st_mode):
                return "it is no longer a file"
            if said.st_size != of.size:
                return f"it has {said.st_size} bytes, expected {of.size}"
            summed, room = hashlib.new(digests.get_algorithm(of.digest)), memoryview(bytearray(PIECE_BYTES))
            while count := file.readinto(room):
                summed.update(room[:count])
                moved(count)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "" if summed.hexdigest() == digests.get_hex(of.digest) else "its content has changed"

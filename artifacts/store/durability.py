"""What is seen before it lies on the disk: brought there afterwards, and judged anew after the machine went down. I/O.

Nobody waits for a disk before an engine may read its weights: what was summed is in the page cache. So a Copy's record
names the run of the machine in which it is true (`Record.boot`), until all of it is on the disk. Promises: in a later
run nobody believes such a record, nor a file that no other record names; what is left of it goes to the next pull of
that Copy, which takes no file for what its name says before it has summed it. No power cut leaves a Copy that is not
whole. Where no boot can be told from another (`Disk.later`), nothing is seen before it is on the disk.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from artifacts import digest as digests
from artifacts.digest import Digest
from artifacts.disk.disk import walk_folder
from artifacts.store.layout import Record, StoreLayout, digest_file_name, parse_file_name

MARK = "summed-in-"
"""Below a pull's folder an empty file with the run of the machine in which its files were summed."""


def sync_copy(layout: StoreLayout, record: Record) -> None:
    """All of a Copy comes onto the disk. Raises OSError; FileNotFoundError where it went away meanwhile."""
    copy, room = layout.copy(record.key), layout.blobs / record.key.room
    below = [Path(one.path) for one in walk_folder(copy)]
    for path in (*below, copy, copy.parent, layout.copies, room, layout.blobs):
        layout.disk.settle(path)


def recover_after_reboot(layout: StoreLayout) -> None:
    """By who first holds the store's lock in a run of the machine, before it does anything else. Raises OSError."""
    boot = layout.disk.boot
    if not layout.disk.lasting or _judged(layout) == boot:
        return
    believed = {layout.blob(one.key, digest) for one in layout.records() for digest in _blobs(one)}
    for one in layout.records(every=True):
        if one.boot not in {"", boot}:
            _salvage(layout, one)
    for blob in [Path(one.path) for one in walk_folder(layout.blobs) if one.is_file(follow_symlinks=False)]:
        if blob not in believed:
            layout.disk.remove(blob)
    layout.judged.write_text(boot, encoding="ascii")


def _salvage(layout: StoreLayout, record: Record) -> None:
    """Its raw files go to the next pull of it, and it goes."""
    key, disk = record.key, layout.disk
    to = layout.partial(key)
    disk.folder(to / "blobs")
    for one in record.files:
        if one.encoding == "raw":
            with suppress(FileExistsError, FileNotFoundError):
                disk.link(layout.copy(key) / "files" / one.path, to / "blobs" / digest_file_name(one.digest))
    disk.move(layout.copy(key), layout.trash / token_hex(8))


def discard_corrupt_blobs(pull: Path, boot: str) -> None:
    """What a pull finds under the name of a digest in its folder are those bytes, or is gone: summed once in a run of
    the machine. Its flight is held. Raises OSError.
    """
    mark = pull / f"{MARK}{boot}"
    if mark.exists():
        return
    for path in [Path(one.path) for one in walk_folder(pull / "blobs") if one.is_file(follow_symlinks=False)]:
        digest = parse_file_name(path.name)
        if digest is not None and _summed(path, digest) != digests.get_hex(digest):
            path.unlink()
    for old in pull.glob(f"{MARK}*"):
        old.unlink()
    mark.touch()


def _blobs(record: Record) -> list[Digest]:
    return [*record.blobs, *map(digests.parse_digest, record.documents)]


def _summed(path: Path, digest: Digest) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, digests.get_algorithm(digest)).hexdigest()


def _judged(layout: StoreLayout) -> str | None:
    """A break may have left anything there."""
    try:
        return layout.judged.read_bytes()[:100].decode("ascii", "replace")
    except FileNotFoundError:
        return None

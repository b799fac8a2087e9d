"""Copies that are published before they are on disk: syncs them later, and recovers after a reboot. I/O.

Engines may read weights before the disk sync, since verified data is in the page cache. Until a Copy is synced, its
record names the boot in which it is valid (`Record.boot`). After a reboot such records are not trusted, nor are files
that no other record names; the remains go to the next pull of that Copy, which hashes each file before it trusts its
name. A power loss never leaves an incomplete Copy. If boots cannot be distinguished (`Disk.later`), nothing is
published before it is on disk.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from artifacts.digest import Digest, get_algorithm, get_hex, parse_digest
from artifacts.disk.durable_writes import walk_folder
from artifacts.store.copy_record import Record
from artifacts.store.file_names import digest_file_name, parse_file_name
from artifacts.store.layout import StoreLayout

MARK = "summed-in-"
"""Prefix of an empty file in a pull's folder that names the boot in which its files were verified."""


def sync_copy(layout: StoreLayout, record: Record) -> None:
    """Sync all of a Copy to disk. Raises OSError; FileNotFoundError if it was removed meanwhile."""
    copy, room = layout.copy(record.key), layout.blobs / record.key.room
    below = [Path(one.path) for one in walk_folder(copy)]
    for path in (*below, copy, copy.parent, layout.copies, room, layout.blobs):
        layout.disk.settle(path)


def recover_after_reboot(layout: StoreLayout) -> None:
    """Run by the first holder of the store's lock after a boot, before anything else. Raises OSError."""
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
    """Move the Copy's raw files to its next pull, and remove the Copy."""
    key, disk = record.key, layout.disk
    to = layout.partial(key)
    disk.folder(to / "blobs")
    for one in record.files:
        if one.encoding == "raw":
            with suppress(FileExistsError, FileNotFoundError):
                disk.link(layout.copy(key) / "files" / one.path, to / "blobs" / digest_file_name(one.digest))
    disk.move(layout.copy(key), layout.trash / token_hex(8))


def discard_corrupt_blobs(pull: Path, boot: str) -> None:
    """Delete files in a pull's folder that do not match the digest in their name; runs once per boot. Requires the
    pull's lock. Raises OSError.
    """
    mark = pull / f"{MARK}{boot}"
    if mark.exists():
        return
    for path in [Path(one.path) for one in walk_folder(pull / "blobs") if one.is_file(follow_symlinks=False)]:
        digest = parse_file_name(path.name)
        if digest is not None and _summed(path, digest) != get_hex(digest):
            path.unlink()
    for old in pull.glob(f"{MARK}*"):
        old.unlink()
    mark.touch()


def _blobs(record: Record) -> list[Digest]:
    return [*record.blobs, *map(parse_digest, record.documents)]


def _summed(path: Path, digest: Digest) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, get_algorithm(digest)).hexdigest()


def _judged(layout: StoreLayout) -> str | None:
    """Return the boot recorded by the last recovery; tolerates any content after a crash."""
    try:
        return layout.judged.read_bytes()[:100].decode("ascii", "replace")
    except FileNotFoundError:
        return None

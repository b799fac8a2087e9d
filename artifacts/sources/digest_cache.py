"""Remembers the digests of files whose source states none, computed at the first download, for later downloads. I/O.

Uses the folder `sums/` of a store, one small file per Copy. Calls block: run them in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from artifacts.digest import BadDigestError, Digest, parse_digest
from artifacts.disk.durable_writes import Disk, list_entries
from artifacts.sources.file_selection import Listing
from artifacts.store.file_names import CopyKey
from artifacts.store.store import Store

SUMS_MAX = 10_000
"""Maximum number of Copies; the oldest are dropped."""
_BYTES_MAX = 16 << 20

log = logging.getLogger("pilotlight.artifacts.sources")


class Sums:
    """The remembered digests of one store."""

    def __init__(self, store: Store, disk: Disk | None = None) -> None:
        self._folder = store.layout.root / "sums"
        self._disk = disk or Disk()

    def remember(self, key: CopyKey, sums: Mapping[str, Digest]) -> None:
        """Remember digests by path; does nothing if the store is not writable."""
        try:
            self._disk.folder(self._folder)
            self._disk.write(self._path(key), msgspec.json.encode(sums))
            there = list_entries(self._folder)
            if len(there) > SUMS_MAX:
                there.sort(key=lambda one: one.stat(follow_symlinks=False).st_mtime)
                for one in there[: len(there) - SUMS_MAX]:
                    Path(one.path).unlink(missing_ok=True)
        except OSError as error:
            log.warning("event=checksums_save_failed digest=%s reason=%r", key.digest, error.strerror)

    def known(self, key: CopyKey, of: Listing) -> Listing:
        """Return the listing with the remembered digests as the `claim` of its files."""
        try:
            with self._path(key).open("rb") as file:
                said = msgspec.json.decode(file.read(_BYTES_MAX), type=dict[str, str])
            sums = {path: parse_digest(text) for path, text in said.items()}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, BadDigestError):
            return of
        taken = [
            one._replace(entry=one.entry._replace(claim=sums.get(one.entry.path, one.entry.claim))) for one in of.taken
        ]
        return of._replace(taken=tuple(taken))

    def _path(self, key: CopyKey) -> Path:
        return self._folder / key.name

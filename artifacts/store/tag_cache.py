"""Remembers what references meant when they were last pulled into a node's store, so tags need no new lookup. I/O.

Uses the folder `meanings/` of a store, one small file per reference. A reference with a digest always means that
digest. Unreadable entries are ignored and looked up again. The cache does not grant access to a Copy. Calls block: run
them in a thread.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Protocol

import msgspec

from artifacts.digest import BadDigestError, Digest, parse_digest
from artifacts.disk.durable_writes import Disk, list_entries
from artifacts.store.file_names import CopyKey
from artifacts.store.store import Store

MEANINGS_MAX = 10_000
"""Maximum number of references; the oldest are dropped."""
_BYTES_MAX = 64 << 10

log = logging.getLogger("pilotlight.artifacts.store")


class Meant(Protocol):
    """A reference to a registry or another source (`artifacts.fetch.fetch.Named`), stored by its `str()`."""

    @property
    def digest(self) -> Digest | None:
        """The digest in the reference, if any."""
        ...

    @property
    def host(self) -> str:
        """As `CopyKey.origin`."""
        ...


class _Meaning(msgspec.Struct, frozen=True):
    reference: str
    digest: str


class Meanings:
    """The remembered references of one store."""

    def __init__(self, store: Store, disk: Disk | None = None) -> None:
        self._folder = store.layout.root / "meanings"
        self._disk = disk or Disk()

    def remember(self, of: Meant, key: CopyKey) -> None:
        """Remember that the reference means this Copy; does nothing if the store is not writable."""
        if self.recall(of) == key:
            return
        try:
            self._keep(of, key)
        except OSError as error:
            log.warning("event=tag_cache_save_failed artifact=%s reason=%r", of, error.strerror)

    def _keep(self, of: Meant, key: CopyKey) -> None:
        self._disk.folder(self._folder)
        self._disk.write(self._path(of), msgspec.json.encode(_Meaning(str(of), key.digest)))
        there = list_entries(self._folder)
        if len(there) > MEANINGS_MAX:
            there.sort(key=lambda one: one.stat(follow_symlinks=False).st_mtime)
            for one in there[: len(there) - MEANINGS_MAX]:
                Path(one.path).unlink(missing_ok=True)

    def recall(self, of: Meant) -> CopyKey | None:
        """Return the key of the Copy, from the reference's digest or the cache; None if it was never pulled here."""
        digest = of.digest or self._digest(of)
        return None if digest is None else CopyKey(of.host, digest)

    def _digest(self, of: Meant) -> Digest | None:
        try:
            with self._path(of).open("rb") as file:
                said = msgspec.json.decode(file.read(_BYTES_MAX), type=_Meaning)
            return parse_digest(said.digest) if said.reference == str(of) else None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, BadDigestError):
            return None

    def _path(self, of: Meant) -> Path:
        return self._folder / hashlib.sha256(str(of).encode()).hexdigest()

"""Caches which logins a registry allowed to read a stored Copy, until these grants expire. I/O.

A Copy on the node must not bypass the registry's access control (kubernetes #18787): the registry checks each caller's
login before it gets the Copy. The folder `permits/` has an empty file per grant, named by a hash of login, registry and
manifest; its mtime is the time of the grant. It also has the key for hashing logins. A denial removes the earlier grant
for all processes; grants are never shared between logins, survive restarts, expire, and are limited in number. Logins
are not stored. Calls block.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from artifacts.digest import Digest
from artifacts.disk.durable_writes import FULL, SHUT, Disk, list_entries

FRESH_S = 300.0
"""A grant younger than this is used without asking the registry."""
AWAY_S_MAX = 86_400.0
"""Maximum age of a grant that is used while the registry is down, where that is enabled."""
PERMITS_MAX = 10_000
EARLY_S_MAX = 1.0
"""A grant further in the future than this is invalid: the clock was set back."""
_KEY = ".key"
_KEY_BYTES = 32

Asked = tuple[str, str, Digest]
"""(fingerprint of the login, registry, manifest digest)."""


class Permits:
    """The cached grants; `now_s` is in Unix seconds."""

    def __init__(
        self, folder: Path, disk: Disk | None = None, *, fresh_s: float = FRESH_S, away_s: float = AWAY_S_MAX,
        most: int = PERMITS_MAX,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._disk = disk or Disk()
        self._fresh_s = fresh_s
        self._away_s = away_s
        self._most = most
        self._own_key = secrets.token_bytes(_KEY_BYTES)
        """Used if the store has no readable key."""

    def __len__(self) -> int:
        """Return the number of cached grants."""
        return len(self._said())

    def fresh(self, asked: Asked, now_s: float) -> bool:
        """Whether the registry granted access so recently that it need not be asked again."""
        return self._within(asked, now_s, self._fresh_s)

    def while_away(self, asked: Asked, now_s: float) -> bool:
        """Whether an earlier grant suffices while the registry is down."""
        return self._within(asked, now_s, self._away_s)

    def answered(self, asked: Asked, now_s: float, *, yes: bool) -> None:
        """Record an answer. An unwritable store records no grant. Raises OSError if a denial cannot be recorded."""
        path = self._path(asked)
        if not yes:
            if path.exists():
                self._disk.remove(path)
                self._disk.sync(self._folder)
            return
        try:
            self._disk.folder(self._folder)
            path.touch(mode=0o600)
            os.utime(path, (now_s, now_s))
            self._bounded(now_s)
        except OSError as error:
            if error.errno not in SHUT | FULL:
                raise

    def key(self) -> bytes:
        """Return the store's key for fingerprints of logins, shared by all its processes."""
        path = self._folder / _KEY
        try:
            if not path.exists():
                self._disk.folder(self._folder)
                aside = self._folder / f"{_KEY}-{secrets.token_hex(8)}"
                with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(self._own_key)
                self._disk.sync(aside)
                with suppress(FileExistsError):  # two processes may create it at once
                    self._disk.link(aside, path)
                self._disk.remove(aside)
                self._disk.sync(self._folder)
            found = path.read_bytes()
        except OSError:
            return self._own_key
        return found if len(found) == _KEY_BYTES else self._own_key

    def _within(self, asked: Asked, now_s: float, lasts_s: float) -> bool:
        try:
            said_s = self._path(asked).stat().st_mtime
        except OSError:
            return False
        return -EARLY_S_MAX <= now_s - said_s < lasts_s

    def _bounded(self, now_s: float) -> None:
        said = sorted(self._said().items(), key=lambda one: one[1])
        over = len(said) - self._most
        for number, (path, said_s) in enumerate(said):
            if number < over or now_s - said_s >= self._away_s:
                path.unlink(missing_ok=True)

    def _said(self) -> dict[Path, float]:
        found = {}
        for one in list_entries(self._folder):
            if not one.name.startswith(_KEY):
                with suppress(FileNotFoundError):  # another process has just removed it
                    found[Path(one.path)] = one.stat(follow_symlinks=False).st_mtime
        return found

    def _path(self, asked: Asked) -> Path:
        text = b"".join(len(part.encode()).to_bytes(8) + part.encode() for part in asked)
        return self._folder / hashlib.sha256(text).hexdigest()

"""Who may have a Copy that lies here already: what registries said lately, and for how long that counts. I/O.

Owns the folder `permits/` of a store: an empty file for each yes, whose name is a sum of who asked for what where, and
whose time is when the registry said it; and the key that logins are summed with. A Copy on the node must not be a way
around the registry (kubernetes #18787): who asks is judged by the registry, with a login of its own, before it gets the
Copy. Promises: a no is remembered by nothing but the loss of the yes before it, in all processes; nobody is let in by
another's yes; a yes outlives a restart, and ends; what is remembered is bounded. No login is kept. It blocks.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from artifacts.digest import Digest
from artifacts.disk.disk import FULL, SHUT, Disk, list_entries

FRESH_S = 300.0
"""So long a yes is not asked for again."""
AWAY_S_MAX = 86_400.0
"""So long a yes lets in while the registry does not answer, where that is wanted at all."""
PERMITS_MAX = 10_000
EARLY_S_MAX = 1.0
"""A yes from later than now is none: somebody has set the clock back."""
_KEY = ".key"
_KEY_BYTES = 32

Asked = tuple[str, str, Digest]
"""The fingerprint of a login; the registry; the manifest."""


class Permits:
    """What was said, by `now_s`, Unix seconds."""

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
        """Where the store has none that we may read."""

    def __len__(self) -> int:
        """How many answers are remembered."""
        return len(self._said())

    def fresh(self, asked: Asked, now_s: float) -> bool:
        """The registry said yes so lately that it is not asked again."""
        return self._within(asked, now_s, self._fresh_s)

    def while_away(self, asked: Asked, now_s: float) -> bool:
        """The registry does not answer, and what it said before is enough."""
        return self._within(asked, now_s, self._away_s)

    def answered(self, asked: Asked, now_s: float, *, yes: bool) -> None:
        """The registry said so. A store that cannot be written remembers no yes. Raises OSError where a no is lost."""
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
        """What fingerprints of logins are made with: the store's own, so that all its processes make the same."""
        path = self._folder / _KEY
        try:
            if not path.exists():
                self._disk.folder(self._folder)
                aside = self._folder / f"{_KEY}-{secrets.token_hex(8)}"
                with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(self._own_key)
                self._disk.sync(aside)
                with suppress(FileExistsError):  # of two that make one at once
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
                with suppress(FileNotFoundError):  # another process has just forgotten it
                    found[Path(one.path)] = one.stat(follow_symlinks=False).st_mtime
        return found

    def _path(self, asked: Asked) -> Path:
        text = b"".join(len(part.encode()).to_bytes(8) + part.encode() for part in asked)
        return self._folder / hashlib.sha256(text).hexdigest()

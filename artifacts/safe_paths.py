"""Validates relative paths that come from untrusted artifacts. Pure.

Decides which paths may be written below a folder of the store, and which of them cannot coexist. Unsafe paths are
rejected, never repaired. The rules of the most restrictive file systems (case folding, Unicode normalization) apply on
every node, so that an artifact is the same everywhere.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

PATH_BYTES_MAX = 1024
NAME_BYTES_MAX = 255
"""Limit of one path component on common file systems."""
PARTS_MAX = 32
RESERVED_PREFIXES = (".pilotlight", ".wh.")
"""The store's own files, and whiteout markers (deletions) in image layers."""
_DEVICES = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)
_DRIVE = re.compile(r"[A-Za-z]:")


class BadPathError(ValueError):
    """The path is rejected; the message is a clause with the reason and only the beginning of the path."""


def check_path(text: str) -> str:
    """Return the path unchanged if it may be written below a folder. Raises BadPathError."""
    why = _refused(text)
    if why is not None:
        raise BadPathError(f"its path {text[:80]!r} {why}")
    return text


def _refused(text: str) -> str | None:
    if not text or text == ".":
        return "names no file"
    if not text.isprintable():  # NUL, line breaks, lone surrogates, bidirectional control characters
        return "has unprintable characters"
    if len(text.encode()) > PATH_BYTES_MAX:
        return f"is longer than {PATH_BYTES_MAX} bytes"
    if text.startswith("/") or "\\" in text or _DRIVE.match(text):
        return "is absolute, or has a backslash or a drive"
    parts = text.split("/")
    if len(parts) > PARTS_MAX:
        return f"is deeper than {PARTS_MAX} folders"
    return next((why for part in parts if (why := _refused_part(part)) is not None), None)


def _refused_part(part: str) -> str | None:
    if part in {"", ".", ".."}:
        return "has an empty part, or . or .. in it"
    if len(part.encode()) > NAME_BYTES_MAX:
        return f"has a part longer than {NAME_BYTES_MAX} bytes"
    if _DEVICES.fullmatch(part) or part.endswith((".", " ")) or part.startswith(" "):
        return "has a part that is not a valid file name on every system"
    if part.casefold().startswith(RESERVED_PREFIXES):
        return f"has a part that begins with a reserved prefix ({' or '.join(RESERVED_PREFIXES)})"
    return None


def make_collision_key(path: str) -> str:
    """Return a key that is equal for paths that are the same file on some file system (case, Unicode form)."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


class Tree:
    """The set of accepted paths."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._folders: dict[str, str] = {}

    def add(self, path: str, *, folder: bool = False) -> None:
        """Add a path that passed `check_path`. Raises BadPathError if it conflicts with a path already added."""
        own = make_collision_key(path)
        above = [own[: place.start()] for place in re.finditer("/", own)]
        self._check(path, self._files, [own, *above])
        if not folder:
            self._check(path, self._folders, [own])
            self._files[own] = path
        for one in [own, *above] if folder else above:
            self._folders.setdefault(one, path)

    def _check(self, path: str, there: Mapping[str, str], keys: list[str]) -> None:
        other = next((there[one] for one in keys if one in there), None)
        if other is not None:
            conflict = (
                f"in conflict with {other[:80]!r}: on some systems both are one path, or one is a folder of the other"
            )
            said = "a duplicate" if other == path else conflict
            raise BadPathError(f"its path {path[:80]!r} is {said}")

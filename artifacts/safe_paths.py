"""Paths that strangers chose for files of ours: taken as they are, or refused. Pure.

Owns which relative paths may be written below a folder of the store, and which of them cannot lie there together. None
is repaired: what would have to be is refused. What holds on the strangest file system that a node may have (one that
folds case, or Unicode forms) holds everywhere, so that an artifact is the same on every node.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

PATH_BYTES_MAX = 1024
NAME_BYTES_MAX = 255
"""Of one part; what file systems take."""
PARTS_MAX = 32
RESERVED_PREFIXES = (".pilotlight", ".wh.")
"""The store's own files, and what means a removal in layers of images."""
_DEVICES = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)
_DRIVE = re.compile(r"[A-Za-z]:")


class BadPathError(ValueError):
    """A path that is not taken; the text is a clause that says why, and shows no more than the path's begin."""


def check_path(text: str) -> str:
    """The path itself, where it may be written below a folder. Raises BadPathError."""
    why = _refused(text)
    if why is not None:
        raise BadPathError(f"its path {text[:80]!r} {why}")
    return text


def _refused(text: str) -> str | None:
    if not text or text == ".":
        return "names no file"
    if not text.isprintable():  # NUL, line ends, halves of characters, signs that turn the direction of writing
        return "has characters that cannot be shown"
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
        return "has a part that is no name of a file everywhere"
    if part.casefold().startswith(RESERVED_PREFIXES):
        return "has a part that is reserved"
    return None


def make_collision_key(path: str) -> str:
    """What two paths have in common that are one file somewhere: case and the form of accents do not count."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


class Tree:
    """The paths that are taken so far."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._folders: dict[str, str] = {}

    def add(self, path: str, *, folder: bool = False) -> None:
        """Takes this path, which is one by `check_path`. Raises BadPathError where it cannot lie beside the others."""
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
            said = "twice" if other == path else f"beside {other[:80]!r}, which is the same or a folder of it somewhere"
            raise BadPathError(f"its path {path[:80]!r} stands there {said}")

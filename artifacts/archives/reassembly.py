"""How an archive that was taken apart is put together again, byte by byte, out of the files that it became. Pure.

Owns the form of a recipe: where in the archive which file lies, and all bytes between, which are few: headers, padding,
the end. So a node gives to others the blob that a registry names, and keeps its weights once. An archive with much that
was not taken has none. Whoever gets what comes of it sums it, like all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from artifacts.oci.spans import Span

REST_BYTES_MAX = 4 << 20
"""Of an archive, beside its files: beyond it there is no recipe."""
RECIPE_BYTES_MAX = 64 << 20
"""As it is kept: with the paths of very many files."""


class ArchivedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file in an archive."""

    at: int
    """Its first byte there."""
    size: int
    path: str
    """Below the Copy's files."""


class Recipe(msgspec.Struct, frozen=True):
    """Of one archive that is not compressed."""

    size: int
    files: tuple[ArchivedFile, ...]
    """In order; none is empty."""
    rest: bytes
    """All that lies between them, joined."""


class FileRange(NamedTuple):
    """Bytes `first` up to `end` of a file below the Copy's files."""

    path: str
    first: int
    end: int


def list_gaps(size: int, files: Sequence[ArchivedFile]) -> list[Span]:
    """What of the archive is in no file. Raises ValueError where files overlap or lie outside."""
    found, at = list[Span](), 0
    for one in files:
        if one.at < at or one.size < 1 or one.at + one.size > size:
            raise ValueError("files of an archive lie over each other, or outside of it")
        if one.at > at:
            found.append(Span(at, one.at))
        at = one.at + one.size
    if at < size:
        found.append(Span(at, size))
    return found


def decode_recipe(text: bytes) -> Recipe | None:
    """None: it is none that can be believed."""
    try:
        found = msgspec.msgpack.decode(text, type=Recipe)
        rest = sum(one.end - one.first for one in list_gaps(found.size, found.files))
    except (msgspec.DecodeError, ValueError):
        return None
    return found if rest == len(found.rest) else None


def encode_recipe(recipe: Recipe) -> bytes:
    """As `decode_recipe` wants it."""
    return msgspec.msgpack.encode(recipe)


def iter_archive_range(recipe: Recipe, first: int, end: int) -> Iterator[bytes | FileRange]:
    """Bytes `first` up to `end` of the archive, in order."""
    at, used = 0, 0
    for one in (*recipe.files, ArchivedFile(recipe.size, 0, "")):
        between = recipe.rest[used : used + one.at - at]
        taken = between[max(first - at, 0) : max(end - at, 0)]
        if taken:
            yield taken
        used += len(between)
        begin, stop = max(first, one.at), min(end, one.at + one.size)
        if begin < stop:
            yield FileRange(one.path, begin - one.at, stop - one.at)
        at = one.at + one.size

"""Recipes that rebuild an extracted archive byte for byte from its files. Pure.

A recipe records the position of each file in the archive and the few bytes between the files: headers, padding and the
end. With it a node can serve the registry's blob to peers while storing the weights only once. An archive with much
content that was not extracted has no recipe. The receiver verifies the digest as for any other source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from artifacts.oci.blob_progress import Span

REST_BYTES_MAX = 4 << 20
"""Maximum bytes of an archive outside of its files; above it no recipe is made."""
RECIPE_BYTES_MAX = 64 << 20
"""Maximum encoded size, reached only with very many file paths."""


class ArchivedFile(msgspec.Struct, frozen=True, array_like=True):
    """Position of a file in an archive."""

    at: int
    """Offset of its first byte in the archive."""
    size: int
    path: str
    """Relative to the files folder of the copy in the store."""


class Recipe(msgspec.Struct, frozen=True):
    """Recipe of one uncompressed archive."""

    size: int
    files: tuple[ArchivedFile, ...]
    """In archive order; none is empty."""
    rest: bytes
    """All bytes between the files, concatenated."""


class FileRange(NamedTuple):
    """Bytes from `first` up to (excluding) `end` of a file below the files folder of the copy."""

    path: str
    first: int
    end: int


def list_gaps(size: int, files: Sequence[ArchivedFile]) -> list[Span]:
    """Return the spans of the archive outside its files. Raises ValueError if files overlap or exceed the archive."""
    found, at = list[Span](), 0
    for one in files:
        if one.at < at or one.size < 1 or one.at + one.size > size:
            raise ValueError(
                "byte ranges of files in the archive overlap, are empty, or lie beyond the end of the archive"
            )
        if one.at > at:
            found.append(Span(at, one.at))
        at = one.at + one.size
    if at < size:
        found.append(Span(at, size))
    return found


def decode_recipe(text: bytes) -> Recipe | None:
    """Decode and validate a recipe; None if it is invalid."""
    try:
        found = msgspec.msgpack.decode(text, type=Recipe)
        rest = sum(one.end - one.first for one in list_gaps(found.size, found.files))
    except (msgspec.DecodeError, ValueError):
        return None
    return found if rest == len(found.rest) else None


def encode_recipe(recipe: Recipe) -> bytes:
    """Encode a recipe for `decode_recipe`."""
    return msgspec.msgpack.encode(recipe)


def iter_archive_range(recipe: Recipe, first: int, end: int) -> Iterator[bytes | FileRange]:
    """Yield the archive's bytes from `first` up to (excluding) `end`, in order, as bytes or file ranges."""
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

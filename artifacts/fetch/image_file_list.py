"""Lists an image's files from the headers in its layers before a pull, to determine whether an engine can load it.

Only the headers of an uncompressed archive are requested, and only the beginning of a compressed one. Files are
accepted by the rules of a pull (`artifacts.archives.member_filter`). If not all names were read, the result says so,
since an unread file may be code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from typing import NamedTuple

from artifacts import safe_paths as paths
from artifacts.archives import member_filter as members
from artifacts.archives.decompress import FREE_BYTES, decompress_layer
from artifacts.archives.tar_reader import BLOCK_BYTES, BadArchiveError, Member, Reader
from artifacts.dialects.artifact_contents import Contents, File
from artifacts.registry.blobs import Blob, BlobSource

SPAN_BYTES = 64 << 10
"""Bytes of an archive per request."""
SPANS_MAX = 512
"""Maximum requests per image; an image that also contains software would need more."""
BEGIN_BYTES = 4 << 20
"""Bytes read of a compressed archive."""

COMPRESSED = (
    *(b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", (0xFD2FB528).to_bytes(4, "little")),
    *(skipped.to_bytes(4, "little") for skipped in range(0x184D2A50, 0x184D2A60)),
)
"""Magic bytes of gzip, bzip2, xz and zstd; some runtimes detect compression by these alone and would decompress."""
NOT_PLAIN = frozenset({"", ".", ".."})


class Inside(NamedTuple):
    """The visible content of an image."""

    root: str
    """The model's folder."""
    paths: tuple[str, ...]
    """Files, relative to the model's folder."""
    whole: bool
    """Whether all names were read."""


async def list_image_files(of: Contents, repository: str, source: BlobSource, *, allow_unsafe: bool = False) -> Inside:
    """List the image's files. Raises RegistryError, and BadArchiveError if a pull would reject the image."""
    walk = _Walk(repository, source)
    layers = [(one.file, *await walk.members(one.file)) for one in of.layers]
    names = [member.path for _, found, _ in layers for member in found]
    _check(names)
    root, tree = members.select_model_root(of.roots, names), paths.Tree()
    taken = list[str]()
    for file, found, _ in layers:
        sieve = members.Sieve(file, tree, root, allow_unsafe=allow_unsafe)
        judged = (sieve.judge(one) for one in found)
        taken += [one.path for one in judged if one is not None and not one.folder]
    return Inside(root, tuple(taken), all(whole for *_, whole in layers))


def _check(names: Iterable[str]) -> None:
    """Reject names that are not normalized. A pull ignores a name that is, as written, outside the model's folder.
    Container runtimes normalize the name first and may extract the file into the folder. Raises BadArchiveError.
    """
    for name in names:
        parts = members.strip_dot_slash(name).split("/")
        if parts != ["."] and not NOT_PLAIN.isdisjoint(parts):
            raise BadArchiveError(
                f"in the archive: the name {name[:80]!r} has an empty part, or . or .. in it, so programs may extract "
                f"it to different places"
            )


class _Walk:
    """Reads the archives of one image within a limit of requests."""

    def __init__(self, repository: str, source: BlobSource) -> None:
        self._repository = repository
        self._source = source
        self._spans = 0

    async def members(self, of: File) -> tuple[list[Member], bool]:
        """Return the members of an archive, and whether they are complete. Raises BadArchiveError, RegistryError."""
        if of.encoding == "tar":
            return await self._plain(of)
        begin = await self._read(of, 0, min(BEGIN_BYTES, of.size))
        found, ended = await asyncio.to_thread(_inflated, begin, of)
        return found, ended and len(begin) == of.size

    async def _plain(self, of: File) -> tuple[list[Member], bool]:
        found, reader = list[Member](), Reader()
        at = base = 0
        while at < of.size:
            self._spans += 1
            if self._spans > SPANS_MAX:
                return found, False
            piece, behind = await self._read(of, at, min(at + SPAN_BYTES, of.size)), 0
            if not at and piece.startswith(COMPRESSED):
                raise BadArchiveError("an archive that is declared as uncompressed is compressed")
            for event in reader.feed(piece):
                if isinstance(event, Member):
                    found.append(event)
                    behind = base + reader.at + -(-event.size // BLOCK_BYTES) * BLOCK_BYTES
            at += len(piece)
            if behind > at:  # skip the rest of the file's content
                at, base, reader = behind, behind, Reader()
        return found, True

    async def _read(self, of: File, begin: int, end: int) -> bytes:
        async with aclosing(self._source.read(Blob(self._repository, of.digest, of.size), begin, end)) as pieces:
            return b"".join([piece async for piece in pieces])


def _inflated(begin: bytes, of: File) -> tuple[list[Member], bool]:
    """Return the members in the beginning of a compressed archive, and whether it decompressed without an error."""
    found, reader = list[Member](), Reader()
    try:
        for piece in decompress_layer([begin], of.encoding, FREE_BYTES):
            found += [event for event in reader.feed(piece) if isinstance(event, Member)]
    except BadArchiveError:
        return found, False  # truncated or broken; a pull reports the latter
    return found, True

"""Lists the files of an image by the headers in its layers, before it is pulled: can an engine load it?

Of an uncompressed archive only the headers are requested, of a compressed one the beginning. Files are accepted by the
rules of a pull (`artifacts.archives.member_filter`). If not all names were read, the result says so, since an unread
file may be code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from typing import NamedTuple

from artifacts import safe_paths as paths
from artifacts.archives import member_filter as members
from artifacts.archives.decompress import FREE_BYTES, decompress_layer
from artifacts.archives.tar import BLOCK_BYTES, BadArchiveError, Member, Reader
from artifacts.dialects.contents import Contents, File
from artifacts.registry.blobs import Blob, BlobSource

SPAN_BYTES = 64 << 10
"""Of an archive, in one request."""
SPANS_MAX = 512
"""Of one image: the software that some have beside a model has more."""
BEGIN_BYTES = 4 << 20
"""Of a compressed one."""

COMPRESSED = (
    *(b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", (0xFD2FB528).to_bytes(4, "little")),
    *(skipped.to_bytes(4, "little") for skipped in range(0x184D2A50, 0x184D2A60)),
)
"""How gzip, bzip2, xz and zstd begin: some runtimes look at that alone, and would find another archive in this one."""
NOT_PLAIN = frozenset({"", ".", ".."})


class Inside(NamedTuple):
    """An image, seen from outside."""

    root: str
    """The folder of the model."""
    paths: tuple[str, ...]
    """Of its files, below that."""
    whole: bool
    """All names were seen."""


async def list_image_files(of: Contents, repository: str, source: BlobSource, *, allow_unsafe: bool = False) -> Inside:
    """What is in it. Raises BadArchiveError where a pull would refuse it, RegistryError."""
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
    """A pull passes by what is not below the model's folder as it is written; a container runtime makes names plain
    first, and would lay it there. Raises BadArchiveError.
    """
    for name in names:
        parts = members.strip_dot_slash(name).split("/")
        if parts != ["."] and not NOT_PLAIN.isdisjoint(parts):
            raise BadArchiveError(f"in the archive: the name {name[:80]!r} could be read in two ways")


class _Walk:
    """Over the archives of one image, with what it may ask for."""

    def __init__(self, repository: str, source: BlobSource) -> None:
        self._repository = repository
        self._source = source
        self._spans = 0

    async def members(self, of: File) -> tuple[list[Member], bool]:
        """Of one archive, and whether these are all. Raises BadArchiveError, RegistryError."""
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
                raise BadArchiveError("an archive that says it is not compressed begins as one that is")
            for event in reader.feed(piece):
                if isinstance(event, Member):
                    found.append(event)
                    behind = base + reader.at + -(-event.size // BLOCK_BYTES) * BLOCK_BYTES
            at += len(piece)
            if behind > at:  # the rest of its bytes is nobody's matter
                at, base, reader = behind, behind, Reader()
        return found, True

    async def _read(self, of: File, begin: int, end: int) -> bytes:
        async with aclosing(self._source.read(Blob(self._repository, of.digest, of.size), begin, end)) as pieces:
            return b"".join([piece async for piece in pieces])


def _inflated(begin: bytes, of: File) -> tuple[list[Member], bool]:
    """What is in this begin of an archive; and whether nothing was odd about its end."""
    found, reader = list[Member](), Reader()
    try:
        for piece in decompress_layer([begin], of.encoding, FREE_BYTES):
            found += [event for event in reader.feed(piece) if isinstance(event, Member)]
    except BadArchiveError:
        return found, False  # it ends in its midst; or it is broken, which whoever pulls it says
    return found, True

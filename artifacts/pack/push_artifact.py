"""Whole artifacts, pushed out of a layout to a registry. I/O.

Owns the order: of a push first every blob, then the manifests, those that others name first, and the tag last, so that
what can be found is whole. Several blobs go at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from artifacts.digest import Digest
from artifacts.errors import RegistryError
from artifacts.oci.descriptor import Descriptor
from artifacts.pack import chunk_sums
from artifacts.pack.oci_layout import OciLayout
from artifacts.registry import push
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client

log = logging.getLogger("pilotlight.registry")
AT_ONCE = 4
"""Blobs on their way to one registry."""


async def push_layout(
    client: Client, repository: str, tag: str, layout: OciLayout, moved: Callable[[int], None] = lambda _: None,
    *, mount: str = "", chunk_bytes: int = 0,
) -> Digest:  # fmt: skip
    """Pushes a layout's artifact, and with large blobs the sums of their parts. `moved`: told of bytes as they are
    read; `mount`, `chunk_bytes`: as of `pushing.push_blob`. Raises BadManifestError, RegistryError.
    """
    whole = await asyncio.to_thread(layout.whole)
    free = asyncio.Semaphore(AT_ONCE)

    async def one(of: Descriptor) -> None:
        async with free:
            source = _Counted(layout, of, moved)
            blob = Blob(repository, of.digest, of.size)
            await push.push_blob(client, blob, source, mount=mount, chunk_bytes=chunk_bytes)

    try:
        async with asyncio.TaskGroup() as group:
            for of in whole.blobs:
                group.create_task(one(of))
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None  # the others were only ended with it
    for of, content in whole.documents:
        await push.push_manifest(client, repository, of.digest, content, of.media_type)
    try:
        await chunk_sums.push_chunk_sums(client, repository, layout)
    except RegistryError as error:  # pulls do without
        log.warning("event=chunk_sums_unpushed reason=%r", str(error))
    top, content = whole.documents[-1]
    return await push.push_manifest(client, repository, tag, content, top.media_type)


class _Counted:
    """A blob's bytes, which are counted as they are read."""

    def __init__(self, layout: OciLayout, of: Descriptor, moved: Callable[[int], None]) -> None:
        self._source = push.FileSource(layout.path(of.digest))
        self._moved = moved

    async def read(self, first: int, end: int) -> AsyncIterator[bytes]:
        """As `pushing.Source`."""
        async with aclosing(self._source.read(first, end)) as pieces:
            async for piece in pieces:
                self._moved(len(piece))
                yield piece

"""Pushes a whole artifact from a layout to a registry. I/O.

Pushes all blobs first, several concurrently, then the manifests (referenced ones first), and the tag last, so that
everything that can be found is complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from artifacts.digest import Digest
from artifacts.oci.descriptor import Descriptor
from artifacts.pack import chunk_sums
from artifacts.pack.oci_layout import OciLayout
from artifacts.registry import push
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry_errors import RegistryError

log = logging.getLogger("pilotlight.artifacts.pack")
AT_ONCE = 4
"""Maximum concurrent blob uploads to one registry."""


async def push_layout(
    client: Client, repository: str, tag: str, layout: OciLayout, moved: Callable[[int], None] = lambda _: None,
    *, mount: str = "", chunk_bytes: int = 0,
) -> Digest:  # fmt: skip
    """Push a layout's artifact, plus the part digests of large blobs. `moved`: called with the bytes read; `mount`,
    `chunk_bytes`: as in `push.push_blob`. Raises BadManifestError, RegistryError.
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
        raise several.exceptions[0] from None  # the other tasks were cancelled because of this error
    for of, content in whole.documents:
        await push.push_manifest(client, repository, of.digest, content, of.media_type)
    try:
        await chunk_sums.push_chunk_sums(client, repository, layout)
    except RegistryError as error:  # pulls work without them
        log.warning("event=chunk_sums_push_failed reason=%r", str(error))
    top, content = whole.documents[-1]
    return await push.push_manifest(client, repository, tag, content, top.media_type)


class _Counted:
    """A blob's bytes, counted as they are read."""

    def __init__(self, layout: OciLayout, of: Descriptor, moved: Callable[[int], None]) -> None:
        self._source = push.FileSource(layout.path(of.digest))
        self._moved = moved

    async def read(self, first: int, end: int) -> AsyncIterator[bytes]:
        """Implements `push.UploadSource`."""
        async with aclosing(self._source.read(first, end)) as pieces:
            async for piece in pieces:
                self._moved(len(piece))
                yield piece

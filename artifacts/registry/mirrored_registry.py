"""A registry preceded by mirrors: tried in order, each with its own login, none trusted. I/O.

Content with a digest may come from any mirror, since it is verified. The registry itself resolves tags, unless a mirror
is configured to do so. A mirror that is wrong, incomplete or down costs one attempt, which is logged.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from artifacts.digest import Digest, get_algorithm, get_hex
from artifacts.http.transport import DetachedBody, Limits
from artifacts.registry import blobs, manifests
from artifacts.registry.blobs import Blob, Moved, Sink
from artifacts.registry.client import Client
from artifacts.registry.manifests import RawManifest
from artifacts.registry_errors import BrokenError, MismatchError, RegistryError

log = logging.getLogger("pilotlight.artifacts.registry")


class Mirror(NamedTuple):
    """A mirror of the registry."""

    client: Client
    prefix: str = ""
    """Prefix of the repository name, including the /: `dockerhub/`."""
    tags: bool = False
    """Whether it may resolve tags."""


class Mirrored:
    """A registry and its mirrors, which are tried first."""

    def __init__(self, client: Client, mirrors: Sequence[Mirror] = ()) -> None:
        self._places = [*mirrors, Mirror(client, tags=True)]
        self.vouched = False
        """Whether the registry itself gave a manifest to this login; mirrors do not prove access."""

    def wants(self, artifact: Digest) -> None:
        """Set the artifact whose blobs are requested next; ignored here, used by `Swarm`."""

    async def manifest(self, repository: str, asked: str, size: int | None = None) -> RawManifest:
        """Fetch a manifest like `manifests.fetch_manifest`, if possible from a mirror. Raises the registry's error."""
        for client, prefix, tags in self._places[:-1]:
            if ":" not in asked and not tags:
                continue
            try:
                return await manifests.fetch_manifest(client, prefix + repository, asked, size)
            except RegistryError as error:
                _tell(error)
        found = await manifests.fetch_manifest(self._places[-1].client, repository, asked, size)
        self.vouched = True
        return found

    @property
    def lonely(self) -> bool:
        """Whether there are no mirrors."""
        return len(self._places) == 1

    def doubted(self, blob: Blob) -> Mirrored:
        """Return the registry alone, to fetch all of a blob whose digest did not match."""
        del blob
        return Mirrored(self._places[-1].client)

    def order(self, what: str, count: int) -> list[int]:
        """Return the order in which `count` blobs, or parts of one, are requested; `what` names them."""
        del what
        return list(range(count))

    @property
    def limits(self) -> Limits:
        """Timeouts of responses."""
        return self._places[-1].client.limits

    async def read(
        self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[bytes, None]:
        """As `blobs.stream_blob`. If a mirror fails after some bytes, the next one continues from there.

        A whole blob is verified here over the bytes of all places. On a mismatch, the place that
        returned wrong bytes is unknown, so an error is raised and the caller retries without mirrors.
        """
        at, end = first, blob.size if end is None else end
        whole = first == 0 and end == blob.size and len(self._places) > 1 and sink is None
        counted = None if sink is None else _Counted(sink)
        summed = hashlib.new(get_algorithm(blob.digest)) if whole else None
        for client, prefix, _ in self._places[:-1]:
            try:
                async with aclosing(
                    blobs.stream_blob(client, blob._replace(repository=prefix + blob.repository), at, end, counted)
                ) as pieces:
                    async for piece in pieces:
                        at += len(piece)
                        if summed is not None:
                            summed.update(piece)
                        yield piece
            except RegistryError as error:
                _tell(error)
                at += 0 if counted is None else counted.taken()
                if isinstance(error, MismatchError) and at > first:
                    raise
            else:
                return
        async with aclosing(blobs.stream_blob(self._places[-1].client, blob, at, end, sink)) as pieces:
            async for piece in pieces:
                if summed is not None:
                    summed.update(piece)
                yield piece
        if summed is not None and summed.hexdigest() != get_hex(blob.digest):
            raise MismatchError(f"{blob}: its bytes, from more than one source, do not match its digest")


class _Counted:
    """Counts the bytes passed to a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._count = 0

    async def move(self, at: int, body: DetachedBody) -> Moved:
        moved = await self._sink.move(at, body)
        self._count += moved.came
        return moved

    def broke(self, error: BrokenError) -> None:
        self._sink.broke(error)

    def taken(self) -> int:
        """Return the count since the last call."""
        count, self._count = self._count, 0
        return count


def _tell(error: RegistryError) -> None:
    log.warning("event=mirror_failed reason=%r", str(error))

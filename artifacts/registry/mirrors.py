"""A registry with mirrors before it: each asked in turn, each with its own login, none believed. I/O.

Owns the order. Promises: what a digest names may come from anybody, for it is checked; what a tag means the registry
itself says, unless a person says that a mirror may; a mirror that lies, lacks something or is away costs one try, and
is said in the log.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from artifacts import digest
from artifacts.digest import Digest
from artifacts.errors import BrokenError, MismatchError, RegistryError
from artifacts.http.transport import DetachedBody, Limits
from artifacts.registry import blobs, manifests
from artifacts.registry.blobs import Blob, Moved, Sink
from artifacts.registry.client import Client
from artifacts.registry.manifests import RawManifest

log = logging.getLogger("pilotlight.registry")


class Mirror(NamedTuple):
    """Somebody who has what the registry has."""

    client: Client
    prefix: str = ""
    """Before the repository's name, with its /: `dockerhub/`."""
    tags: bool = False
    """It may say what a tag means."""


class Mirrored:
    """One registry and its mirrors, which come first."""

    def __init__(self, client: Client, mirrors: Sequence[Mirror] = ()) -> None:
        self._places = [*mirrors, Mirror(client, tags=True)]
        self.vouched = False
        """The registry itself has given a manifest to this login; from others nobody learns who may have it."""

    def wants(self, artifact: Digest) -> None:
        """Whose blobs are asked for from now on."""

    async def manifest(self, repository: str, asked: str, size: int | None = None) -> RawManifest:
        """As `registry.manifest`; the error is the registry's own."""
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
        """There are no mirrors."""
        return len(self._places) == 1

    def doubted(self, blob: Blob) -> Mirrored:
        """Bytes of this blob were others than its digest says: whom to ask for all of it now, the registry alone."""
        del blob
        return Mirrored(self._places[-1].client)

    def order(self, what: str, count: int) -> list[int]:
        """In which order so many blobs, or parts of one, are asked for; `what` names them."""
        del what
        return list(range(count))

    @property
    def limits(self) -> Limits:
        """How long answers may take."""
        return self._places[-1].client.limits

    async def read(
        self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[bytes, None]:
        """As `blobs.stream_blob`. Where a mirror fails after some bytes, the next goes on from there.

        Bytes of two places are still bytes of one digest, so of a whole blob all are summed here; where that does not
        hold, nobody knows who lied, and it is an error: the caller asks again without mirrors.
        """
        at, end = first, blob.size if end is None else end
        whole = first == 0 and end == blob.size and len(self._places) > 1 and sink is None
        counted = None if sink is None else _Counted(sink)
        summed = hashlib.new(digest.get_algorithm(blob.digest)) if whole else None
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
        if summed is not None and summed.hexdigest() != digest.get_hex(blob.digest):
            raise MismatchError(f"{blob}: its bytes, of more than one place, are others than its digest says")


class _Counted:
    """A sink, and how much went there."""

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
        """Since it was last asked."""
        count, self._count = self._count, 0
        return count


def _tell(error: RegistryError) -> None:
    log.warning("event=registry_mirror reason=%r", str(error))

"""Inspects an artifact at its source before it is pulled, for the agent's report. I/O.

Reports nothing about an artifact that a pull would refuse. For images, the digest is that of the image that a container
runtime would choose on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

from msgspec.structs import replace

from artifacts import file_kinds as kinds
from artifacts.archives.tar_reader import BadArchiveError
from artifacts.dialects import images
from artifacts.dialects.artifact_contents import Contents, RefusedError
from artifacts.fetch import fetch, image_file_list
from artifacts.fetch import file_host_files as gather
from artifacts.fetch.fetch import Lies, Ways
from artifacts.formats import gguf
from artifacts.reference import Reference
from artifacts.registry import resolve
from artifacts.registry.blobs import BlobSource
from artifacts.sources.file_host_client import Lone
from autoscaler.agent_contract import WeightsReport
from pilotlight.models import header_report

LOADABLE_MAX = 5
"""Maximum number of loadable files reported; with more than one, none is loaded automatically."""
HEADERS_MAX = 256
"""Maximum number of cached artifacts; the oldest are evicted."""
NOT_WHOLE = (
    "some file names in its compressed layers are unknown before a pull, and any file may be code: push the layers "
    "uncompressed, as `pilotlight weights push` does, or set allowUnsafe"
)
Fields = Mapping[str, object]
"""Fields of a WeightsReport."""


class Headers:
    """Caches headers, and the names of files in images, by source and digest. Each is read once, whatever the artifact
    is called. Access to the manifest must have been checked before.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Fields] = {}
        self._reading: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def cached(self, of: Hashable, read: Callable[[], Awaitable[Fields]]) -> Fields:
        """Return the cached result, or that of `read`. Failures are not cached."""
        async with self._reading.setdefault(of, asyncio.Lock()):
            kept = self._kept.get(of)
            if kept is None:
                kept = await read()
                if not kept.keys().isdisjoint({"header", "image"}):
                    self._kept[of] = kept
                if len(self._kept) > HEADERS_MAX:
                    del self._kept[next(iter(self._kept))]
            return kept


async def inspect_artifact(
    said: WeightsReport, of: Lies, by: Ways, folder: Path | None = None, headers: Headers | None = None
) -> WeightsReport:
    """Return `said`, the request, with the findings. `folder`: temporary folder for the header; None: do not read it.
    `headers`: the cache. Raises RegistryError, BadManifestError.
    """
    unsafe, headers = said.allow_unsafe, headers or Headers()
    if not isinstance(of, Reference):
        async with fetch.open_source(of, by) as there:
            listing = (await there.look(allow_unsafe=unsafe)).listing
            report = replace(said, digest=listing.digest, no_image="it is not in a registry")
            if folder is None:
                return report
            lone, named = Lone(there.place), gather.list_all_files(listing)
            return replace(
                report,
                **await headers.cached(
                    (listing.place, listing.digest, unsafe),
                    lambda: header_report.fetch_header_report(named, listing.place, lone, folder),
                ),
            )
    async with by.registries.opened(of.host) as source:
        found = await resolve.resolve_reference(source, of, resolve.detect_platform(), allow_unsafe=unsafe, images=True)
        is_image = images.DIALECT.knows(found.manifest)
        report = replace(said, digest=found.chosen)
        if is_image:
            names, one = found.contents, ("names", of.host, of.repository, found.chosen, unsafe)
            seen = await headers.cached(one, lambda: _seen(names, of.repository, source, allow_unsafe=unsafe))
            report = replace(report, **seen)
        else:
            report = replace(report, no_image=f"it is not an image ({found.contents.dialect})")
        if folder is None:
            return report
        if is_image:  # files of a model published together with the image take precedence
            found = await resolve.resolve_reference(source, of, resolve.detect_platform(), allow_unsafe=unsafe)
        try:
            files = found.contents.files()
        except RefusedError as error:
            return replace(report, no_header=str(error))
        key = of.host, of.repository, found.chosen, unsafe
        fields = await headers.cached(
            key, lambda: header_report.fetch_header_report(files, of.repository, source, folder)
        )
        return replace(report, **fields)


async def _seen(of: Contents, repository: str, source: BlobSource, *, allow_unsafe: bool) -> Fields:
    """Return the findings about an image's contents."""
    try:
        of.files()
        seen = await image_file_list.list_image_files(of, repository, source, allow_unsafe=allow_unsafe)
    except (BadArchiveError, RefusedError) as error:
        return {"no_image": str(error)}
    if not (seen.whole or allow_unsafe):
        return {"no_image": NOT_WHOLE}
    return {"image": seen.root, **list_loadable_files(seen.paths)}


def list_loadable_files(paths: tuple[str, ...] | list[str]) -> dict[str, tuple[str, ...]]:
    """Return the files that an engine could load as weights or adapters."""
    return {
        "ggufs": tuple(gguf.list_base_files(paths)[:LOADABLE_MAX]),
        "adapters": tuple(kinds.list_adapters(paths)[:LOADABLE_MAX]),
    }

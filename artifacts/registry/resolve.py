"""Resolves a reference in its registry to the manifest, its config, and the files that they list. I/O.

Follows indexes to the manifest for this node. Every document matches the digest and size stated by the previous one; no
weights are fetched. `artifacts.dialects.artifact_contents` decides which files are accepted.
"""

from __future__ import annotations

import os
from contextlib import aclosing
from typing import NamedTuple

from artifacts.dialects import artifact_contents as contents
from artifacts.dialects.artifact_contents import Contents
from artifacts.digest import Digest
from artifacts.oci import manifest
from artifacts.oci.descriptor import Platform
from artifacts.oci.manifest import Manifest
from artifacts.reference import Reference
from artifacts.registry.blobs import Blob
from artifacts.registry.mirrored_registry import Mirrored

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Resolved(NamedTuple):
    """A resolved artifact, before any weights are fetched."""

    digest: Digest
    """Digest that the reference means now; that of the index, if there is one."""
    chosen: Digest
    """Digest of the manifest itself."""
    manifest: Manifest
    contents: Contents
    documents: tuple[bytes, ...]
    """All documents as received: indexes, the manifest, its config."""

    @property
    def unsafe(self) -> bool:
        """Whether some layers are accepted only with `allow_unsafe`."""
        if not self.contents.allow_unsafe:
            return False
        return any(one.refusal for one in contents.read_contents(self.manifest, self.documents[-1]).layers)


def detect_platform() -> Platform:
    """Return this machine's platform, as images name it."""
    said = os.uname()
    return Platform(said.sysname.lower(), _ARCHITECTURES.get(said.machine, said.machine))


async def resolve_reference(
    source: Mirrored, of: Reference, platform: Platform, *, allow_unsafe: bool = False, images: bool = False
) -> Resolved:
    """Resolve a reference. `allow_unsafe`: as in `artifact_contents.read_contents`; `images`: as in
    `manifest.select_manifest`. Raises RegistryError, BadManifestError.
    """
    answer = await source.manifest(of.repository, of.asked)
    digest, way, documents = answer.digest, list[Digest](), list[bytes]()
    while True:
        documents.append(answer.body)
        found = manifest.parse_manifest(answer.body, content_type=answer.media_type, digest=answer.digest)
        if isinstance(found, Manifest):
            config = await _config(source, of.repository, found)
            read = contents.read_contents(found, config, allow_unsafe=allow_unsafe)
            return Resolved(digest, answer.digest, found, read, (*documents, config))
        entry = manifest.select_manifest(found, platform, way, images=images)
        way.append(answer.digest)
        answer = await source.manifest(of.repository, entry.digest, entry.size)


async def _config(source: Mirrored, repository: str, of: Manifest) -> bytes:
    blob = Blob(repository, of.config.digest, of.config.size)
    async with aclosing(source.read(blob)) as pieces:
        return b"".join([piece async for piece in pieces])

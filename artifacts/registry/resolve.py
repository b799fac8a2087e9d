"""What a reference means in its registry: its manifest, its config, and the files that they name. I/O.

Owns the way through indexes to the one manifest for this node. Promises: every document on the way has the digest and
the size that the one before says; nothing of a model is fetched yet. What is taken is `artifacts.dialects.contents`' to
say.
"""

from __future__ import annotations

import os
from contextlib import aclosing
from typing import NamedTuple

from artifacts.dialects import contents
from artifacts.dialects.contents import Contents
from artifacts.digest import Digest
from artifacts.oci import manifest
from artifacts.oci.descriptor import Platform
from artifacts.oci.manifest import Manifest
from artifacts.reference import Reference
from artifacts.registry.blobs import Blob
from artifacts.registry.mirrors import Mirrored

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Resolved(NamedTuple):
    """An artifact, before its first byte of weights."""

    digest: Digest
    """What the reference means now: an index's own, where it is one."""
    chosen: Digest
    """Of the manifest itself."""
    manifest: Manifest
    contents: Contents
    documents: tuple[bytes, ...]
    """Every document on the way, as it came: indexes, the manifest, its config."""

    @property
    def unsafe(self) -> bool:
        """Of its layers some were taken only since all is."""
        if not self.contents.allow_unsafe:
            return False
        return any(one.refusal for one in contents.read_contents(self.manifest, self.documents[-1]).layers)


def detect_platform() -> Platform:
    """The machine that runs this, as images name it."""
    said = os.uname()
    return Platform(said.sysname.lower(), _ARCHITECTURES.get(said.machine, said.machine))


async def resolve_reference(
    source: Mirrored, of: Reference, platform: Platform, *, allow_unsafe: bool = False, images: bool = False
) -> Resolved:
    """`allow_unsafe`: as of `contents.read_contents`; `images`: as of `platforms.choose`. Raises RegistryError,
    BadManifestError.
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

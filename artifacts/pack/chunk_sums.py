"""Digests of the parts of large blobs, stored in the registry next to an artifact, to repair partial corruption. I/O.

The list is an artifact with one JSON layer, whose subject is the pushed artifact. A pull that receives wrong bytes
reads it and fetches only the bad parts again. It is no proof, only a reason to keep bytes: a file is still verified by
its full digest. Missing or unreadable lists are ignored.

    {"blobs": {"sha256:HEX": {"partBytes": 33554432, "sums": ["HEX of SHA-256", ...]}}}
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec

from artifacts.digest import Digest, compute_digest, parse_digest
from artifacts.oci import blob_progress, manifest
from artifacts.oci.descriptor import BadManifestError, Descriptor
from artifacts.oci.manifest import Manifest
from artifacts.pack.oci_layout import OciLayout
from artifacts.registry import blobs, manifests
from artifacts.registry import push as pushing
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry.referrers import list_referrers
from artifacts.registry_errors import RegistryError

KIND = "application/vnd.pilotlight.chunks.v1+json"
EMPTY_KIND, EMPTY = "application/vnd.oci.empty.v1+json", b"{}"
LISTS_MAX = 4
"""Maximum lists read per artifact."""
LIST_BYTES_MAX = 32 << 20
"""Enough for 16 TiB in parts of 32 MiB."""
PIECE_BYTES = 1 << 20

log = logging.getLogger("pilotlight.artifacts.pack")


class _Sums(msgspec.Struct, frozen=True, rename="camel"):
    part_bytes: int
    sums: list[str]


class _List(msgspec.Struct, frozen=True):
    blobs: dict[str, _Sums]


class _Bytes:
    """An in-memory source for `push_blob`."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def read(self, first: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes of a range."""
        yield self._content[first:end]


async def push_chunk_sums(client: Client, repository: str, layout: OciLayout) -> Digest | None:
    """Push the part digests of the layout's artifact, which has been pushed; None if every blob fits one request.

    Raises as `push.push_blob`, and OSError.
    """
    whole = await asyncio.to_thread(layout.whole)
    large = {one.digest: layout.path(one.digest) for one in whole.blobs if one.size > blob_progress.WHOLE_BYTES_MAX}
    if not large:
        return None
    content = await asyncio.to_thread(compute_chunk_sums, large)
    top, _ = whole.documents[-1]
    for one in (content, EMPTY):
        await pushing.push_blob(client, Blob(repository, compute_digest(one), len(one)), _Bytes(one))
    body = _document(top, content)
    return await pushing.push_manifest(client, repository, compute_digest(body), body, manifest.OCI_MANIFEST)


def compute_chunk_sums(files: Mapping[Digest, Path]) -> bytes:
    """Compute the part digests of these files. Blocks. Raises OSError."""
    found = {str(digest): _summed(path) for digest, path in sorted(files.items())}
    return msgspec.json.encode(_List(found))


def _summed(path: Path) -> _Sums:
    size = path.stat().st_size
    part, sums = blob_progress.part_bytes(size), list[str]()
    with path.open("rb", buffering=0) as file:
        for first in range(0, size, part):
            summed, left = hashlib.sha256(), min(part, size - first)
            while left and (piece := file.read(min(PIECE_BYTES, left))):
                summed.update(piece)
                left -= len(piece)
            sums.append(summed.hexdigest())
    return _Sums(part, sums)


def _document(subject: Descriptor, content: bytes) -> bytes:
    def described(kind: str, of: bytes) -> dict[str, object]:
        return {"mediaType": kind, "digest": compute_digest(of), "size": len(of)}

    return msgspec.json.encode(
        {
            "schemaVersion": 2,
            "mediaType": manifest.OCI_MANIFEST,
            "artifactType": KIND,
            "config": described(EMPTY_KIND, EMPTY),
            "layers": [described(KIND, content)],
            "subject": {"mediaType": subject.media_type, "digest": subject.digest, "size": subject.size},
        }
    )


async def fetch_chunk_sums(client: Client, repository: str, subject: Digest, blob: Digest, size: int) -> Sequence[str]:
    """Return the digests of a blob's parts if a list with the same part size exists, else nothing."""
    try:
        for one in (await list_referrers(client, repository, subject, KIND))[:LISTS_MAX]:
            found = (await _read(client, repository, parse_digest(one.digest))).blobs.get(blob)
            if found is not None and found.part_bytes == blob_progress.part_bytes(size):
                return found.sums
    except (RegistryError, BadManifestError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.info("event=chunk_sums_read_failed digest=%s reason=%r", subject, str(error))
    return ()


async def _read(client: Client, repository: str, digest: Digest) -> _List:
    came = await manifests.fetch_manifest(client, repository, digest)
    found = manifest.parse_manifest(came.body, content_type=came.media_type, digest=came.digest)
    if not isinstance(found, Manifest) or len(found.layers) != 1 or found.layers[0].size > LIST_BYTES_MAX:
        raise BadManifestError("it is not a list of part digests")
    layer = found.layers[0]
    async with aclosing(blobs.stream_blob(client, Blob(repository, layer.digest, layer.size))) as pieces:
        return msgspec.json.decode(b"".join([piece async for piece in pieces]), type=_List)

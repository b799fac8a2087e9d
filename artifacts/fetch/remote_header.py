"""Fetches the header of a remote model as a local file, to estimate its needs before a pull. I/O.

Creates sparse files with a GGUF's name, size and first bytes and a hole instead of the weights, so that header readers
need no special case. Only a few MiB are requested, whatever the model's size. The bytes are not verified, since only
the complete file has a digest: they serve planning only and are never loaded by an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

from artifacts.archives.tar import Member, Reader
from artifacts.dialects.contents import File
from artifacts.fetch.registry import Registries
from artifacts.formats import gguf
from artifacts.formats.gguf import GgufError
from artifacts.formats.hf_config import CONFIG_BYTES_MAX
from artifacts.reference import Reference
from artifacts.registry import resolve
from artifacts.registry.blobs import Blob, BlobSource

FIRST_BYTES = 4 << 20
CONFIG = "config.json"
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""An empty safetensors header: for these files only the size matters."""
BYTES_MAX = 64 << 20
"""Limit of a header; one with a large vocabulary has about 10 MiB."""


async def fetch_artifact_headers(
    of: Reference, registries: Registries, folder: Path, *, allow_unsafe: bool = False
) -> list[str]:
    """Fetch the artifact's GGUF headers below `folder`, which is created; return their paths, empty if there are none.

    Raises RegistryError, BadManifestError, GgufError, BadArchiveError, OSError.
    """
    async with registries.opened(of.host) as source:
        found = await resolve.resolve_reference(source, of, resolve.detect_platform(), allow_unsafe=allow_unsafe)
        return await fetch_gguf_headers(found.contents.files(), of.repository, source, folder)


async def fetch_gguf_headers(of: Iterable[File], repository: str, source: BlobSource, folder: Path) -> list[str]:
    """As `fetch_artifact_headers`, for the files of an artifact."""
    files = [one for one in of if one.path.endswith(".gguf") and one.encoding in {"raw", "tar"}]
    for one in files:
        path = folder / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(_put, path, b"", one.size)
    for one in files:
        if gguf.is_first_part(Path(one.path)):
            await _begin(repository, source, one, folder / one.path)
    return [one.path for one in files]


async def fetch_config_header(of: Iterable[File], repository: str, source: BlobSource, folder: Path) -> bool:
    """Fetch `config.json` and placeholders for its safetensors into `folder`, for `artifacts.formats.hf_config`; return
    False if the artifact has none. Raises RegistryError, BadArchiveError, OSError.
    """
    files = {one.path: one for one in of if one.encoding in {"raw", "tar"}}
    config = files.get(CONFIG)
    if config is None or config.size > CONFIG_BYTES_MAX:
        return False
    async with aclosing(source.read(Blob(repository, config.digest, config.size))) as pieces:
        whole = b"".join([piece async for piece in pieces])
    content = _content(whole)[0] if config.encoding == "tar" else whole
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread(_put, folder / CONFIG, content, len(content))
    for one in files.values():
        if "/" not in one.path and one.path.endswith(".safetensors") and one.size >= len(NO_TENSORS):
            await asyncio.to_thread(_put, folder / one.path, NO_TENSORS, one.size)
    return True


async def _begin(repository: str, source: BlobSource, one: File, path: Path) -> None:
    """Fetch enough of the file for the header. Raises GgufError if the header is too large or invalid."""
    want = FIRST_BYTES
    while True:
        end = min(want, one.size)
        async with aclosing(source.read(Blob(repository, one.digest, one.size), 0, end)) as pieces:
            begin = b"".join([piece async for piece in pieces])
        content, size = _content(begin) if one.encoding == "tar" else (begin, one.size)
        await asyncio.to_thread(_put, path, content, size)
        try:
            if await asyncio.to_thread(gguf.header_bytes, path) <= len(content):
                return
        except GgufError:
            if end == one.size:
                raise
        if end == one.size or want >= BYTES_MAX:
            raise GgufError(f"{one.path}: its header is larger than {BYTES_MAX >> 20} MiB, or broken")
        want *= 4


def _content(begin: bytes) -> tuple[bytes, int]:
    """Return the beginning of an archive's first file, and the size of that file."""
    content, size = bytearray(), None
    for event in Reader().feed(begin):
        if isinstance(event, Member):
            if size is not None:
                break
            size = event.size if event.kind == "file" else None
        elif isinstance(event, memoryview) and size is not None:
            content += event
    return bytes(content), size or 0


def _put(path: Path, begin: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(size)

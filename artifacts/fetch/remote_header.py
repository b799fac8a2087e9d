"""Fetches the header of a remote model as a local file, to estimate its needs before a pull. I/O.

Creates sparse files with a GGUF's name, size and first bytes and a hole instead of the weights, so that header readers
need no special case. It requests only a few MiB, independent of the size of the model, and each byte once. Pieces are
written as they arrive, so that the memory does not depend on the size of the header. The bytes are not verified,
because only the complete file has a digest. They are used for planning only; no engine loads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

from artifacts.archives.tar_reader import Member, Reader
from artifacts.dialects.artifact_contents import File
from artifacts.fetch.registry import Registries
from artifacts.formats import gguf
from artifacts.formats.cpu_time_limit import OVERTIME, CpuTime
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
    """Create the artifact's GGUF files below `folder`, which is created; return their paths, empty if there are none.
    The header is fetched only if exactly one file can be loaded by an engine.

    Raises RegistryError, BadManifestError, GgufError, BadArchiveError, OSError.
    """
    async with registries.opened(of.host) as source:
        found = await resolve.resolve_reference(source, of, resolve.detect_platform(), allow_unsafe=allow_unsafe)
        return await fetch_gguf_headers(found.contents.files(), of.repository, source, folder)


async def fetch_gguf_headers(
    of: Iterable[File], repository: str, source: BlobSource, folder: Path, cpu: CpuTime | None = None
) -> list[str]:
    """As `fetch_artifact_headers`, for the files of an artifact. `cpu`: limit of all its headers."""
    files = {one.path: one for one in of if one.path.endswith(".gguf") and one.encoding in {"raw", "tar"}}
    for one in files.values():
        path = folder / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(_put, path, b"", one.size)
    bases = gguf.list_base_files(files)
    if len(bases) == 1:
        await _fetch_header(repository, source, files[bases[0]], folder, cpu or CpuTime())
    return list(files)


async def fetch_config_header(
    of: Iterable[File], repository: str, source: BlobSource, folder: Path, cpu: CpuTime | None = None
) -> bool:
    """Fetch `config.json` and placeholders for its safetensors into `folder`, for `artifacts.formats.hf_config`; return
    False if the artifact has none. Raises RegistryError, BadArchiveError, OSError.
    """
    files = {one.path: one for one in of if one.encoding in {"raw", "tar"}}
    config = files.get(CONFIG)
    if config is None or config.size > CONFIG_BYTES_MAX:
        return False
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    begun = await asyncio.to_thread(_Beginning, config, folder, cpu or CpuTime())
    await begun.extend(repository, source, config.size)
    for one in files.values():
        if "/" not in one.path and one.path.endswith(".safetensors") and one.size >= len(NO_TENSORS):
            await asyncio.to_thread(_put, folder / one.path, NO_TENSORS, one.size)
    return True


async def _fetch_header(repository: str, source: BlobSource, one: File, folder: Path, cpu: CpuTime) -> None:
    """Fetch enough of the file for the header. Raises GgufError if the header is too large or invalid."""
    begun, want = await asyncio.to_thread(_Beginning, one, folder, cpu), FIRST_BYTES
    while True:
        await begun.extend(repository, source, want)
        begins = begun.size is not None
        if begins and await asyncio.to_thread(gguf.has_whole_header, begun.path, begun.known_bytes, cpu):
            return
        if want >= min(BYTES_MAX, one.size):
            raise GgufError(f"{one.path}: its header is corrupt or larger than {BYTES_MAX >> 20} MiB")
        want *= 4


class _Beginning:
    """A local file with the first bytes of a remote file, and a hole in place of the rest. If the remote file is a tar
    archive, it is the first file in the archive.
    """

    def __init__(self, of: File, folder: Path, cpu: CpuTime) -> None:
        self.path, self.known_bytes = folder / of.path, 0
        self._of, self._cpu, self._fetched_bytes = of, cpu, 0
        self._archive = Reader() if of.encoding == "tar" else None
        self.size = None if self._archive else of.size
        """Size of the file; None until its header in the archive has been read."""
        _put(self.path, b"", self.size or 0)

    async def extend(self, repository: str, source: BlobSource, end: int) -> None:
        """Fetch the missing bytes before `end`. Raises RegistryError, BadArchiveError, GgufError."""
        first, self._fetched_bytes = self._fetched_bytes, min(end, self._of.size)
        blob = Blob(repository, self._of.digest, self._of.size)
        async with aclosing(source.read(blob, first, self._fetched_bytes)) as pieces:
            async for piece in pieces:
                await asyncio.to_thread(self._write, piece)

    def _write(self, piece: bytes) -> None:
        with self._cpu.spend(), self.path.open("r+b") as file:
            file.seek(self.known_bytes)
            if self._archive is None:
                self.known_bytes += file.write(piece)
                return
            for event in self._archive.feed(piece):
                if isinstance(event, memoryview) and self.size is not None and self.known_bytes < self.size:
                    self.known_bytes += file.write(event)
                elif isinstance(event, Member) and event.kind == "file" and self.size is None:
                    self.size = file.truncate(event.size)
            if self._cpu.is_spent():
                raise GgufError(f"{self._of.path}: {OVERTIME}")


def _put(path: Path, begin: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(size)

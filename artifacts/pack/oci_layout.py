"""OCI image layouts (1.0): writes an artifact to a folder in one pass, and reads layouts with full validation. I/O.

The folder holds `oci-layout`, `index.json` and `blobs/ALGORITHM/DIGITS`. Each file is read once, piece by piece, and
hashed while it is written; the folder appears complete or not at all. Calls block: run them in a thread.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from artifacts.archives.single_file_tar import build_frame
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.digest import Digest, get_algorithm, get_hex, is_digest_of, parse_digest
from artifacts.disk.durable_writes import Disk, write_all
from artifacts.formats import magic
from artifacts.oci import manifest
from artifacts.oci.descriptor import BadManifestError, Descriptor, Platform
from artifacts.oci.manifest import CONFIG_BYTES_MAX, INDEX_DEPTH_MAX, MANIFEST_BYTES_MAX, Index, Manifest
from artifacts.pack.pack import Document, Form, PackedBlob, PackedFile, PackError, Plan, build_documents, layout_index

PIECE_BYTES = 1 << 20
_MAKE = "`pilotlight weights pack SOURCE --to FOLDER` creates one"
_MARK = b'{"imageLayoutVersion":"1.0.0"}'


class Written(NamedTuple):
    """The written artifact."""

    top: Document
    """The document that names the artifact: the index, or the manifest for raw layers."""
    blobs: tuple[PackedBlob, ...]
    """One per file, in the plan's order."""


class LayoutEntry(NamedTuple):
    """A manifest in a layout, with its config."""

    digest: Digest
    manifest: Manifest
    config: bytes
    top: Digest
    """Digest that names the artifact; equals `digest` if no index precedes it."""


def write_layout(
    to: Path, plan: Plan, form: Form, tag: str = "", moved: Callable[[int], None] = lambda _: None
) -> Written:
    """Write the layout of a plan. `moved`: called with the bytes written of files. Raises PackError, OSError."""
    try:
        magic.check_magic((piece.path, Path(piece.at)) for piece in plan.pieces if piece.at)
    except RefusedError as error:
        raise PackError(str(error)) from None
    with _whole(to) as folder:
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        written = tuple(_layer(blobs, piece, form, moved) for piece in plan.pieces)
        made = build_documents(plan, written, form)
        for one in made:
            if len(one.content) > MANIFEST_BYTES_MAX:
                raise PackError(f"there are too many files: {one.media_type} is larger than 4 MiB")
            _file(blobs / get_hex(one.blob.digest), one.content)
        _file(folder / "oci-layout", _MARK)
        _file(folder / "index.json", layout_index(made[-1], tag))
        for each in (blobs, blobs.parent, folder):
            Disk().settle(each)
    return Written(made[-1], written)


class ArtifactParts(NamedTuple):
    """All content of an artifact, in an order that is valid for pushing."""

    blobs: tuple[Descriptor, ...]
    """Configs and layers, each once."""
    documents: tuple[tuple[Descriptor, bytes], ...]
    """Manifests and indexes: referenced ones before those that refer to them, the artifact's own last."""


@contextmanager
def _whole(to: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `to`, which is renamed to `to` on success."""
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise PackError(f"{to} already exists: choose a new or empty folder")
    partial = to.absolute().parent / f".{to.name}.pilotlight-partial"
    if partial.exists():
        raise PackError(
            f"{partial} exists: another process is packing into it, or was interrupted; if no process uses the folder, "
            f"remove it"
        )
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(to)
        Disk().settle(to.absolute().parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _layer(blobs: Path, piece: PackedFile, form: Form, moved: Callable[[int], None]) -> PackedBlob:
    head, tail = build_frame(piece.path, piece.size) if form == "modelpack" else (b"", b"")
    summed, partial, left = hashlib.sha256(head), blobs / ".partial", piece.size
    with partial.open("wb", buffering=0) as out:
        write_all(out.fileno(), memoryview(head))
        for view in _pieces(piece):
            left -= len(view)
            if left < 0:
                break
            summed.update(view)
            write_all(out.fileno(), view)
            moved(len(view))
        if left:
            raise PackError(f"{piece.path}: changed while it was packed; pack again")
        summed.update(tail)
        write_all(out.fileno(), memoryview(tail))
        os.fsync(out.fileno())
    partial.replace(blobs / summed.hexdigest())
    return PackedBlob(parse_digest(f"sha256:{summed.hexdigest()}"), len(head) + piece.size + len(tail))


def _pieces(piece: PackedFile) -> Iterator[memoryview]:
    """Yield the content; each view is valid until the next."""
    if not piece.at:
        yield memoryview(piece.content)
        return
    room = memoryview(bytearray(PIECE_BYTES))
    with Path(piece.at).open("rb", buffering=0) as file:
        while count := file.readinto(room):
            yield room[:count]


def _file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class OciLayout:
    """An existing layout."""

    def __init__(self, folder: Path) -> None:
        """Open a layout. Raises BadManifestError."""
        self._folder = folder
        if not (folder / "oci-layout").is_file():
            if not folder.is_dir():
                raise BadManifestError(f"{folder}: no such folder; {_MAKE}")
            raise BadManifestError(f"{folder} is not an OCI image layout: it has no file oci-layout; {_MAKE}")
        found = manifest.parse_manifest(self._read(folder / "index.json", MANIFEST_BYTES_MAX))
        if not isinstance(found, Index):
            raise BadManifestError(f"{folder / 'index.json'} is not an index")
        self.index = found

    def top(self) -> Descriptor:
        """Return the descriptor that names the only artifact. Raises BadManifestError."""
        if len(self.index.entries) != 1:
            raise BadManifestError(f"{self._folder} contains {len(self.index.entries)} artifacts, expected one")
        return self.index.entries[0]

    def entry(self, platform: Platform) -> LayoutEntry:
        """Return the model manifest for the platform, following nested indexes. Raises BadManifestError."""
        index, way = self.index, list[Digest]()
        top: Digest | None = None
        while True:
            found = manifest.select_manifest(index, platform, way)
            top = top or found.digest
            read = manifest.parse_manifest(self.document(found), content_type=found.media_type, digest=found.digest)
            if isinstance(read, Manifest):
                return LayoutEntry(found.digest, read, self.document(read.config), top)
            way.append(found.digest)
            index = read

    def whole(self) -> ArtifactParts:
        """Return all content of the only artifact. Raises BadManifestError."""
        blobs: dict[Digest, Descriptor] = {}
        documents: dict[Digest, tuple[Descriptor, bytes]] = {}
        self._gather(self.top(), blobs, documents, INDEX_DEPTH_MAX)
        for one in blobs.values():
            path = self.path(one.digest)
            if not path.is_file() or path.stat().st_size != one.size:
                raise BadManifestError(f"{one.digest} is missing in {self._folder}, or has another size")
        return ArtifactParts(tuple(blobs.values()), tuple(documents.values()))

    def _gather(
        self,
        of: Descriptor,
        blobs: dict[Digest, Descriptor],
        documents: dict[Digest, tuple[Descriptor, bytes]],
        depth: int,
    ) -> None:
        content = self.document(of)
        read = manifest.parse_manifest(content, content_type=of.media_type, digest=of.digest)
        if isinstance(read, Manifest):
            blobs.update((one.digest, one) for one in (read.config, *read.layers))
        elif depth:
            for one in read.entries:
                self._gather(one, blobs, documents, depth - 1)
        else:
            raise BadManifestError(f"indexes are nested deeper than {INDEX_DEPTH_MAX}")
        documents[of.digest] = (of, content)

    def document(self, of: Descriptor) -> bytes:
        """Read and verify a manifest, an index or a config. Raises BadManifestError."""
        content = self._read(self.path(of.digest), CONFIG_BYTES_MAX)
        if len(content) != of.size or not is_digest_of(of.digest, content):
            raise BadManifestError(f"{of.digest} in {self._folder} is corrupt: pack or copy it again")
        return content

    def path(self, digest: Digest) -> Path:
        """Return the path of a blob."""
        return self._folder / "blobs" / get_algorithm(digest) / get_hex(digest)

    def _read(self, path: Path, most: int) -> bytes:
        try:
            with path.open("rb") as file:
                content = file.read(most + 1)
        except OSError as error:
            raise BadManifestError(f"{path}: {error.strerror}") from None
        if len(content) > most:
            raise BadManifestError(f"{path} is larger than {most >> 20} MiB")
        return content

"""Fetches an artifact from a registry for the store: raw files unchanged, archives extracted. I/O.

Blobs are downloaded concurrently, resumed after an interruption (`blob_download`). Only complete, verified archives
are extracted, one after another, and each is removed afterwards. Space is reserved before it is used, and a rejected
archive leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from artifacts import safe_paths
from artifacts.archives import archive_recipe, member_filter
from artifacts.archives.archive_recipe import ArchivedFile, Recipe
from artifacts.archives.tar_reader import BadArchiveError
from artifacts.dialects.artifact_contents import Contents, File, RefusedError
from artifacts.digest import Digest
from artifacts.disk.thread_wait import run_in_thread
from artifacts.download import blob_download
from artifacts.download.blob_download import BlobTarget
from artifacts.fetch.unpack import Unpacked, Unpacking, iter_members
from artifacts.formats import magic
from artifacts.registry.blobs import Blob
from artifacts.registry.mirrored_registry import Mirrored
from artifacts.store.file_names import digest_file_name
from artifacts.store.pull import Job

ARCHIVES = "archives"
"""Subfolder of the job's blobs for complete archives until they are extracted."""
PIECE_BYTES = 1 << 20
NAMES_MAX = 1_000_000
"""Maximum number of names in all archives of an artifact."""


class _Look(NamedTuple):
    """The space that archives will occupy, determined before anything is written."""

    root: str
    bytes: tuple[int, ...]
    """Upper limit of the extracted bytes of each archive."""


async def fetch_artifact_files(
    job: Job, of: Contents, repository: str, source: Mirrored, progress: blob_download.Progress | None = None,
    *, sums: blob_download.Sums | None = None,
) -> None:  # fmt: skip
    """Implements the store's `Fetch`. `sums`: as in `blob_download.fetch_blobs`.

    Raises RegistryError, DiskError, NoRoomError, RefusedError, OSError.
    """
    archives = [one for one in job.files if one.encoding != "raw"]
    if archives:
        await job.more(max(one.size for one in archives))  # an archive coexists with its extracted files
    places = {one.digest: (one, job.blob(one.digest)) for one in job.files if one.encoding == "raw"}
    places |= {one.digest: (one, _place(job, one.digest)) for one in archives if one.digest not in places}
    wanted = [
        BlobTarget(Blob(repository, digest, one.size), path.relative_to(job.blobs))
        for digest, (one, path) in places.items()
        if not path.exists()
    ]
    if wanted:
        await blob_download.fetch_blobs(wanted, source, job.blobs, progress, file_system=job.disk, sums=sums)
    raw = [(one.path, job.blob(one.digest)) for one in job.files if one.encoding == "raw"]
    await asyncio.to_thread(magic.check_magic, raw)
    if archives:
        await _take_apart(job, of, archives)


async def _take_apart(job: Job, of: Contents, archives: Sequence[File]) -> None:
    stop = threading.Event()
    at = {one.digest: job.blob(one.digest) for one in job.files if one.encoding == "raw"}

    def pieces(one: File) -> Iterator[bytes]:
        with (at.get(one.digest) or _place(job, one.digest)).open("rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                if stop.is_set():
                    raise BadArchiveError("the pull was cancelled")
                yield piece

    try:
        look = await run_in_thread(lambda: _looked(of, archives, pieces), interrupt=stop.set)
        peak = _peak([one.size for one in archives], look.bytes)
        promised = sum(one.size for one in archives) + max(one.size for one in archives)
        if peak > promised:
            await job.more(peak - promised)
        await run_in_thread(lambda: _laid(job, of, archives, look, pieces), interrupt=stop.set)
    except BadArchiveError as error:
        for one in archives:
            _place(job, one.digest).unlink(missing_ok=True)
        raise RefusedError(f"{of.dialect}: {error}") from None


def _place(job: Job, digest: Digest) -> Path:
    return job.blobs / ARCHIVES / digest_file_name(digest)


def _peak(archives: Sequence[int], unpacked: Sequence[int]) -> int:
    """Return the peak disk use in bytes if each archive is removed after its extraction."""
    gone = accumulate(archives, initial=0)
    return max(sum(archives) - before + there for before, there in zip(gone, accumulate(unpacked), strict=False))


def _looked(of: Contents, archives: Sequence[File], pieces: Callable[[File], Iterator[bytes]]) -> _Look:
    """Determine the model folder and the extracted sizes. An archive is read unless its own size is an upper limit.
    Raises BadArchiveError.
    """
    names, sizes = list[str](), list[int]()
    for one in archives:
        if one.encoding == "tar" and of.roots == ("",):
            sizes.append(one.size)
            continue
        size = 0
        for member in iter_members(pieces(one), one):
            names.append(member.path)
            size += member.size
            if len(names) > NAMES_MAX:
                raise BadArchiveError(f"its archives have more than {NAMES_MAX} names")
        sizes.append(size)
    return _Look(member_filter.select_model_root(of.roots, names), tuple(sizes))


def _laid(
    job: Job, of: Contents, archives: Sequence[File], look: _Look, pieces: Callable[[File], Iterator[bytes]]
) -> None:
    tree = safe_paths.Tree()
    at = {one.digest: job.blob(one.digest) for one in job.files if one.encoding == "raw"}
    for layer in of.layers:
        if layer.file.encoding == "raw":
            tree.add(layer.file.path)
    folder = os.open(job.tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    last = {one.digest: number for number, one in enumerate(archives)}
    try:
        with Unpacking(folder, tree, sum(look.bytes), root=look.root, allow_unsafe=of.allow_unsafe) as unpacking:
            for number, one in enumerate(archives):
                laid = unpacking.archive(one, pieces(one), may_be_empty=of.roots != ("",))
                job.unpacked.extend(File(each.path, each.size, each.digest, each.role, "raw") for each in laid)
                if one.encoding == "tar" and (recipe := _recipe(at.get(one.digest) or _place(job, one.digest), laid)):
                    job.recipes[one.digest] = recipe
                if last[one.digest] == number and one.digest not in at:
                    _place(job, one.digest).unlink()
            magic.check_magic((each.path, job.tree / each.path) for each in job.unpacked)
    finally:
        os.close(folder)


def _recipe(archive: Path, laid: Sequence[Unpacked]) -> bytes | None:
    """Build the recipe of an archive; None if too many bytes are outside of its files."""
    size = archive.stat().st_size
    files = tuple(ArchivedFile(one.at, one.size, one.path) for one in laid if one.size)
    between = archive_recipe.list_gaps(size, files)
    if sum(one.end - one.first for one in between) > archive_recipe.REST_BYTES_MAX:
        return None
    with archive.open("rb", buffering=0) as file:
        rest = b"".join(os.pread(file.fileno(), one.end - one.first, one.first) for one in between)
    return archive_recipe.encode_recipe(Recipe(size, files, rest))

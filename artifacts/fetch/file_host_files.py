"""Fetches a model for the store from a source that is not a registry: the files of a Listing. I/O.

Files without a known sha256 are downloaded like all others, in parts and resumable; their digest is computed once they
are complete, and git's hash is checked if there is one. The Copy's record has a sha256 for every file.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

from artifacts.dialects.artifact_contents import File
from artifacts.digest import Digest
from artifacts.disk.thread_wait import run_in_thread
from artifacts.download.blob_download import BlobTarget, Progress, fetch_blobs
from artifacts.formats import magic
from artifacts.registry.blobs import Blob, BlobSource
from artifacts.registry_errors import MismatchError
from artifacts.sources.file_selection import ListedFile, Listing, SelectedFile
from artifacts.store.file_names import digest_file_name
from artifacts.store.pull import Job

LEARNED = "learned"
"""Subfolder of the job's blobs for files of unknown digest, until all are complete."""
PIECE_BYTES = 1 << 20


def list_hashed_files(of: Listing) -> tuple[File, ...]:
    """Return the files with a known digest; the others are placed by `fetch_listed_files`."""
    return tuple(
        File(one.entry.path, one.entry.size, one.entry.digest, one.role, "raw")
        for one in of.taken
        if one.entry.digest is not None
    )


def list_all_files(of: Listing) -> list[File]:
    """Return all files, with stand-in digests where needed, for inspection."""
    return [File(one.entry.path, one.entry.size, one.entry.name, one.role, "raw") for one in of.taken]


def list_unhashed_files(of: Listing) -> list[SelectedFile]:
    """Return the selected files without a known digest."""
    return [one for one in of.taken if one.entry.digest is None]


async def fetch_listed_files(job: Job, of: Listing, source: BlobSource, progress: Progress | None = None) -> None:
    """Implements the store's `Fetch`. Raises RegistryError, DiskError, RefusedError, OSError."""
    sums = dict[Digest, Digest]()
    blobs = {one.digest: (one.path, one.size, job.blob(one.digest)) for one in job.files}
    wanted = [
        BlobTarget(_blob(of, path, digest, size), at.relative_to(job.blobs))
        for digest, (path, size, at) in blobs.items()
        if not at.exists()
    ]
    for one in list_unhashed_files(of):
        entry = one.entry
        if not _place(job, entry).exists():
            to, blob = _place(job, entry).relative_to(job.blobs), _blob(of, entry.path, entry.name, entry.size)
            wanted.append(BlobTarget(blob, to, partial(sums.__setitem__, entry.name)))
    if wanted:
        await fetch_blobs(wanted, source, job.blobs, progress, file_system=job.disk)
    await run_in_thread(lambda: magic.check_magic((path, at) for path, _, at in blobs.values()))
    await run_in_thread(lambda: _lay(job, of, sums))  # another pull may own the folder once this returns


def _blob(of: Listing, path: str, digest: Digest, size: int) -> Blob:
    """Build a blob whose errors name the file."""
    return Blob(f"{of.place}: {path}", digest, size)


def _place(job: Job, entry: ListedFile) -> Path:
    return job.blobs / LEARNED / digest_file_name(entry.name)


def _lay(job: Job, of: Listing, sums: dict[Digest, Digest]) -> None:
    """Move files whose digest was computed to their final place. Raises MismatchError."""
    for one in list_unhashed_files(of):
        at, entry = _place(job, one.entry), one.entry
        said = entry.claim.removeprefix("git:") if entry.claim.startswith("git:") else None
        if said is not None and _summed(at, hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)) != said:
            raise MismatchError(f"{of.place}: {entry.path}: its bytes do not match git's checksum")
        digest = sums.get(entry.name) or Digest(f"sha256:{_summed(at, hashlib.sha256())}")
        magic.check_magic([(entry.path, at)])
        to = job.tree / entry.path
        to.parent.mkdir(parents=True, exist_ok=True)
        at.replace(to)
        job.unpacked.append(File(entry.path, entry.size, digest, one.role, "raw"))


def _summed(path: Path, summed: hashlib._Hash) -> str:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            summed.update(piece)
    return summed.hexdigest()

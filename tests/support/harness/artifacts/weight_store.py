"""A node's store with a fetch that generates the bytes: helpers for the tests of `artifacts.store.store`.

It replaces a registry at no cost: the content of a file is derived from a seed and a size.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from artifacts import digest
from artifacts.dialects.artifact_contents import File
from artifacts.digest import Digest
from artifacts.store.file_names import CopyKey
from artifacts.store.pull import CopySpec, Job
from artifacts.store.store import Store

ORIGIN = "registry.example"
KIB = 1 << 10
SLACK = 1 << 20
"""What a pull reserves in addition to its files."""


def content(seed: str, size: int) -> bytes:
    """Bytes that are unique to the seed."""
    return hashlib.shake_128(seed.encode()).digest(size)


def raw(seed: str, size: int = KIB, path: str = "") -> File:
    """A raw file."""
    return File(path or f"{seed}.gguf", size, digest.compute_digest(content(seed, size)), "weight", "raw")


def wanted(name: str, *files: File, origin: str = ORIGIN) -> CopySpec:
    """An artifact with that name."""
    return CopySpec(
        f"oci://{origin}/{name}", CopyKey(origin, digest.compute_digest(name.encode())), files or (raw(name),)
    )


class Fetched:
    """A fake fetch that records its jobs."""

    def __init__(self, *seeds: tuple[str, int]) -> None:
        self.known: dict[Digest, tuple[str, int]] = {}
        self.jobs: list[tuple[str, ...]] = []
        self.fails: Exception | None = None
        """Raised after the first file."""
        for seed, size in seeds:
            self.add_copy(seed, size)

    def add_copy(self, seed: str, size: int = KIB) -> None:
        """Adds a file that can be fetched."""
        self.known[digest.compute_digest(content(seed, size))] = (seed, size)

    async def __call__(self, job: Job) -> None:
        """Writes whole files and syncs them, as a fetch must."""
        self.jobs.append(tuple(one.path for one in job.files))
        for one in job.files:
            put(job, one, content(*self.known[one.digest]))
            if self.fails is not None:
                raise self.fails


def put(job: Job, file: File, body: bytes) -> None:
    """Writes one file, which gets its name only when it is complete."""
    aside = job.blobs / "aside"
    aside.write_bytes(body)
    fd = os.open(aside, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    aside.rename(job.blob(file.digest))


def fetching(*of: CopySpec) -> Fetched:
    """A fetch that has all their files; the seed of each is the stem of its path."""
    found = Fetched()
    for one in of:
        for file in one.files:
            found.add_copy(Path(file.path).stem, file.size)
    return found


def room_for(count: int, size: int) -> int:
    """`bytes_max` of a store with space for that many Copies and the extra space of one pull."""
    return count * size + SLACK


def left(free_bytes: int, free_files: int = 1 << 30) -> os.statvfs_result:
    """A disk with that much free space."""
    return os.statvfs_result((1, 1, 1 << 50, free_bytes, free_bytes, 1 << 31, free_files, free_files, 0, 255))


def whole(store: Store) -> Mapping[str, dict[str, bytes]]:
    """Every published Copy: its reference -> the content of its files."""
    found = {}
    for record in store.layout.records():
        folder = store.layout.copy(record.key) / "files"
        found[record.reference] = {one.path: (folder / one.path).read_bytes() for one in record.files}
    return found

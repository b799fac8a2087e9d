"""Files without a published digest, fetched into a pull's folder."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path

import pytest

from artifacts.fetch import file_host_files
from artifacts.sources.file_host_client import Lone
from artifacts.sources.file_selection import ListedFile, Listing, SelectedFile
from artifacts.store.file_names import digest_file_name
from artifacts.store.pull import Job


async def test_cancelled_fetch_waits_for_its_thread_to_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ListedFile("a.gguf", 4, 'etag:"1"')
    begun, go = threading.Event(), threading.Event()

    def summed(path: Path, of: object) -> str:
        del of
        begun.set()
        assert go.wait(60)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(file_host_files, "_summed", summed)

    async def more(_bytes: int) -> None:
        raise AssertionError

    job = Job((), tmp_path / "blobs", tmp_path / "tree", more)
    at = job.blobs / file_host_files.LEARNED / digest_file_name(entry.name)
    at.parent.mkdir(parents=True)
    at.write_bytes(b"GGUF")  # fetched by an earlier attempt
    source = Lone.__new__(Lone)  # receives no requests
    listing = Listing("s3://b/", (SelectedFile(entry, "weight"),), ())
    filling = asyncio.create_task(file_host_files.fetch_listed_files(job, listing, source))
    assert await asyncio.to_thread(begun.wait, 60)
    filling.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not filling.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert (job.tree / "a.gguf").exists()

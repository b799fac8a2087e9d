"""The first request for a Model loads its weights from disk into the page cache, whatever its engine reads."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from loadtest import tiny_gguf
from loadtest.result import Ending
from tests.support.harness.serve.serve import fake, serving
from tests.support.waiting import until

SIZE = 8 << 20


def resident(path: Path) -> int:
    """Return how many bytes of the file are in the page cache (mincore(2)); the check itself loads none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_COPY) as view:
        pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
        first = (ctypes.c_char * SIZE).from_buffer(view)
        found = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(first), ctypes.c_size_t(SIZE), pages)
        del first
        assert found == 0, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def forgotten(path: Path) -> bool:
    """Drop the file from the page cache; return whether that worked (it cannot on a file system in memory)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident(path) == 0


async def test_first_request_of_a_model_loads_its_weights_into_the_page_cache(tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    tiny_gguf.make_model(weights, "nobody reads this")
    with weights.open("ab") as file:
        file.write(bytes(SIZE - file.tell()))
    if not forgotten(weights):
        pytest.skip(f"{tmp_path} lies in memory: nothing of it is ever read")
    async with serving(tmp_path, fake(tmp_path, "ada", artifact=f"file://{weights}")) as one:
        await until("they are no more in memory, though their header was read", lambda: forgotten(weights))
        assert (await one.call("ada")).ending is Ending.COMPLETED
        await until("its weights are in memory", lambda: resident(weights) == SIZE)

"""Loading weights into the page cache: all of them in order, within limits, and no further calls once cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from artifacts.disk.page_cache_warmup import STEP_BYTES, warm_page_cache


def sparse(path: Path, size: int) -> Path:
    path.touch()
    os.truncate(path, size)
    return path


async def test_page_cache_warming_covers_all_bytes_and_skips_missing_files(tmp_path: Path) -> None:
    files = [sparse(tmp_path / "a", STEP_BYTES + 5), tmp_path / "gone", sparse(tmp_path / "b", 7)]
    asked: list[tuple[int, int]] = []
    found = await warm_page_cache(files, advise=lambda _fd, first, size: asked.append((first, size)))
    assert found == STEP_BYTES + 12
    assert asked == [(0, STEP_BYTES), (STEP_BYTES, 5), (0, 7)]


async def test_page_cache_warming_stops_at_the_byte_limit(tmp_path: Path) -> None:
    files = [sparse(tmp_path / "a", STEP_BYTES), sparse(tmp_path / "b", STEP_BYTES)]
    assert await warm_page_cache(files, bytes_max=STEP_BYTES + 3) == STEP_BYTES + 3


async def test_file_that_rejects_fadvise_is_skipped_by_page_cache_warming(tmp_path: Path) -> None:
    def refuses(_fd: int, _first: int, _size: int) -> None:
        raise OSError(22, "Invalid argument")

    assert await warm_page_cache([sparse(tmp_path / "a", 5)], advise=refuses) == 0


async def test_cancelled_page_cache_warming_makes_no_further_fadvise_calls(tmp_path: Path) -> None:
    begun, asked = threading.Event(), list[int]()

    def advise(_fd: int, first: int, _size: int) -> None:
        asked.append(first)
        begun.set()

    task = asyncio.ensure_future(
        warm_page_cache([sparse(tmp_path / "a", STEP_BYTES * 9)], bytes_per_s=1.0, advise=advise)
    )
    assert await asyncio.to_thread(begun.wait, 90)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(90):
            await task
    assert asked == [0]

"""Fetching blobs into a folder that fails, fills up, is interrupted, or has files of an earlier process: point 13."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from artifacts.disk.disk import Disk, DiskError
from artifacts.registry.blobs import Blob, Sink
from artifacts.registry.mirrored_registry import Mirrored
from artifacts.registry_errors import UnreachableError
from tests.support.harness.artifacts.registry_pull import CONTENT, WAYS, answer_part, breaking, go, leave, place, small

pytestmark = pytest.mark.standard

WRONG = bytes(reversed(CONTENT))


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


@pytest.fixture(params=WAYS)
def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Each way of moving a body from the socket into the file."""
    go(request.param, monkeypatch, tmp_path_factory.mktemp("authority"))
    return str(request.param)


def failing(kind: str, error: int, after: int = 0) -> Disk:
    """Return a disk on which every step of this kind fails after the first `after` ones."""
    left = after

    def step(what: str, path: Path) -> None:
        nonlocal left
        if what == kind:
            left -= 1
            if left < 0:
                raise OSError(error, os.strerror(error), path)

    return Disk(step)


@pytest.mark.point("13")
@pytest.mark.parametrize(
    ("disk", "said"),
    [
        (lambda: failing("put", errno.ENOSPC, 9), "the disk is full; free space"),
        (lambda: failing("put", errno.EDQUOT, 9), "the quota is used up"),
        (lambda: failing("sync", errno.EIO, 1), "the disk failed"),
        (lambda: failing("rename", errno.EROFS), "the file system is read-only; mount it writable"),
    ],
    ids=["full", "quota", "broken", "read-only"],
)
async def test_fetch_after_a_disk_error_completes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Callable[[], Disk], said: str
) -> None:
    go("through us", monkeypatch, tmp_path)
    async with place(tmp_path) as one:
        with pytest.raises(DiskError, match=said) as raised:
            await one.fetch(disk=disk())
        assert len(str(raised.value).splitlines()) == 1
        assert one.file() is None
        before = len(one.ranges())
        await one.fetch()
        assert one.file() == CONTENT
        if "full" in said or "quota" in said:
            assert len(one.ranges()) - before < 16


@pytest.mark.point("13")
async def test_concurrent_write_and_request_failures_log_no_loop_error(
    tmp_path: Path,
) -> None:
    """The request's failure is raised; the event loop logs nothing about the other one."""
    loop, refused, told = asyncio.get_running_loop(), asyncio.Event(), list[object]()
    loop.set_exception_handler(lambda _, context: told.append(context["message"]))

    def step(what: str, path: Path) -> None:
        if what == "put":
            loop.call_soon_threadsafe(refused.set)
            raise OSError(errno.ENOSPC, "full", path)

    class Ending(Mirrored):
        async def read(
            self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
        ) -> AsyncGenerator[bytes, None]:
            yield CONTENT[first:end]
            await refused.wait()
            raise UnreachableError("gone")

    async with place(tmp_path) as one:
        one.source = Ending(one.client)
        with pytest.raises((UnreachableError, DiskError)):
            await one.fetch(disk=Disk(step))
    gc.collect()
    await asyncio.sleep(0)
    assert told == []


@pytest.mark.point("13")
async def test_insufficient_disk_space_fails_before_any_request(tmp_path: Path) -> None:
    class Full(Disk):
        def free_bytes(self, folder: Path) -> int:
            return len(CONTENT) - 1

    async with place(tmp_path) as one:
        with pytest.raises(DiskError, match=r"65536 bytes are required in .* which has 65535"):
            await one.fetch(disk=Full())
        assert one.ranges() == []


@pytest.mark.point("13")
async def test_second_process_cannot_fetch_the_same_blob(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        wanted = one.wanted()
        (tmp_path / "partial").mkdir()
        with (tmp_path / "partial" / wanted.blob.digest).open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(DiskError, match=r"is being fetched into .* by another process"):
                await one.fetch(wanted)
        await one.fetch(wanted)
        assert one.file() == CONTENT


@pytest.mark.point("13")
async def test_existing_parts_are_not_fetched_again(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        wanted = one.wanted()
        leave(tmp_path, wanted.blob, CONTENT, range(14))
        await one.fetch(wanted)
        assert one.file() == CONTENT
        assert sorted(str(span) for span in one.ranges()) == ["bytes=57344-61439", "bytes=61440-65535"]


@pytest.mark.point("13")
async def test_corrupt_partial_file_is_dropped_and_fetched_again(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        wanted = one.wanted()
        leave(tmp_path, wanted.blob, WRONG, range(16))
        await one.fetch(wanted)
        assert one.file() == CONTENT
        assert len(one.ranges()) == 16
        assert one.left() == []


@pytest.mark.point("13")
async def test_completed_parts_are_recorded_before_the_fetch_ends(tmp_path: Path, way: str) -> None:
    """The progress file lists them before the fetch ends, so that they survive if the process is killed."""
    async with place(tmp_path) as one:
        wanted = one.wanted()
        one.fake.answers[one.url()].extend([lambda request: answer_part(request, CONTENT)] * 5)
        one.fake.always[one.url()] = breaking(one, "hang")
        running = asyncio.create_task(one.fetch(wanted))
        path = tmp_path / "partial" / f"{wanted.blob.digest}.parts"
        async with asyncio.timeout(90):
            while not path.exists() or path.read_bytes().count(b"\n") < 5:
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

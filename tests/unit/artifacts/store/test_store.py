"""A node's store: Copies fetched once, complete or not at all, within a size limit, and never evicted while in use."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from artifacts import digest
from artifacts.dialects.artifact_contents import File
from artifacts.disk.durable_writes import Disk
from artifacts.registry_errors import MismatchError, UnreachableError
from artifacts.store.copy_record import Record
from artifacts.store.layout import HeldError, NoRoomError, StoreError
from artifacts.store.pull import Job
from artifacts.store.reservations import reserved_bytes
from artifacts.store.store import LOCKS_MAX, Store, list_blobs_to_lock
from tests.support.harness.artifacts.weight_store import (
    KIB,
    SLACK,
    content,
    fetching,
    left,
    put,
    raw,
    room_for,
    wanted,
    whole,
)

MIB = 1 << 20


def opened(root: Path, *, bytes_max: int | None = None) -> Store:
    return Store(root / "store", spare_bytes=0, bytes_max=bytes_max).open()


def aged(store: Store, copy: Record, age_s: float) -> None:
    used_s = time.time() - age_s
    os.utime(store.layout.lease(copy.key), (used_s, used_s))


async def test_stored_copy_is_returned_without_a_second_fetch(tmp_path: Path) -> None:
    store, one = opened(tmp_path), wanted("a", raw("x"), raw("y", path="sub/y.gguf"))
    fetch = fetching(one)
    with await store.ensure(one, fetch, None) as copy:
        assert (copy.folder / "sub/y.gguf").read_bytes() == content("y", KIB)
        assert (copy.folder / "x.gguf").stat().st_mode & 0o222 == 0
    with await opened(tmp_path).ensure(one, fetch, None) as again:
        assert again.record.reference == "oci://registry.example/a"
    assert fetch.jobs == [("x.gguf", "sub/y.gguf")]
    assert not list(store.layout.partials.iterdir())
    assert not list(store.layout.locks.iterdir())


def test_temporary_folders_are_removed_on_exit_and_after_a_crash(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with store.aside() as folder:
        (folder / "x").write_bytes(b"x")
        opened(tmp_path)
        assert (folder / "x").exists(), "another process opens it, and this one still runs"
        (store.layout.asides / "left").mkdir()
        (store.layout.asides / "left" / "y").write_bytes(b"y")  # as left after a SIGKILL
        opened(tmp_path)
        assert list(store.layout.asides.iterdir()) == [folder]
    assert not list(store.layout.asides.iterdir())
    assert not list(store.layout.trash.iterdir())
    assert not list(store.layout.locks.iterdir())


async def test_concurrent_requests_for_one_copy_cause_a_single_fetch(tmp_path: Path) -> None:
    store, one = opened(tmp_path), wanted("a")
    fetch, begun = fetching(one), asyncio.Event()

    async def slow(job: Job) -> None:
        begun.set()
        await asyncio.sleep(0.05)
        await fetch(job)

    copies = await asyncio.gather(*(store.ensure(one, slow, None) for _ in range(10)))
    assert len(fetch.jobs) == 1
    for copy in copies:
        copy.close()


async def test_file_shared_by_two_artifacts_is_stored_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    one, two = wanted("a", raw("shared"), raw("a")), wanted("b", raw("b"), raw("shared", path="other/shared.gguf"))
    fetch = fetching(one, two)
    (await store.ensure(one, fetch, None)).close()
    (await store.ensure(two, fetch, None)).close()
    assert fetch.jobs == [("shared.gguf", "a.gguf"), ("b.gguf",)]
    assert store.stored_bytes() == 3 * KIB
    store.evict(one.key)
    assert whole(store) == {two.reference: {"b.gguf": content("b", KIB), "other/shared.gguf": content("shared", KIB)}}
    assert store.stored_bytes() == 2 * KIB


async def test_files_from_different_registries_are_never_shared(tmp_path: Path) -> None:
    store = opened(tmp_path)
    one, two = wanted("a", raw("shared")), wanted("b", raw("shared"), origin="other.example")
    fetch = fetching(one, two)
    (await store.ensure(one, fetch, None)).close()
    (await store.ensure(two, fetch, None)).close()
    assert fetch.jobs == [("shared.gguf",), ("shared.gguf",)]


@pytest.mark.point("13")
@pytest.mark.parametrize(
    ("error", "fetched_again"),
    [
        (UnreachableError("registry.example: does not answer"), ("y.gguf",)),
        (MismatchError("registry.example: its bytes do not match its digest"), ("x.gguf", "y.gguf")),
    ],
    ids=["unreachable", "mismatch"],
)
async def test_next_pull_resumes_a_failed_pull_except_after_a_digest_mismatch(
    tmp_path: Path, error: Exception, fetched_again: tuple[str, ...]
) -> None:
    store, one = opened(tmp_path), wanted("a", raw("x"), raw("y"))
    fetch = fetching(one)
    fetch.fails = error
    with pytest.raises(type(error)):
        await store.ensure(one, fetch, None)
    assert bool(list(store.layout.partials.iterdir())) is (fetched_again == ("y.gguf",))
    fetch.fails = None
    (await store.ensure(one, fetch, None)).close()
    assert fetch.jobs == [("x.gguf", "y.gguf"), fetched_again]


@pytest.mark.point("13")
@pytest.mark.parametrize("size", [0, KIB - 1, KIB + 1])
async def test_file_of_wrong_size_is_never_published(tmp_path: Path, size: int) -> None:
    store, one = opened(tmp_path), wanted("a")

    async def lies(job: Job) -> None:
        put(job, job.files[0], bytes(size))

    with pytest.raises(StoreError, match=f"ended without {one.files[0].digest} of 1024 bytes"):
        await store.ensure(one, lies, None)
    assert whole(store) == {}
    assert not list(store.layout.partials.iterdir())


@pytest.mark.case("48")
async def test_archive_with_non_regular_files_is_rejected(tmp_path: Path) -> None:
    archive = File("", 10, digest.compute_digest(b"archive"), "weight", "tar")
    store, one = opened(tmp_path), wanted("a", archive)

    async def unpacks(job: Job) -> None:
        (job.tree / "sub").mkdir()
        (job.tree / "sub/a.gguf").write_bytes(bytes(KIB))

    async def escapes(job: Job) -> None:
        await unpacks(job)
        (job.tree / "sub/b.gguf").symlink_to("/etc/passwd")

    async def pipes(job: Job) -> None:
        os.mkfifo(job.tree / "pipe")

    for bad in (escapes, pipes):
        with pytest.raises(StoreError, match="left an entry that is no file"):
            await store.ensure(one, bad, None)
    with await store.ensure(one, unpacks, None) as copy:
        assert (copy.folder / "sub/a.gguf").stat().st_size == KIB
        assert copy.record.unpacked_bytes == copy.record.bytes == KIB
    assert store.stored_bytes() == KIB


@pytest.mark.point("13")
async def test_least_recently_used_copy_is_evicted_for_a_new_pull(tmp_path: Path) -> None:
    calls = list[str]()
    store = Store(tmp_path / "store", spare_bytes=0, bytes_max=room_for(2, MIB), evicted=calls.append).open()
    arts = [wanted(name, raw(name, MIB)) for name in "abc"]
    fetch = fetching(*arts)
    for age_s, art in ((5000, arts[0]), (9000, arts[1])):
        with await store.ensure(art, fetch, None) as copy:
            aged(store, copy.record, age_s)
    (await store.ensure(arts[2], fetch, None)).close()
    assert set(whole(store)) == {arts[0].reference, arts[2].reference}
    assert calls == ["room"]


@pytest.mark.point("13")
async def test_in_use_and_pinned_copies_are_never_evicted(tmp_path: Path) -> None:
    store = opened(tmp_path, bytes_max=room_for(2, MIB))
    one, two, three = (wanted(name, raw(name, MIB)) for name in "abc")
    fetch = fetching(one, two, three)
    used = await store.ensure(one, fetch, None)
    (await store.ensure(two, fetch, None)).close()
    store.pin(two.key.digest)
    with pytest.raises(NoRoomError, match=f"{MIB} are missing, with {MIB} in use and {MIB} pinned"):
        await store.ensure(three, fetch, None)
    assert len(fetch.jobs) == 2  # no byte was fetched
    with pytest.raises(HeldError, match="in use"):
        store.evict(one.key)
    with pytest.raises(HeldError, match="pinned"):
        store.evict(two.key)
    store.unpin(two.key.digest)
    (await store.ensure(three, fetch, None)).close()
    assert set(whole(store)) == {one.reference, three.reference}
    used.close()
    store.evict(one.key)
    assert set(whole(store)) == {three.reference}


@pytest.mark.point("13")
async def test_pull_without_enough_disk_space_fails_before_fetching(tmp_path: Path) -> None:
    store = Store(tmp_path, spare_bytes=MIB, free=lambda _: left(2 * MIB)).open()
    fits, too_large = wanted("a", raw("a", KIB)), wanted("b", raw("b", MIB))
    fetch = fetching(fits, too_large)
    with pytest.raises(NoRoomError, match="are missing"):
        await store.ensure(too_large, fetch, None)
    assert fetch.jobs == []
    few = Store(tmp_path, spare_bytes=0, free=lambda _: left(1 << 40, 1024)).open()
    with pytest.raises(NoRoomError, match="1024 inodes left"):
        await few.ensure(fits, fetch, None)


@pytest.mark.point("13")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_pull_that_fills_the_disk_fails_and_leaves_no_files(tmp_path: Path, number: int) -> None:
    store, one = opened(tmp_path), wanted("a", raw("x"), raw("y"))
    fetch = fetching(one)
    fetch.fails = OSError(number, os.strerror(number))
    with pytest.raises(NoRoomError, match="became full"):
        await store.ensure(one, fetch, None)
    assert not list(store.layout.partials.iterdir())
    assert whole(store) == {}
    fetch.fails = None
    (await store.ensure(one, fetch, None)).close()


@pytest.mark.point("13")
async def test_archive_that_outgrows_the_store_size_limit_is_rejected(tmp_path: Path) -> None:
    archive = File("", 10, digest.compute_digest(b"archive"), "weight", "tar")
    store, one = opened(tmp_path, bytes_max=SLACK + MIB), wanted("a", archive)
    calls: list[str] = []

    async def asks(job: Job) -> None:
        (job.tree / "a").write_bytes(bytes(KIB))
        await job.more(MIB // 2)
        calls.append("first")
        await job.more(MIB)

    async def does_not(job: Job) -> None:
        (job.tree / "a").write_bytes(content("much", 2 * MIB + SLACK))

    for fetch in (asks, does_not):
        with pytest.raises(NoRoomError):
            await store.ensure(one, fetch, None)
    assert calls == ["first"]
    assert whole(store) == {}


@pytest.mark.point("13")
async def test_pull_fails_if_another_pull_has_reserved_the_space(tmp_path: Path) -> None:
    store = opened(tmp_path, bytes_max=room_for(2, MIB))
    one, two = wanted("a", raw("a", MIB)), wanted("b", raw("b", MIB))
    fetch, begun, go = fetching(one, two), asyncio.Event(), asyncio.Event()

    async def waits(job: Job) -> None:
        begun.set()
        await go.wait()
        await fetch(job)

    first = asyncio.ensure_future(store.ensure(one, waits, None))
    await begun.wait()
    with pytest.raises(NoRoomError):  # both files would fit, but not both reservations
        await store.ensure(two, fetch, None)
    go.set()
    (await first).close()
    (await store.ensure(two, fetch, None)).close()
    assert len(whole(store)) == 2


async def test_cancelled_pull_releases_its_reservation_and_locks(tmp_path: Path) -> None:
    store, one = opened(tmp_path), wanted("a", raw("a", MIB))
    begun = asyncio.Event()

    async def hangs(job: Job) -> None:
        assert reserved_bytes(job.blobs.parent / "reservation") > MIB
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(store.ensure(one, hangs, None))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reserved_bytes(store.layout.partial(one.key) / "reservation") == 0
    assert not list(store.layout.locks.iterdir())
    (await store.ensure(one, fetching(one), None)).close()


@pytest.mark.point("13")
async def test_read_only_store_serves_existing_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = wanted("a"), wanted("b")
    fetch = fetching(one, two)
    (await opened(tmp_path).ensure(one, fetch, None)).close()
    really = os.open

    def no_writing(path: os.PathLike[str], flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", no_writing)
    store = opened(tmp_path)
    with await store.ensure(one, fetch, None) as copy:
        assert (copy.folder / "a.gguf").stat().st_size == KIB
    assert [row.record.reference for row in store.rows()] == [one.reference]
    acts: tuple[Callable[[], object], ...] = (lambda: store.evict(one.key), lambda: store.free(1))
    for act in acts:
        with pytest.raises(StoreError, match="cannot be written: the file system is read-only; mount it writable"):
            act()
    with pytest.raises(StoreError, match="cannot be written: the file system is read-only; mount it writable"):
        await store.ensure(two, fetch, None)


async def test_copy_without_its_record_or_lock_file_is_rebuilt(tmp_path: Path) -> None:
    store, one = opened(tmp_path), wanted("a")
    fetch = fetching(one)
    for spoil in ("copy.json", "lease"):
        (await store.ensure(one, fetch, None)).close()
        (store.layout.copy(one.key) / spoil).unlink()
        assert store.rows() == []
    with await store.ensure(one, fetch, None) as copy:
        assert (copy.folder / "a.gguf").read_bytes() == content("a", KIB)
    assert len(fetch.jobs) == 1  # the file was still there


def test_largest_files_are_locked_when_files_exceed_the_lock_limit() -> None:
    files = tuple(raw(str(number), number + 1) for number in range(LOCKS_MAX + 5))
    found = list_blobs_to_lock(files)
    assert len(found) == LOCKS_MAX
    assert found == sorted(one.digest for one in files[5:])
    assert list_blobs_to_lock(reversed(files)) == found


async def test_copy_is_synced_before_publishing_without_a_boot_id(tmp_path: Path) -> None:
    steps: list[tuple[str, Path]] = []
    disk = Disk(lambda what, path: steps.append((what, path)), boot="")
    store = Store(tmp_path, spare_bytes=0, disk=disk).open()
    one = wanted("a", raw("x", path="sub/deep/x.gguf"))
    (await store.ensure(one, fetching(one), None)).close()
    seen = steps.index(("rename", store.layout.copy(one.key)))
    synced = {path for what, path in steps[:seen] if what == "sync"}
    tree = store.layout.partial(one.key) / "tree"
    assert {tree, tree / "files", tree / "files/sub", tree / "files/sub/deep"} <= synced
    assert store.layout.blob(one.key, one.files[0].digest).parent in synced
    assert any(path.name.startswith(".pilotlight-") and path.parent == tree for path in synced)  # copy.json
    assert store.layout.partial(one.key) / "blobs" / store.layout.blob(one.key, one.files[0].digest).name in synced
    assert ("sync", store.layout.copy(one.key).parent) in steps[seen:]

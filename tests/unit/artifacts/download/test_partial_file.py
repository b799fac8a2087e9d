"""Partial files after power loss: at any step, with parts in any order, the bytes are exact or there is no file."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from random import Random
from threading import Event

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from artifacts.digest import Digest
from artifacts.disk import durable_writes
from artifacts.disk.durable_writes import Disk
from artifacts.download import partial_file
from artifacts.download.partial_file import Partial
from artifacts.oci import blob_progress
from tests.support.example_budget import examples
from tests.support.fakes.registry import digest_of
from tests.support.harness.artifacts.registry_pull import CONTENT, PATH, place, small
from tests.support.harness.faults.power_loss import ForgetfulDisk, PowerLossError

SHORT = CONTENT[:20_000]
DIGEST = Digest(digest_of(SHORT))
SUMS = [digest_of(SHORT[at : at + 4096]).removeprefix("sha256:") for at in range(0, len(SHORT), 4096)]


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


@pytest.mark.point("13")
@pytest.mark.standard
@pytest.mark.parametrize("seed", range(3))
async def test_power_loss_at_any_fetch_step_resumes_to_the_whole_file(tmp_path: Path, seed: int) -> None:
    """Power is lost again during the resumed fetch; in the end, the file is complete."""
    async with place(tmp_path) as one:
        wanted = one.wanted(CONTENT, PATH)
        for steps in itertools.count():
            random = Random(1000 * seed + steps)
            one.folder = tmp_path / f"{steps}"
            one.folder.mkdir()
            lost = 0
            while True:
                forgetful = ForgetfulDisk(one.folder, steps + lost * random.randint(1, 9) if lost < 2 else -1)
                whole = True
                try:
                    await one.fetch(wanted, disk=forgetful.disk)
                except* PowerLossError:
                    whole, lost = False, lost + 1
                after = tmp_path / f"{steps}-{lost}-{whole}"
                forgetful.after(after, random)
                forgetful.close()
                one.folder = after
                assert one.file() in {None, CONTENT}  # never partial
                if whole:
                    break
            assert one.file() == CONTENT
            if not lost:
                assert steps >= 9  # the minimum: all parts arrived before any had to be synced
                return


def test_received_parts_survive_a_killed_process_and_a_reboot(tmp_path: Path) -> None:
    """The first process is killed: it closes nothing and has synced nothing."""
    runs = [Disk(boot="one"), Disk(boot="one"), Disk(boot="two")]
    first = Partial(tmp_path, DIGEST, len(SHORT), runs[0])
    first.put(0, [SHORT[:9000]])
    os.close(first.file.number)  # releases its lock
    second = Partial(tmp_path, DIGEST, len(SHORT), runs[1])
    assert second.resumed == 8192
    second.put(8192, [SHORT[8192:13_000]])
    os.close(second.file.number)
    third = Partial(tmp_path, DIGEST, len(SHORT), runs[2])
    assert third.resumed == 8192  # the second process synced what it found
    third.put(8192, [SHORT[8192:]])
    assert third.publish(tmp_path / PATH)
    assert (tmp_path / PATH).read_bytes() == SHORT
    third.close()


def test_progress_within_a_part_survives_a_restart_but_not_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_progress, "MARK_BYTES", 1000)
    for run, there in (("one", 0), ("one", 3000), ("one", 5500), ("one", 5500), ("two", 4096)):
        one = Partial(tmp_path, DIGEST, len(SHORT), Disk(boot=run))
        assert one.resumed == there
        for at in range(there, min(there + 3000, 5500), 500):
            one.put(at, [SHORT[at : min(at + 500, 5500)]])
        if run == "two":
            one.put(5500, [SHORT[5500:]])
            assert one.publish(tmp_path / PATH)
        one.close()
    assert (tmp_path / PATH).read_bytes() == SHORT


def test_writeback_starts_while_more_bytes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_file, "START_BYTES", 4096)
    begun: list[tuple[int, int]] = []
    kept = Disk()
    monkeypatch.setattr(kept, "start", lambda _file, at, count: begun.append((at, at + count)))
    one = Partial(tmp_path, DIGEST, len(SHORT), kept)
    one.put(0, [SHORT[:4000]])
    assert not begun
    for at in range(4000, len(SHORT), 1000):
        one.put(at, [SHORT[at : at + 1000]])
    assert sorted(begun) == [(0, 4096), (4096, 8192), (8192, 12288), (12288, 16384), (16384, 20000)]
    assert one.publish(tmp_path / PATH)
    one.close()


def test_only_synced_parts_are_resumed_without_a_boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Disk().boot == Disk().boot
    monkeypatch.setattr(durable_writes, "BOOT_ID", tmp_path / "none")
    for synced, resumed in ((False, 0), (True, 4096)):
        first = Partial(tmp_path, DIGEST, len(SHORT))
        first.put(0, [SHORT[:5000]])
        if synced:
            first.keep()
        first.close()
        second = Partial(tmp_path, DIGEST, len(SHORT))
        assert second.resumed == resumed
        second.close()


def test_partial_blob_requests_hashing_only_for_contiguous_bytes(tmp_path: Path) -> None:
    one = Partial(tmp_path, DIGEST, len(SHORT), Disk())
    one.put(4096, [SHORT[4096:9000]])
    assert one.sum_up not in one.wants()  # the first part is missing
    one.put(0, [SHORT[:4096]])
    assert one.sum_up in one.wants()
    one.sum_up()
    assert one.sum_up not in one.wants()
    one.put(9000, [SHORT[9000:9100]])
    assert one.wants() == [one.keep]  # too few bytes to hash yet
    one.close()


def test_bytes_received_in_order_are_hashed_without_reading_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_progress, "WHOLE_BYTES_MAX", 1 << 20)
    read: list[int] = []
    preadv = os.preadv

    def counted(file: int, into: list[memoryview], at: int) -> int:
        read.append(at)
        return preadv(file, into, at)

    monkeypatch.setattr(os, "preadv", counted)
    cuts = [0, 3000, 9000, len(SHORT)]
    for order, again in (((0, 1, 2), []), ((1, 0, 2), [3000])):  # bytes received out of order are read back
        read.clear()
        one = Partial(tmp_path, DIGEST, len(SHORT))
        one.ledger = blob_progress.BlobProgress(len(SHORT), 3000)
        for each in order:
            first, end = cuts[each], cuts[each + 1]
            one.put(first, [SHORT[first : first + 1000], SHORT[first + 1000 : end]])
        assert one.publish(tmp_path / PATH)
        assert read == again
        one.close()
        (tmp_path / PATH).unlink()


def test_publish_hashes_and_syncs_a_large_blob_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncing, preadv = Event(), os.preadv
    one = Partial(tmp_path, DIGEST, len(SHORT), Disk(lambda what, _path: syncing.set() if what == "sync" else None))
    one.put(0, [SHORT])
    syncing.clear()

    def once_the_disk_is_asked(number: int, into: list[memoryview], at: int) -> int:
        assert syncing.wait(30)
        return preadv(number, into, at)

    monkeypatch.setattr(os, "preadv", once_the_disk_is_asked)
    assert one.publish(tmp_path / PATH)
    assert (tmp_path / PATH).read_bytes() == SHORT
    one.close()


def test_single_request_blob_is_synced_only_when_published(tmp_path: Path) -> None:
    steps: list[str] = []
    one = Partial(tmp_path, DIGEST, len(SHORT), Disk(lambda what, _path: steps.append(what)))
    steps.clear()
    one.put(0, [SHORT])
    assert steps == ["put"]
    assert one.publish(tmp_path / "a.gguf")
    assert steps[1:] == ["sync", "rename", "sync", "sync", "remove"]
    one.close()


@example(2265079)  # the rename persists at its new name only, and the next run resumes from the old one
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(0, 1 << 32))
def test_random_parts_corruption_and_crashes_yield_exact_bytes_or_no_file(seed: int) -> None:
    random = Random(seed)
    with tempfile.TemporaryDirectory() as made:
        root, lives = Path(made) / "0", itertools.count(1)
        root.mkdir()
        for crashes in itertools.count():
            forgetful = ForgetfulDisk(root, random.randint(0, 25) if crashes < 4 else -1)
            lies = 0.05 if crashes < 4 and seed % 2 else 0.0
            try:
                published = _life(forgetful, root, random, lies)
                assert published or seed % 2  # a crash alone never makes bytes unusable
            except PowerLossError:
                published = False
            after = Path(made) / str(next(lives))
            forgetful.after(after, random)
            forgetful.close()
            root = after
            final = root / PATH
            assert not final.exists() or final.read_bytes() == SHORT
            if published:
                assert final.exists()
                return
            assert crashes < 8


def _life(forgetful: ForgetfulDisk, root: Path, random: Random, lies: float) -> bool:
    """Run from one start to the next; return whether the file was published."""
    one = Partial(root, DIGEST, len(SHORT), forgetful.disk)
    try:
        while not one.ledger.complete:
            first, end = random.choice(one.ledger.spans())
            end = min(end, first + random.randint(1, 5000))
            piece = SHORT[first:end]
            one.put(first, [b"!" * len(piece) if random.random() < lies else piece])
            if random.random() < 0.3:
                one.keep()
        published = one.publish(root / PATH)
        if not published:
            one.keep_matching_parts(SUMS if random.random() < 0.5 else ())
        return published
    finally:
        one.close()

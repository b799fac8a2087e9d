"""A Copy is usable before it is synced to disk; an unsynced one is never trusted after a reboot."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from random import Random

import pytest

from artifacts.disk.durable_writes import Disk
from artifacts.store.copy_record import load_record
from artifacts.store.pull import CopySpec, Job
from artifacts.store.store import Store
from artifacts.store.unsynced_copies import MARK
from tests.support.harness.artifacts.weight_store import KIB, Fetched, content, fetching, raw, wanted, whole
from tests.support.harness.faults.power_loss import ForgetfulDisk, PowerLossError

ONE = wanted("a", raw("x", path="sub/deep/x.gguf"), raw("y"))
BYTES = {"sub/deep/x.gguf": content("x", KIB), "y.gguf": content("y", KIB)}


class Machine:
    """A machine's store during one boot, with a disk that records its steps and can be made to fail or wait."""

    def __init__(self, root: Path, boot: str) -> None:
        self.steps: list[tuple[str, Path]] = []
        self.fails: OSError | None = None
        self.goes = threading.Event()
        self.goes.set()
        self.store = Store(root, spare_bytes=0, disk=Disk(self._step, boot)).open()

    def _step(self, what: str, path: Path) -> None:
        self.steps.append((what, path))
        if what == "sync" and self.fails is not None and path.name == "y.gguf":
            raise self.fails
        if what == "sync" and path.name == "y.gguf":
            assert self.goes.wait(60)

    def boot_of_copy(self) -> str:
        """Return the boot during which ONE was pulled, if it is not synced yet, otherwise an empty string."""
        record = load_record(self.store.layout.copy(ONE.key))
        assert record is not None
        return record.boot

    async def has(self, one: CopySpec, fetch: Fetched) -> None:
        """Fetch the Copy and wait for all follow-up work."""
        (await self.store.ensure(one, fetch, None)).close()
        await self.store.settled()


async def test_pulled_copy_is_usable_before_it_is_synced_to_disk(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "monday")
    machine.goes.clear()
    store = machine.store
    with await store.ensure(ONE, fetching(ONE), None) as copy:
        assert copy.record.boot == "monday"
        assert not [path for what, path in machine.steps if what == "sync" and path.is_relative_to(copy.folder)]
        assert [row.record.reference for row in store.rows()] == [ONE.reference]
        assert whole(store)[ONE.reference] == BYTES
        machine.goes.set()
        await store.settled()
    assert machine.boot_of_copy() == ""
    reported = machine.steps.index(("write", store.layout.copy(ONE.key) / "copy.json"))
    synced = {path for what, path in machine.steps[:reported] if what == "sync"}
    folder, layout = store.layout.copy(ONE.key), store.layout
    files = folder / "files"
    assert {folder, files, files / "sub", files / "sub/deep", files / "sub/deep/x.gguf", files / "y.gguf"} <= synced
    assert {folder.parent, layout.copies, layout.blobs / ONE.key.room, layout.blobs, folder / "lease"} <= synced


async def test_synced_copy_is_not_fetched_again_after_a_reboot(tmp_path: Path) -> None:
    fetch = fetching(ONE)
    await Machine(tmp_path, "monday").has(ONE, fetch)
    tuesday = Machine(tmp_path, "tuesday")
    assert whole(tuesday.store) == {ONE.reference: BYTES}
    await tuesday.has(ONE, fetch)
    assert len(fetch.jobs) == 1


async def test_unsynced_copy_is_verified_after_reboot_and_bad_files_refetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, monday = fetching(ONE), Machine(tmp_path, "monday")
    monkeypatch.setattr(monday.store, "settle_soon", lambda: None)
    await monday.has(ONE, fetch)
    spoilt = monday.store.layout.copy(ONE.key) / "files/y.gguf"
    spoilt.chmod(0o644)
    spoilt.write_bytes(bytes(KIB))  # blocks that a power cut kept from reaching the disk
    tuesday = Machine(tmp_path, "tuesday")
    assert tuesday.store.rows() == []
    assert tuesday.store.find(ONE.key) is None
    await tuesday.has(ONE, fetch)
    assert fetch.jobs == [("sub/deep/x.gguf", "y.gguf"), ("y.gguf",)]
    assert whole(tuesday.store) == {ONE.reference: BYTES}
    assert not [*tuesday.store.layout.trash.iterdir(), *tuesday.store.layout.partials.iterdir()]


async def test_corrupt_file_of_an_unsynced_copy_is_not_reused_after_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, monday = wanted("b", raw("y", path="other.gguf")), Machine(tmp_path, "monday")
    fetch = fetching(ONE)
    monkeypatch.setattr(monday.store, "settle_soon", lambda: None)
    await monday.has(ONE, fetch)
    spoilt = monday.store.layout.copy(ONE.key) / "files/y.gguf"
    spoilt.chmod(0o644)
    spoilt.write_bytes(bytes(KIB))
    tuesday = Machine(tmp_path, "tuesday")
    await tuesday.has(other, fetch)
    assert fetch.jobs[1:] == [("other.gguf",)]
    assert whole(tuesday.store) == {other.reference: {"other.gguf": content("y", KIB)}}


async def test_corrupt_file_of_an_interrupted_pull_is_refetched_after_a_reboot(tmp_path: Path) -> None:
    fetch = fetching(ONE)
    fetch.fails = OSError(errno.EIO, "the power goes")
    with pytest.raises(Exception, match="the disk failed"):
        await Machine(tmp_path, "monday").has(ONE, fetch)
    layout = Machine(tmp_path, "monday").store.layout
    (came,) = (layout.partial(ONE.key) / "blobs").glob("sha256-*")
    assert [path.name for path in layout.partial(ONE.key).glob(f"{MARK}*")] == [f"{MARK}monday"]
    came.write_bytes(bytes(KIB))
    fetch.fails = None
    tuesday = Machine(tmp_path, "tuesday")
    await tuesday.has(ONE, fetch)
    assert fetch.jobs == [("sub/deep/x.gguf", "y.gguf")] * 2
    assert whole(tuesday.store) == {ONE.reference: BYTES}


async def test_copy_is_dropped_on_a_sync_error_even_while_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetch, machine = fetching(ONE), Machine(tmp_path, "monday")
    machine.fails = OSError(errno.EIO, "Input/output error")
    with caplog.at_level(logging.ERROR), await machine.store.ensure(ONE, fetch, None):
        await machine.store.settled()
        assert machine.store.rows() == []
    assert "event=store_copy_lost" in caplog.text
    assert str(tmp_path) not in caplog.text
    machine.fails = None
    await machine.has(ONE, fetch)
    assert [len(job) for job in fetch.jobs] == [2, 2], "no file of it is used again"


async def test_sync_failure_from_the_open_file_limit_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetch, machine = fetching(ONE), Machine(tmp_path, "monday")
    machine.fails = OSError(errno.EMFILE, "Too many open files")
    await machine.has(ONE, fetch)
    assert "event=store_sync_failed reason='Too many open files'" in caplog.text
    assert machine.boot_of_copy() == "monday"
    machine.fails = None
    machine.store.settle_soon()
    await machine.store.settled()
    assert machine.boot_of_copy() == ""


async def test_copy_evicted_during_sync_is_removed_without_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path, "monday")
    machine.goes.clear()
    (await machine.store.ensure(ONE, fetching(ONE), None)).close()
    machine.store.evict(ONE.key)
    machine.goes.set()
    await machine.store.settled()
    assert machine.store.rows() == []
    assert caplog.records == []


async def test_store_without_a_boot_id_ignores_but_keeps_unsynced_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monday = Machine(tmp_path, "monday")
    monkeypatch.setattr(monday.store, "settle_soon", lambda: None)
    await monday.has(ONE, fetching(ONE))
    sandbox = Machine(tmp_path, "")
    assert sandbox.store.rows() == []
    assert whole(monday.store) == {ONE.reference: BYTES}
    await sandbox.has(ONE, fetching(ONE))
    assert sandbox.boot_of_copy() == "", "it had it synced before anybody could see it"


# --- power loss at any step of a store -------------------------------------------------------------------------------

FIRST = wanted("a", raw("x"), raw("y", path="sub/y.gguf"))
SECOND = wanted("b", raw("y", path="y.gguf"), raw("z"))
BOTH = {
    FIRST.reference: {"x.gguf": content("x", KIB), "sub/y.gguf": content("y", KIB)},
    SECOND.reference: {"y.gguf": content("y", KIB), "z.gguf": content("z", KIB)},
}
STRIDE = 4


async def _life(root: Path, forgetful: ForgetfulDisk, settled: int) -> None:
    """Run the store once; `settled` is the number of Copies after which their bytes are synced."""
    known = fetching(FIRST, SECOND)

    async def fetch(job: Job) -> None:
        for one in job.files:
            aside = job.blobs / "aside"
            aside.write_bytes(content(*known.known[one.digest]))
            job.disk.sync(aside)
            job.disk.move(aside, job.blob(one.digest))

    store = Store(root, spare_bytes=0, disk=forgetful.disk).open()
    with pytest.MonkeyPatch.context() as patch:
        if settled > 1:
            patch.setattr(store, "settle_soon", lambda: None)
        (await store.ensure(FIRST, fetch, None)).close()
    await store.settled()
    (await store.ensure(SECOND, fetch, None)).close()
    await store.settled()
    store.evict(FIRST.key)


@pytest.mark.point("13")
@pytest.mark.parametrize(
    ("boot", "settled"), [("", 0), (None, 1), (None, 2)], ids=["at once", "one by one", "both in the end"]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, STRIDE))])
async def test_power_loss_at_any_step_exposes_no_incomplete_copy(
    tmp_path: Path, seed: int, boot: str | None, settled: int
) -> None:
    seen = set[tuple[str, ...]]()
    for steps in range(seed, 1000, STRIDE):
        root, after, lost = tmp_path / f"{steps}", tmp_path / f"{steps}-after", False
        root.mkdir()
        forgetful = ForgetfulDisk(root, steps, boot)
        try:
            await _life(root, forgetful, settled)
        except PowerLossError:
            lost = True
        forgetful.after(after, Random(steps))
        forgetful.close()
        store, fetch = Store(after, spare_bytes=0).open(), fetching(FIRST, SECOND)
        published = whole(store)
        assert published.items() <= BOTH.items(), steps
        seen.add(tuple(sorted(published)))
        for one in (FIRST, SECOND):
            (await store.ensure(one, fetch, None)).close()
        assert whole(store) == BOTH, steps
        if not lost:
            assert steps > 60
            assert seen >= {(), (SECOND.reference,)} | ({(FIRST.reference,)} if settled < 2 else set())
            return
    pytest.fail("power was lost at each step")

"""A full disk: when a disk counts as full, and that an engine that exits because of it has not failed."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from autoscaler.drivers.local import disk_space, driver
from autoscaler.drivers.local.disk_space import BYTES_MIN, Space
from autoscaler.fold.fold import fold
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.lifecycle import ReplicaState
from tests.support.builders.worlds import T0, device, model, replica, world

ENOUGH, LITTLE = Space(BYTES_MIN), Space(BYTES_MIN - 1)


@pytest.mark.parametrize(
    ("space", "full"),
    [(ENOUGH, False), (LITTLE, True), (Space(0), True), (Space(BYTES_MIN, 0), True), (Space(BYTES_MIN, 1), False)],
)
def test_disk_below_the_minimum_free_bytes_or_without_inodes_is_full(space: Space, full: bool) -> None:
    assert disk_space.is_full(space) == full


def test_directory_that_does_not_exist_does_not_count_as_full(tmp_path: Path) -> None:
    assert disk_space.measure_free_space(tmp_path).bytes > 0
    assert not disk_space.is_full(disk_space.measure_free_space(tmp_path / "none")), "a write there names the error"


def test_only_enospc_and_edquot_count_as_out_of_space() -> None:
    assert disk_space.is_out_of_space(OSError(errno.ENOSPC, "No space left on device"))
    assert disk_space.is_out_of_space(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert not disk_space.is_out_of_space(OSError(errno.EACCES, "Permission denied"))
    assert not disk_space.is_out_of_space(ValueError("ENOSPC"))


@pytest.mark.parametrize("stopped", [False, True])
def test_wait_for_disk_space_ends_when_space_is_free_or_on_a_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: bool
) -> None:
    found = [LITTLE, LITTLE] if stopped else [LITTLE, LITTLE, ENOUGH]
    over = asyncio.Event()

    def space(_: Path) -> Space:
        if len(found) == 1 and stopped:
            over.set()
        return found.pop(0)

    monkeypatch.setattr(disk_space, "LOOK_S", 0.0)
    monkeypatch.setattr(disk_space, "measure_free_space", space)
    assert asyncio.run(disk_space.wait_for_space(tmp_path, over)) is not stopped
    assert not found


def test_launch_error_names_the_file_if_the_os_error_has_one() -> None:
    assert driver._describe_launch_error(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    assert (
        driver._describe_launch_error(FileNotFoundError(errno.ENOENT, "No such file", "/engine"))
        == "/engine: No such file"
    )
    assert driver._describe_launch_error(ValueError()) == "ValueError"


@pytest.mark.parametrize("full", [False, True])
def test_engine_exit_is_a_failed_start_unless_the_disk_is_full(full: bool) -> None:
    """The local driver observes LEAVING before EXITED."""
    start = replica(model("a", 20), "r1", state=ReplicaState.STARTING)
    before = world([model("a", 20)], [device()], [start])
    seen = ReplicaSeen(
        id=start.id, model=start.model, spec_hash=start.spec_hash, intent=start.intent, slices=start.resources.slices,
        memory_bytes=start.resources.memory_bytes, slots=start.slots, seen=Seen.EXITED, reason="exited with status 120",
    )  # fmt: skip
    leaving = ReplicaSeen(**{name: getattr(seen, name) for name in seen.__struct_fields__} | {"seen": Seen.LEAVING})
    after, _ = fold(before, (leaving, seen) if full else (seen,), T0 + 1)
    assert after.replicas[start.id].state is (ReplicaState.SCRUBBING if full else ReplicaState.FAILED)
    history = after.learned.histories.get(start.model)
    assert (history is None or history.tries == 0) == full

"""Locks between processes: on the current file at a path, shared with a child process, awaited without blocking."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from artifacts.disk import locks


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Run `act` once, between the opening of a file and its lock."""
    really, acts = fcntl.flock, [act]

    def flock(fd: int, operation: int) -> None:
        if acts:
            acts.pop()()
        really(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_lock_is_taken_on_the_new_file_if_the_path_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()

    def replaced() -> None:
        path.rename(tmp_path / "away")
        path.touch()

    meanwhile(monkeypatch, replaced)
    with locks.try_lock(path) or pytest.fail("it is free") as found:
        assert os.fstat(found.fd).st_ino == path.stat().st_ino
        assert locks.try_lock(path) is None
        assert locks.try_lock(tmp_path / "away") is not None


def test_lock_on_a_file_removed_after_opening_raises_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lease"
    path.touch()
    meanwhile(monkeypatch, path.unlink)
    with pytest.raises(FileNotFoundError):
        locks.try_lock(path, shared=True)


def test_shared_locks_coexist_and_block_an_exclusive_lock(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    one, two = (locks.wait_for_lock(path, 1.0, shared=True, make=True) for _ in range(2))
    for each in (one, two):
        assert locks.try_lock(path) is None
        with pytest.raises(TimeoutError, match="locked by another process"):
            locks.wait_for_lock(path, 0.0)
        each.close()
    locks.wait_for_lock(path, 1.0).close()


@pytest.mark.standard
def test_child_process_that_inherits_a_lock_holds_it_until_exit(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    lock = locks.wait_for_lock(path, 1.0, shared=True, make=True)
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[lock.fd]
    ) as child:
        lock.close()
        assert locks.try_lock(path) is None
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert locks.try_lock(path) is not None


async def test_task_cancelled_while_it_waits_for_a_lock_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = locks.wait_for_lock(path, 1.0, make=True)

    async def waits() -> None:
        async with locks.hold_lock(path):
            pytest.fail("another process holds the lock")

    task = asyncio.ensure_future(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    locks.remove_lock(first, path)
    async with locks.hold_lock(path):
        assert locks.try_lock(path) is None
    assert not path.exists()

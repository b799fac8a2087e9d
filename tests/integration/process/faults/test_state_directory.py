"""Faults of the state directory: small files are corrupt; histories and request events cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from autoscaler.drivers.local.state_directory import TEXT_BYTES_MAX
from loadtest.result import Ending
from pilotlight.processes.request_event_file import BYTES_MAX
from tests.support.harness.serve.serve import Serving, fake, serving
from tests.support.waiting import until

REFUSED_S = 90.0
BROKEN = {"empty": b"", "words": b"somebody else's\n", "not text": b"\xff\x00\n" * TEXT_BYTES_MAX}
FIXES = {
    "version": ("name another with --state", "write 1 into that file"),
    "installation": ("name another with --state", "remove that file when none of its engines runs"),
    "epoch": ("write a number into it that is larger than every earlier epoch",),
}


def in_the_way(path: Path) -> None:
    """Create a folder that neither a file nor another folder can replace, not even as root."""
    path.mkdir()
    (path / "something").write_text("")


async def warm(one: Serving) -> int:
    """Return the pid of ada's engine after it has answered a request."""
    assert (await one.call("ada")).ending is Ending.COMPLETED
    (engine,) = one.engines()
    return engine


def contains(file: Path, word: bytes) -> bool:
    """Return whether the file is within its size limit and contains the word."""
    try:
        return file.stat().st_size < BYTES_MAX and word in file.read_bytes()
    except FileNotFoundError:  # it has been renamed, and the new file does not exist yet
        return False


@pytest.mark.parametrize("name", FIXES)
@pytest.mark.standard
async def test_corrupt_state_file_fails_the_start_and_keeps_engines_running(tmp_path: Path, name: str) -> None:
    """With guessed contents, Pilotlight would not find its running engines, or gateways would reject the leader."""
    async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0")) as one:
        engine = await warm(one)
        await one.kill()
        file = one.state / name
        good = file.read_bytes()
        for what, content in BROKEN.items():
            file.write_bytes(content)
            try:
                done = subprocess.run(one.argv, capture_output=True, text=True, timeout=REFUSED_S, check=False)
                found = file.read_bytes()
            finally:
                file.write_bytes(good)  # also for the check for leftover marked processes after a failure
            assert found == content, "it is not replaced by a guess"
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (what, done.stderr)
            for words in (str(file), *FIXES[name]):
                assert words in done.stderr, what
            assert one.engines() == [engine], what
        await one.start()
        assert await warm(one) == engine, "adopted"


async def test_stop_reports_engines_left_running_if_no_autoscaler_can_start(tmp_path: Path) -> None:
    async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0")) as one:
        engine = await warm(one)
        epoch = one.state / "epoch"
        good = epoch.read_bytes()
        epoch.write_bytes(b"")
        os.kill(one.autoscaler(), signal.SIGKILL)
        await until("it tried again", lambda: f"{epoch} contains no number" in one.output())
        assert (await one.call("ada")).ending is Ending.COMPLETED, "what runs is not hurt"
        assert await one.stop() == 1
        assert "event=engine_stop_failed" in one.output()
        assert one.engines() == [engine]
        epoch.write_bytes(good)
        await one.start()
        assert await warm(one) == engine, "adopted"
        assert await one.stop() == 0
        assert one.marked() == []


async def test_directory_in_place_of_the_history_file_only_logs_a_warning(tmp_path: Path) -> None:
    async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0")) as one:
        await warm(one)
        file, aside = one.state / "histories.json", one.state / "histories.broken"
        in_the_way(file)
        assert await one.stop() == 0
        assert one.output().count("event=history_save_failed ") == 1
        assert one.marked() == []
        in_the_way(aside)
        await one.start()
        await until("it is logged", lambda: f"{file} cannot be read" in one.output())  # gateways may be ready earlier
        await warm(one)
        assert await one.stop() == 0
        (aside / "something").unlink()
        aside.rmdir()
        await one.start()
        await until("it is logged", lambda: f"moved to {aside}" in one.output())
        await warm(one)
        assert await one.stop() == 0
        assert file.is_file(), "it can be written again"
        assert one.output().count(f"{file} cannot be read") == 2, "once for each start"
        assert one.output().count("event=history_save_failed ") == 2


async def test_directory_in_place_of_the_events_file_loses_no_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0"), start=False) as one:
        file = one.state / "calls" / "gateway-1.log"
        file.parent.mkdir()
        in_the_way(file)
        await one.start()
        await warm(one)
        assert one.output().count(f"event=events_file_open_failed path={str(file)!r} error=Is a directory") == 1
        assert await one.stop() == 0


@pytest.mark.parametrize("blocked", [False, True], ids=["replaced", "cannot be replaced"])
async def test_events_file_over_its_size_limit_is_rotated_or_emptied(tmp_path: Path, blocked: bool) -> None:
    """It is renamed to FILE.1, or truncated if that fails, because the size limit holds on every disk."""
    async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0"), start=False) as one:
        file = one.state / "calls" / "gateway-1.log"
        file.parent.mkdir()
        with file.open("wb") as sparse:
            sparse.truncate(BYTES_MAX + 1)
        former = file.with_suffix(".log.1")
        if blocked:
            in_the_way(former)
        await one.start()
        await warm(one)
        await until("a small file contains its request", lambda: contains(file, b"completed"))
        if blocked:
            assert one.output().count(f"event=events_file_rotation_failed path={str(file)!r} ") == 1
        else:
            assert former.stat().st_size >= BYTES_MAX + 1
        assert await one.stop() == 0

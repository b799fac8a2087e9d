"""Identification of processes: odd names, wiped environments, reused sessions, processes that survive SIGKILL."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from autoscaler.drivers.local import proof_of_clean, replica_processes
from autoscaler.drivers.local.proof_of_clean import kill_all
from autoscaler.drivers.local.replica_processes import (
    BLANK,
    MARK,
    Facts,
    ProcessSelector,
    Reaper,
    describe_exit,
    find_processes,
    is_process_alive,
    read_process,
    read_process_mark,
)
from tests.support.harness.local_rig import INSTANCE, R1, python
from tests.support.waiting import until

pytestmark = pytest.mark.standard

SLEEP = "import time; time.sleep(60)"
LEAVES_A_CHILD = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-S", "-E", "-c", "{SLEEP}"], env={{}}, stdout=subprocess.DEVNULL).pid)
"""


@contextmanager
def running(argv: Sequence[str | Path], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that leads its session and has completed its exec."""
    with subprocess.Popen(argv, env=env, start_new_session=True) as process:
        try:
            # Without an environment it stays blank. Otherwise the process may have to wait for a core.
            deadline_s = time.monotonic() + (0.05 if env == {} else 60)
            while read_process_mark(process.pid) == BLANK and time.monotonic() < deadline_s:
                time.sleep(0.001)
            yield process
        finally:
            process.kill()


@pytest.fixture
def marked() -> Iterator[subprocess.Popen[bytes]]:
    with running(python(SLEEP), {MARK: R1, "A": "b"}) as process:
        yield process


def of(pid: int) -> Facts:
    """Return its facts once it runs its final program."""
    now = read_process(pid)
    assert now is not None
    return now


def test_process_is_alive_only_if_pid_start_time_and_mark_match(marked: subprocess.Popen[bytes]) -> None:
    now = of(marked.pid)
    assert (now.parent, now.group, now.session, now.gone) == (os.getpid(), marked.pid, marked.pid, False)
    assert read_process_mark(marked.pid) == R1
    assert is_process_alive(marked.pid, now.start_ticks, R1)
    assert not is_process_alive(marked.pid, now.start_ticks + 1, R1)
    assert not is_process_alive(marked.pid, now.start_ticks, f"{INSTANCE}/r2")
    assert abs(replica_processes.started_s(now.start_ticks) - time.monotonic()) < 60, (
        "moments ago; a busy machine may pause"
    )
    marked.kill()
    os.waitid(os.P_PID, marked.pid, os.WEXITED | os.WNOWAIT)
    assert of(marked.pid).gone
    assert not is_process_alive(marked.pid, now.start_ticks, R1)
    assert describe_exit(marked.pid) == "was killed by SIGKILL"
    marked.wait()
    assert read_process(marked.pid) is None
    assert describe_exit(marked.pid) == ""


def test_process_name_with_parentheses_does_not_break_stat_parsing(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 (b"
    shutil.copy("/bin/sleep", odd)
    with running([odd, "60"]) as process:
        assert of(process.pid).parent == os.getpid()
        assert not of(process.pid).gone


@pytest.mark.parametrize(
    ("env", "mark"),
    [
        ({}, BLANK),
        ({"A": "1"}, None),
        ({f"X{MARK}": "i/r1"}, None),
        ({"A": f"{MARK}=i/r1"}, None),
        ({MARK: "i/r"}, "i/r"),
    ],
)
def test_replica_of_a_process_is_read_only_from_the_exact_env_variable(env: dict[str, str], mark: str | None) -> None:
    with running(["/bin/sleep", "60"], env) as process:
        assert read_process_mark(process.pid) == mark


async def test_child_with_a_cleared_environment_is_found_by_its_session_id() -> None:
    leader = subprocess.Popen(python(LEAVES_A_CHILD), stdout=subprocess.PIPE, text=True, start_new_session=True)
    began_ticks = of(leader.pid).start_ticks
    child = int(leader.communicate()[0])
    found, _ = await find_processes(ProcessSelector(R1, leader.pid, held=False, since_ticks=began_ticks))
    assert [one.pid for one in found] == [child]
    assert not (await find_processes(ProcessSelector(R1)))[0]
    replica_processes.send_signal(found, signal.SIGKILL)


async def test_process_that_reuses_a_session_id_is_not_matched_to_a_replica() -> None:
    with running(python(SLEEP), {}) as stranger:
        earlier_ticks = of(stranger.pid).start_ticks - 1
        found, complete = await find_processes(ProcessSelector(R1, stranger.pid, held=False, since_ticks=earlier_ticks))
        assert not found
        assert not complete  # a process without an environment might have lost its mark


def test_signal_is_not_sent_to_a_process_with_another_start_time(marked: subprocess.Popen[bytes]) -> None:
    now = of(marked.pid)
    replica_processes.send_signal([now._replace(start_ticks=now.start_ticks - 1)], signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        marked.wait(0.05)
    replica_processes.send_signal([now], signal.SIGKILL)
    assert marked.wait(60) == -signal.SIGKILL


async def test_process_that_survives_sigkill_is_reported_and_waited_for(
    marked: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_of_clean, "ALARM_S", 0.02)
    really_send, sent = replica_processes.send_signal, list[str]()
    monkeypatch.setattr(
        proof_of_clean, "send_signal", lambda _targets, _number: None
    )  # as with a process in an uninterruptible sleep
    reaper = Reaper(f"{INSTANCE}/")
    reaper.spare(marked.pid)
    clearer = asyncio.create_task(kill_all(ProcessSelector(R1), reaper, time.monotonic, sent.append))
    await until("two signals are sent", lambda: len(sent) >= 2)
    assert sent[0] == f"processes {marked.pid} do not end after SIGKILL"
    assert not clearer.done()
    monkeypatch.setattr(proof_of_clean, "send_signal", really_send)
    async with asyncio.timeout(60):
        await clearer
    assert marked.wait(60) == -signal.SIGKILL


async def test_incomplete_process_scan_is_repeated_before_cleanup_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[bool]()

    async def partly(_claim: ProcessSelector, _reaper: Reaper) -> tuple[tuple[Facts, ...], bool]:
        looks.append(len(looks) == 1)
        return (), looks[-1]

    monkeypatch.setattr(proof_of_clean, "find_processes", partly)
    await kill_all(ProcessSelector(R1), Reaper(f"{INSTANCE}/"), time.monotonic, pytest.fail)
    assert looks == [False, True]

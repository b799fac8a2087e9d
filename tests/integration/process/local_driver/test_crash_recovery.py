"""The driver's own process dies, or has other children: it runs in a separate process that a test may kill."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.local.replica_processes import read_process
from autoscaler.state.events import Seen
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import TINY_ENGINE, LocalRig, python

pytestmark = pytest.mark.standard

ROOT = Path(__file__).resolve().parents[4]
R1 = ReplicaId("r1")
GROWS_ORPHANS = """
import os, sys, time
from os.path import exists, join
folder = sys.argv[2]
for name in ("leader", "second", "first"):
    if os.fork() == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent: time.sleep(0.01)
            if name == "leader":
                os.setsid()
            open(join(folder, f"{name}-{os.getpid()}"), "w").close()
            while not exists(join(folder, f"end-{name}")): time.sleep(0.01)
        os._exit(0)
    os.wait()
"""
"""Starts three orphans, one after the other. The oldest leads its own session. Each exits when its file exists."""


class Host:
    """A process that runs a driver."""

    def __init__(self, state: Path, *commands: tuple[str, ...]) -> None:
        argv = [sys.executable, "-m", "tests.support.harness.driver_process", str(state), *map(json.dumps, commands)]
        self.process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, order: str) -> None:
        """Send it one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def until(self, start: str) -> str:
        """Return the first output line that starts with this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.strip()
        raise AssertionError(f"it ended without saying {start}")

    def children(self) -> list[int]:
        """Return its children, including those that have exited."""
        every = [read_process(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [one.pid for one in every if one is not None and one.parent == self.process.pid]

    def kill(self) -> None:
        """Send SIGKILL; its state directory is unlocked afterwards."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(probes, "PROBE_SECONDS_MAX", 60.0)  # an engine that is paused for seconds fails no probe
    yield tmp_path / "state"
    LocalRig(tmp_path).close()


def test_engines_of_a_killed_driver_are_adopted_by_the_next_one(state: Path, tmp_path: Path) -> None:
    host = Host(state, python(TINY_ENGINE, "{port}"))
    host.until("r1 ready")
    host.kill()
    (state / "replicas" / ".r2.json.new").write_text("{")  # as if it was killed while it wrote a record
    rig = LocalRig(tmp_path)
    pid = rig.main(R1)

    async def scenario() -> None:
        async with running(rig.driver()) as observed:
            assert observed.words(R1) == ["ready"]
            assert [path.name for path in (state / "replicas").iterdir()] == ["r1.json"]
            assert rig.processes(R1) == [pid]
            rig.kill(R1)
            exited = await observed.until(R1, Seen.EXITED)
            assert exited.reason == "ended (it was adopted, so its exit status is not known)"
            await observed.until(R1, Seen.CLEAN)

    rig.run(scenario())
    rig.state.close()


def test_exit_reason_of_an_adopted_engine_omits_its_last_output(state: Path, tmp_path: Path) -> None:
    """The record says that it was never ready; readiness is written a moment after its first requests can arrive."""
    host = Host(state, python("import time; print('a prompt', flush=True); time.sleep(60)"))
    host.until("r1 starting")
    log_folder = state / "logs"
    deadline_s = time.monotonic() + 60
    while not any("a prompt" in path.read_text() for path in log_folder.glob("*.log")):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    host.kill()
    rig = LocalRig(tmp_path)

    async def scenario() -> None:
        async with running(rig.driver()) as observed:
            assert observed.words(R1) == ["starting"]
            rig.kill(R1)
            exited = await observed.until(R1, Seen.EXITED)
            assert exited.reason == "ended (it was adopted, so its exit status is not known)"
            await observed.until(R1, Seen.CLEAN)

    rig.run(scenario())
    rig.state.close()


def test_orphans_of_engines_are_reaped_but_other_children_are_not(state: Path, tmp_path: Path) -> None:
    """The orphan that leads its own session is reaped only because the driver has seen it alive.

    A scan of all processes that reaps the first of the others may have begun before the orphan led its session. The
    second is older than the first, so a later scan reaps it, and has seen the orphan before, which is older still.
    """
    host = Host(state, python(GROWS_ORPHANS + TINY_ENGINE, "{port}", str(tmp_path)))
    try:
        host.until("r1 ready")
        host.order("spare")
        unrelated = int(host.until("unrelated").split()[1])
        leader, second, first = (_wait_for_pid(tmp_path, f"{name}-") for name in ("leader", "second", "first"))
        (tmp_path / "end-first").touch()
        _wait_while(host, first)
        (tmp_path / "end-second").touch()
        children = _wait_while(host, second)
        (main,) = set(children) - {unrelated, leader}
        (tmp_path / "end-leader").touch()
        assert sorted(_wait_while(host, leader)) == sorted([main, unrelated])
        host.order("stop r1")
        host.until("r1 clean")
        assert host.children() == [unrelated]
        host.order("collect")
        assert host.until("status") == "status 7"
    finally:
        host.kill()


def _wait_for_pid(folder: Path, start: str) -> int:
    deadline_s = time.monotonic() + 60
    while not (found := list(folder.glob(f"{start}*"))):
        assert time.monotonic() < deadline_s, f"there is no file {start}*"
        time.sleep(0.01)
    return int(found[0].name.removeprefix(start))


def _wait_while(host: Host, child: int) -> list[int]:
    """Return the children once this one has been reaped."""
    deadline_s = time.monotonic() + 60
    while child in (children := host.children()):
        assert time.monotonic() < deadline_s, f"{child} is still one of {children}"
        time.sleep(0.05)
    return children

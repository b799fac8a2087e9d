"""The local driver with real processes: children that escape, reused pids, its own death, floods of output."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers import probes, resilient_tasks
from autoscaler.drivers.local import driver as local
from autoscaler.drivers.local import engine_logs
from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.driver import LocalDriver
from autoscaler.drivers.local.engine_process import EngineProcess
from autoscaler.drivers.local.readiness import Readiness
from autoscaler.drivers.local.replica_processes import BLANK, MARK, Facts, boot_id, read_process, read_process_mark
from autoscaler.drivers.local.state_directory import ReplicaRecord
from autoscaler.state.events import FaultSeen, Seen
from autoscaler.state.world import Slice
from tests.contracts.driver import Manner
from tests.support.harness.driver_events import running
from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.local_rig import TINY_ENGINE, LocalRig, python, replica
from tests.support.harness.scenarios import run_on_rig
from tests.support.waiting import until

pytestmark = pytest.mark.standard

R1 = ReplicaId("r1")
ESCAPES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
"""
"""Leaves a daemon: a process in a session of its own, whose parent has exited."""
GOES_ON_TALKING = """
import threading, time
def talk():
    while True:
        print("and on", flush=True)
        time.sleep(0.01)
threading.Thread(target=talk, daemon=True).start()
"""


def once_there_is(file: Path) -> str:
    """Return code that makes an engine wait until this file exists before it does anything else."""
    return f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.01)\n"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRig]:
    # An engine, or this process, may be paused for seconds: that is no failed probe, and no incomplete adoption.
    monkeypatch.setattr(probes, "PROBE_SECONDS_MAX", 60.0)
    monkeypatch.setattr(local, "ADOPT_SECONDS_MAX", 60.0)
    rig = LocalRig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that belongs to no replica and leads its own session."""
    with subprocess.Popen(python("import time; time.sleep(60)"), start_new_session=True) as process:
        while read_process_mark(process.pid) == BLANK:  # during its exec
            time.sleep(0.001)
        yield process
        process.kill()


async def says_yes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer 200 to every connection."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    writer.close()


def record(pid: int, start_ticks: int) -> ReplicaRecord:
    """Return a record as an earlier driver wrote it."""
    return ReplicaRecord(
        id=R1,
        model=ModelName("m"),
        spec_hash="h",
        intent="i",
        slices=(),
        memory_bytes=1,
        port=1,
        boot=boot_id(),
        pid=pid,
        start_ticks=start_ticks,
    )


@pytest.mark.parametrize("how", ["stop", "kill"])
@run_on_rig
async def test_daemon_that_outlives_its_engine_is_killed_and_logged(
    rig: LocalRig, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver, (r1, model) = rig.driver(), replica("r1", python(ESCAPES + TINY_ENGINE, "{port}"))
    async with running(driver) as observed:
        driver.start(r1, model)
        await observed.until(R1, Seen.READY)
        escaped = [pid for pid in rig.processes(R1) if pid != rig.main(R1)]
        assert len(escaped) == 1
        driver.stop(r1, 5.0) if how == "stop" else rig.kill(R1)
        clean = await observed.until(R1, Seen.CLEAN)
        assert clean.proof == "exited"
        assert not rig.processes(R1)
        assert f"event=engine_processes_outlived replica=r1 pids={escaped[0]} killed=true" in caplog.messages


def test_process_that_reuses_a_recorded_pid_is_never_signalled(
    rig: LocalRig, stranger: subprocess.Popen[bytes]
) -> None:
    now = read_process(stranger.pid)
    assert now is not None
    for ticks in (now.start_ticks - 1, now.start_ticks):  # another start time; and the same, but no mark
        rig.state.put(record(stranger.pid, ticks))

        async def scenario() -> None:
            async with running(driver := rig.driver()) as observed:
                assert observed.words(R1) == ["clean"]
                driver.stop(replica("r1", ())[0], 0.0)

        rig.run(scenario())
        assert stranger.poll() is None


def test_engine_without_a_recorded_pid_is_found_by_its_environment(rig: LocalRig) -> None:
    async def first() -> None:
        driver, (r1, model) = rig.driver(), rig.replica("r1", Manner.GOOD)
        async with running(driver) as observed:
            driver.start(r1, model)
            await observed.until(R1, Seen.READY)

    rig.run(first())
    (written,), pid = rig.state.records()[0], rig.main(R1)
    rig.state.put(msgspec.structs.replace(written, pid=0, start_ticks=0))

    async def second() -> None:
        async with running(rig.driver()) as observed:
            assert observed.words(R1) == ["ready"]
            assert [one.pid for one in rig.state.records()[0]] == [pid]

    rig.run(second())


@pytest.mark.parametrize("broken", [True, False], ids=["broken record", "no record"])
def test_engine_without_a_valid_record_is_killed_before_the_driver_syncs(rig: LocalRig, broken: bool) -> None:
    mark = rig.state.mark_prefix + "r1"
    with subprocess.Popen(python("import time; time.sleep(60)"), env=os.environ | {MARK: mark}) as orphan:
        while read_process_mark(orphan.pid) != mark:  # during its exec
            time.sleep(0.001)
        if broken:
            (rig.state.path / "replicas" / "r1.json").write_text('{"id":')

        async def scenario() -> None:
            async with running(rig.driver()) as observed:
                assert observed.words(R1) == ["clean"]

        rig.run(scenario())
        assert orphan.wait(60) == -signal.SIGKILL
    assert (rig.state.path / "replicas" / "r1.broken").exists() == broken


def test_stopping_a_replica_keeps_its_namesake_in_another_installation(rig: LocalRig, tmp_path: Path) -> None:
    other = LocalRig(tmp_path / "other")

    async def scenario() -> None:
        mine, foreign, (r1, model) = rig.driver(), other.driver(), rig.replica("r1", Manner.GOOD)
        async with running(mine) as seen_here, running(foreign) as seen_there:
            mine.start(r1, model)
            foreign.start(r1, model)
            await seen_here.until(R1, Seen.READY)
            await seen_there.until(R1, Seen.READY)
            mine.stop(r1, 1.0)
            await seen_here.until(R1, Seen.CLEAN)
            assert not rig.processes(R1)
            assert len(other.processes(R1)) == 1

    try:
        rig.run(scenario())
    finally:
        other.close()


@run_on_rig
async def test_exit_reason_quotes_engine_output_only_if_the_start_failed(rig: LocalRig) -> None:
    driver = rig.driver()
    fails = replica("r1", python("import sys; print('a', flush=True); sys.exit('no such model: x.gguf\\n\\n')"))
    dies_when_told = TINY_ENGINE.replace("c.recv(65536)", "c.recv(65536) == b'end' and sys.exit('the prompt')")
    dies = replica("r2", python(dies_when_told, "{port}"))
    async with running(driver) as observed:
        driver.start(*fails)
        driver.start(*dies)
        assert (await observed.until(R1, Seen.EXITED)).reason == "exited with status 1: no such model: x.gguf"
        host, _, port = (await observed.until(ReplicaId("r2"), Seen.READY)).address.rpartition(":")
        _, again = await asyncio.open_connection(host.removeprefix("http://"), int(port))
        again.write(b"end")
        assert (await observed.until(ReplicaId("r2"), Seen.EXITED)).reason == "exited with status 1"
        await observed.until(ReplicaId("r2"), Seen.CLEAN)
        again.close()


@run_on_rig
async def test_missing_program_or_launch_exception_is_a_failed_start(rig: LocalRig) -> None:
    async with running(driver := rig.driver()) as observed:
        driver.start(*replica("r1", ("/nowhere/engine",)))
        assert (await observed.until(R1, Seen.EXITED)).reason == "the program of the engine: No such file or directory"
        driver.start(*replica("r2", ()))  # an empty command: the launch itself fails
        assert (await observed.until(ReplicaId("r2"), Seen.EXITED)).reason
        assert not rig.state.records()[0]


def test_missing_engine_program_is_detected_before_a_start(rig: LocalRig, tmp_path: Path) -> None:
    """A program may be given by its path, or found on the PATH that the engine itself will get."""
    driver, program = rig.driver(), tmp_path / "engine"
    fix = "install it, or correct spec.command"

    def obstacle(*argv: str, **env: str) -> str:
        _, model = replica("r1", argv)
        return driver.obstacle(msgspec.structs.replace(model, spec=msgspec.structs.replace(model.spec, env=env)))

    assert obstacle(sys.executable, "x.py") == ""
    assert obstacle("/nowhere/engine") == f"the program of spec.command was not found; {fix}"
    assert obstacle("engine") == f"the program of spec.command was not found on the PATH; {fix}"
    program.write_text("#!/bin/sh\n")
    assert obstacle(str(program)) == f"the program of spec.command was not found; {fix}", "it cannot be executed"
    program.chmod(0o755)
    assert obstacle(str(program)) == obstacle("engine", PATH=str(tmp_path)) == ""
    assert obstacle() == "tuple index out of range", "whatever a launch raises"


@run_on_rig
async def test_engine_log_is_trimmed_without_blocking_the_engine(
    rig: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoscaler.drivers.local.driver.HOUSEKEEPING_EVERY_S", 0.02)
    flood = "import sys\nfor i in range(200_000): print(i, 'x' * 80)\nsys.stdout.flush()\n"

    def newest_of_little() -> str:
        """Return the last line once the log is within its limit. A line written during a trim may be lost."""
        log = rig.state.log(R1)
        return engine_logs.last_line(log) if log.stat().st_size <= engine_logs.BYTES_MAX else ""

    async with running(driver := rig.driver()) as observed:
        driver.start(*replica("r1", python(flood + GOES_ON_TALKING + TINY_ENGINE, "{port}")))
        await observed.until(R1, Seen.READY)
        await until("it is small and has the newest", lambda: newest_of_little() == "and on")


def test_trimmed_log_keeps_its_newest_lines_complete(tmp_path: Path) -> None:
    log, lines = tmp_path / "r1.log", [f"{i} {'x' * 80}\n" for i in range(100_000)]
    log.write_text("".join(lines))
    engine_logs.trim_log(log)
    left = log.read_text().splitlines(keepends=True)
    assert left == lines[-len(left) :]
    assert engine_logs.KEPT_BYTES - len(lines[-1]) <= log.stat().st_size <= engine_logs.KEPT_BYTES


def test_engine_continues_to_log_after_its_driver_has_ended(rig: LocalRig) -> None:
    talks = python("import time\nfor i in range(3000): print(i, flush=True); time.sleep(0.02)")

    async def scenario() -> None:
        driver = rig.driver()
        async with running(driver):
            driver.start(*replica("r1", talks))

    rig.run(scenario())
    before = engine_logs.last_line(rig.state.log(R1))
    deadline_s = time.monotonic() + 60
    while engine_logs.last_line(rig.state.log(R1)) == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@run_on_rig
async def test_foreign_listener_on_the_port_never_makes_a_replica_ready(rig: LocalRig) -> None:
    async with running(driver := rig.driver()) as observed:
        driver.start(*replica("r1", python("import time; time.sleep(60)")))
        started = await observed.until(R1, Seen.STARTING)
        host, _, port = started.address.rpartition(":")
        server = await asyncio.start_server(says_yes, host, int(port))
        async with server:
            # The growth of its memory may be observed before, which has no reason.
            reasons = await until("it is noticed", lambda: [one.reason for one in observed.of(R1) if one.reason])
            assert reasons[0] == f"a foreign process listens on its port {port}"
        assert observed.words(R1) == ["starting"]


@run_on_rig
async def test_port_owner_is_checked_only_while_the_engine_loads(
    rig: LocalRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, looks, really_look = tmp_path / "loaded", list[str](), Readiness._is_its_own

    async def look(self: Readiness, engine: EngineProcess) -> bool:
        looks.append("loaded" if loaded.exists() else "loading")
        return await really_look(self, engine)

    monkeypatch.setattr(Readiness, "_is_its_own", look)
    answer = TINY_ENGINE.partition("    c.sendall(")[2].partition("\n")[0]
    status = f"(b'200 OK' if os.path.exists({str(loaded)!r}) else b'503 Loading')"
    loading = "import os\n" + TINY_ENGINE.replace(answer, f"b'HTTP/1.1 ' + {status} + b'\\r\\n\\r\\n')")
    async with running(driver := rig.driver()) as observed:
        driver.start(*replica("r1", python(loading, "{port}")))
        async with asyncio.timeout(60):
            while not looks:
                await asyncio.sleep(0.001)
        loaded.touch()
        await observed.until(R1, Seen.READY)
        assert looks == ["loading"]


@run_on_rig
async def test_hanging_engine_becomes_unready_and_delays_no_other_replica(
    rig: LocalRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hanging engine stays ready until the other one is, however slowly that starts."""
    hangs, failures_max = tmp_path / "hangs", probes.FAILURES_MAX
    monkeypatch.setattr(probes, "PROBE_SECONDS_MAX", 1.0)
    monkeypatch.setattr(probes, "FAILURES_MAX", 1 << 30)
    driver, r2 = rig.driver(), ReplicaId("r2")
    async with running(driver) as observed:
        driver.start(*replica("r1", python(TINY_ENGINE, "{port}")))
        driver.start(*replica("r2", python(once_there_is(hangs) + TINY_ENGINE, "{port}")))
        await observed.until(R1, Seen.READY)
        await until("the second runs, but for its port", lambda: rig.exists(r2))
        freeze(rig.main(R1))
        hangs.touch()
        await observed.until(r2, Seen.READY)
        assert observed.words(R1) == ["starting", "ready"], "the state is reported before three probes have failed"
        monkeypatch.setattr(probes, "FAILURES_MAX", failures_max)
        assert (await observed.until(R1, Seen.UNREADY)).reason == "3 probes in a row failed"
        os.kill(rig.main(R1), signal.SIGCONT)
        await observed.until(R1, Seen.READY, times=2)
        # It may be unready, if the machine pauses it, too.
        assert {*observed.words(r2)} <= {"starting", "ready", "unready"}


@run_on_rig
async def test_port_in_use_fails_the_start_and_the_next_gets_another_port(rig: LocalRig, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    async with running(driver := rig.driver()) as observed:
        driver.start(*replica("r1", python(once_there_is(taken) + TINY_ENGINE, "{port}")))
        port = int((await observed.until(R1, Seen.STARTING)).address.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)):
            taken.touch()
            exited = await observed.until(R1, Seen.EXITED)
            assert "Address already in use" in exited.reason
            driver.start(*replica("r2", python(TINY_ENGINE, "{port}")))
            ready = await observed.until(ReplicaId("r2"), Seen.READY)
            assert int(ready.address.rpartition(":")[2]) != port


@run_on_rig
async def test_exception_while_opening_devices_is_reported_and_retried(
    rig: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resilient_tasks, "PAUSE_S", 0.0)
    real, odd = Devices.open, iter([True])

    async def opened(self: Devices) -> tuple[Slice, ...]:
        if next(odd, False):
            raise KeyError("odd")
        return await real(self)

    monkeypatch.setattr(Devices, "open", opened)
    async with running(rig.driver()) as observed:
        await observed.synced()
        assert observed.slices().slices
        faults = [(one.part, bool(one.reason)) for one in observed.all if isinstance(one, FaultSeen)]
        assert faults[:2] == [("devices", True), ("devices", False)]


def test_exception_while_adopting_a_replica_stops_only_that_replica(
    rig: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first() -> None:
        async with running(driver := rig.driver()) as observed:
            for name in ("r1", "r2"):
                driver.start(*rig.replica(name, Manner.GOOD))
                await observed.until(ReplicaId(name), Seen.READY)

    rig.run(first())
    real = LocalDriver._recall

    def recall(self: LocalDriver, of: ReplicaRecord, found: Sequence[Facts]) -> EngineProcess:
        if of.id == R1 and of.pid:
            raise KeyError("odd")
        return real(self, of, found)

    monkeypatch.setattr(LocalDriver, "_recall", recall)

    async def second() -> None:
        async with running(rig.driver()) as observed:
            await observed.synced()
            assert observed.words(ReplicaId("r2")) == ["ready"]
            assert observed.words(R1)[-1] == "clean"
            (fault,) = [one for one in observed.all if isinstance(one, FaultSeen) and one.model]
            assert "KeyError" in fault.reason
            assert not rig.processes(R1)

    rig.run(second())

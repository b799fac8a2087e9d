"""A driver without free file descriptors does not infer exits, ends nothing, reports it once and continues."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers import resilient_tasks
from autoscaler.drivers.local.ports import has_open_socket
from autoscaler.drivers.local.proof_of_clean import kill_all
from autoscaler.drivers.local.replica_processes import (
    MARK,
    ProcessSelector,
    Reaper,
    find_processes,
    read_process,
    read_process_mark,
)
from autoscaler.drivers.probes import probe_engine
from autoscaler.state.events import Seen
from tests.support.harness.driver_events import running
from tests.support.harness.faults.descriptor_exhaustion import no_file_descriptors
from tests.support.harness.local_rig import INSTANCE, R1, TINY_ENGINE, LocalRig, python, replica

pytestmark = pytest.mark.standard

SLEEP = "import time; time.sleep(60)"
A_WHILE_S = 0.1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resilient_tasks, "TRY_EVERY_S", 0.01)
    monkeypatch.setattr(resilient_tasks, "_log", logging.getLogger("shortage"))
    resilient_tasks._log.addFilter(resilient_tasks.Seldom())


@pytest.fixture
def marked() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(python(SLEEP), env={MARK: R1}, start_new_session=True) as process:
        while read_process_mark(process.pid) != R1:
            time.sleep(0.001)
        yield process
        process.kill()


def test_process_lookup_raises_oserror_when_no_file_descriptor_is_free(marked: subprocess.Popen[bytes]) -> None:
    for look in (read_process, read_process_mark, lambda pid: has_open_socket((pid,), frozenset("1"))):
        with no_file_descriptors(), pytest.raises(OSError, match="Too many open files"):
            look(marked.pid)


async def test_process_scan_waits_until_a_file_descriptor_is_free(
    marked: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with no_file_descriptors():
        looks = [asyncio.create_task(find_processes(ProcessSelector(R1))) for _ in range(3)]
        await asyncio.sleep(A_WHILE_S)
        assert not any(look.done() for look in looks)
    for found, _ in await asyncio.gather(*looks):
        assert [one.pid for one in found] == [marked.pid]
    (line,) = caplog.messages
    assert line == "event=process_query_failed error=Too many open files"


async def test_process_cleanup_waits_until_a_file_descriptor_is_free(marked: subprocess.Popen[bytes]) -> None:
    reaper = Reaper(f"{INSTANCE}/")
    reaper.spare(marked.pid)
    with no_file_descriptors():
        clearer = asyncio.create_task(kill_all(ProcessSelector(R1), reaper, time.monotonic, pytest.fail))
        await asyncio.sleep(A_WHILE_S)
        assert not clearer.done()
        assert marked.poll() is None
    async with asyncio.timeout(60):
        await clearer
    assert marked.wait(60) == -signal.SIGKILL


async def test_health_probe_waits_while_no_file_descriptor_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, no_file_descriptors():
        asked = asyncio.create_task(probe_engine("127.0.0.1", listener.getsockname()[1], "/health"))
        await asyncio.sleep(A_WHILE_S)
        assert not asked.done()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


def test_engine_stop_completes_after_a_file_descriptor_shortage(tmp_path: Path) -> None:
    """No engine becomes unready because the driver cannot probe it."""
    rig, r1 = LocalRig(tmp_path), ReplicaId("r1")

    async def scenario() -> None:
        driver, (one, model) = rig.driver(), replica("r1", python(TINY_ENGINE, "{port}"))
        async with running(driver) as observed:
            driver.start(one, model)
            await observed.until(r1, Seen.READY)
            with no_file_descriptors():
                driver.stop(one, 0.0)
                await asyncio.sleep(5 * A_WHILE_S)
                assert observed.words(r1)[:2] == ["starting", "ready"]
                assert "clean" not in observed.words(r1)
            await observed.until(r1, Seen.CLEAN)
            assert "unready" not in observed.words(r1)
        assert not rig.processes(r1)

    try:
        rig.run(scenario())
    finally:
        rig.close()

"""Engines that other programs start or reach: systemd-run and a forward of ssh, both fake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler.state.events import Seen
from tests.contracts.driver import Manner
from tests.support.fakes.engines.fake_engine_process import command, fake_engine
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import LocalRig, replica
from tests.support.harness.scenarios import run_on_rig

pytestmark = pytest.mark.standard

SYSTEMD_RUN = """#!/bin/sh
[ "$1 $2" = "--user --scope" ] && shift 2 && exec "$@"
"""
"""Like the real one, it replaces itself by the command in a scope."""
SSH = f"""#!{Path(sys.executable).resolve()} -SE
import asyncio, sys
address, port, engine_address, engine_port = sys.argv[sys.argv.index("-L") + 1].split(":")
async def copy(source, sink):
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.close()
async def forward(reader, writer):
    inner, outer = await asyncio.open_connection(engine_address, int(engine_port))
    await asyncio.gather(copy(reader, outer), copy(inner, writer))
async def main():
    server = await asyncio.start_server(forward, address, int(port))
    await server.serve_forever()
asyncio.run(main())
"""
"""It listens on the forwarded port itself."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LocalRig]:
    rig = LocalRig(tmp_path)
    yield rig
    rig.close()


def install(folder: Path, name: str, source: str) -> str:
    """Write a program and return its path."""
    program = folder / name
    program.write_text(source)
    program.chmod(0o755)
    return str(program)


async def start_and_stop(rig: LocalRig, *words: str) -> None:
    """Start an engine by a command, wait until it is ready, and stop it."""
    one, model = replica("r1", words)
    async with running(driver := rig.driver()) as observed:
        assert driver.obstacle(model) == ""
        driver.start(one, model)
        await observed.until(one.id, Seen.READY)
        driver.stop(one, 5.0)
        assert (await observed.until(one.id, Seen.EXITED)).reason == "stopped"
        await observed.until(one.id, Seen.CLEAN)
        assert not rig.exists(one.id)


@run_on_rig
async def test_engine_of_systemd_run_with_scope_becomes_ready_and_stops(rig: LocalRig, tmp_path: Path) -> None:
    program = install(tmp_path, "systemd-run", SYSTEMD_RUN)
    await start_and_stop(rig, program, "--user", "--scope", *rig.replica("r1", Manner.GOOD)[1].spec.command)


@run_on_rig
async def test_systemd_run_without_scope_fails_with_an_error_that_names_the_fix(rig: LocalRig, tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = install(tmp_path, "systemd-run", f"#!/bin/sh\ntouch {started}\n")
    one, model = replica("r1", (program, "--user", *command("--port", "{port}")))
    async with running(driver := rig.driver()) as observed:
        driver.start(one, model)
        reason = (await observed.until(one.id, Seen.EXITED)).reason
        await observed.until(one.id, Seen.CLEAN)
    assert reason == driver.obstacle(model)
    assert reason.endswith("; add --scope")
    assert not started.exists()


@run_on_rig
async def test_ssh_forward_to_an_engine_becomes_ready_and_stops(rig: LocalRig, tmp_path: Path) -> None:
    program = install(tmp_path, "ssh", SSH)
    with fake_engine(tmp_path) as engine:
        target = engine.url.removeprefix("http://")
        await start_and_stop(rig, program, "-N", "-L", f"127.0.0.1:{{port}}:{target}", "gpu-host")

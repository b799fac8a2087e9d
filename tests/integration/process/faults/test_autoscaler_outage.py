"""Missing counterparts: a restarted gateway without an autoscaler, and `serve` when nothing reads its output."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.contract import LEADER_SILENT_S
from loadtest.result import Ending, Result
from pilotlight.processes.gateway import INFORMED_S_MAX
from tests.support.harness.faults.sigstop import freeze
from tests.support.harness.serve.serve import STOP_S, Serving, fake, serving, shot
from tests.support.net.ports import free_port
from tests.support.waiting import until

PIPE_BYTES = 4096


@asynccontextmanager
async def no_autoscaler(one: Serving, how: str) -> AsyncIterator[None]:
    """Disable the autoscaler in the context: it hangs, or exits at each start because its documents are broken."""
    if how == "hangs":
        autoscaler = one.autoscaler()
        freeze(autoscaler)
        try:
            yield
        finally:
            os.kill(autoscaler, signal.SIGCONT)
        return
    documents = one.state / "run" / "documents.yaml"
    good = documents.read_bytes()
    documents.write_text("broken")
    os.kill(one.autoscaler(), signal.SIGKILL)
    await until(
        "it died again",
        lambda: re.search("event=process_exited process=autoscaler .* reason='exit status 2'", one.output()),
    )
    try:
        yield
    finally:
        documents.write_bytes(good)
        await until("another one is there", one.answers)  # or one with broken documents gets the stop


async def kept_route(one: Serving) -> None:
    """Wait until the gateway has stored that a replica is ready."""
    kept = one.state / "run" / "gateway-1.kept.json"
    await until("the Route is kept", lambda: kept.exists() and b'"ready"' in kept.read_bytes())


async def replace_gateway(one: Serving) -> None:
    """Kill the gateway and wait until another process has replaced it."""
    before = one.gateways()["gateway-1"]
    os.kill(before, signal.SIGKILL)
    await until("it is replaced", lambda: one.gateways().get("gateway-1", before) != before)


def listed(url: str) -> list[str]:
    """Return the names of the models that clients see."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        return [entry["id"] for entry in json.load(response)["data"]]


def answers(ops: str) -> bool:
    """Return whether the operations port responds."""
    try:
        with urllib.request.urlopen(f"http://{ops}/healthz", timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def queued_s(result: Result) -> float:
    """Return the queue time that the gateway reports for the request."""
    found = re.search(r"queue;dur=([\d.]+)", result.headers["server-timing"])
    assert found is not None
    return float(found[1]) / 1000


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_restarted_gateway_serves_ready_models_without_an_autoscaler(tmp_path: Path, how: str) -> None:
    """The gateway need not detect the silent leader: the stored state contains no slot holds in any case."""
    async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0")) as one:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        await kept_route(one)
        async with no_autoscaler(one, how):
            await replace_gateway(one)
            result = await one.call("ada")
            assert result.ending is Ending.COMPLETED
            assert queued_s(result) < LEADER_SILENT_S, "without the time that the new process takes to start"
            assert "event=serving_from_snapshot models=1" in one.output()
            again = await one.send(*(shot("ada", stream=i % 2 == 0) for i in range(8)))
            assert {result.ending for result in again} == {Ending.COMPLETED}
        assert one.starts("ada") == 1


async def test_gateway_restarted_while_the_autoscaler_hangs_lists_all_models(tmp_path: Path) -> None:
    async with serving(tmp_path, fake(tmp_path, "ada"), fake(tmp_path, "bob")) as one:
        await until("it is kept", (one.state / "run" / "gateway-1.kept.json").exists)
        async with no_autoscaler(one, "hangs"):
            await replace_gateway(one)
            assert await asyncio.to_thread(listed, one.url) == ["ada", "bob"]


async def test_gateway_without_an_autoscaler_exits_on_sigterm(tmp_path: Path) -> None:
    """It does not wait for data from an autoscaler first."""
    ops = f"127.0.0.1:{free_port()}"
    words = ["gateway", "--autoscaler", f"unix:{tmp_path}/none.sock", "--listen", "127.0.0.1:0", "--ops", ops]
    with subprocess.Popen([sys.executable, "-m", "pilotlight", *words], stderr=subprocess.PIPE) as gateway:
        try:
            await until("it runs", lambda: answers(ops))
            gateway.terminate()
            output = (await asyncio.to_thread(gateway.communicate, timeout=STOP_S))[1]
            assert gateway.returncode == 0
            # A gateway that waited for so long before the test stopped it reports that.
            assert output in {b"", f"event=model_sync_timed_out timeout_s={INFORMED_S_MAX:g}\n".encode()}
        finally:
            gateway.kill()


def full_pipe() -> tuple[int, int]:
    """Return a full pipe (read end, write end): a write to it blocks."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"x" * PIPE_BYTES):
            pass
    os.set_blocking(writer, True)
    return reader, writer


async def start_into(one: Serving, stdout: int, stderr: int) -> None:
    """Start `serve` with these outputs; return once it responds and a gateway knows the models."""
    one.process = subprocess.Popen(one.argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)

    def knows_the_model() -> bool:
        try:
            return bool(one.reported_state("ada"))
        except OSError:
            return False

    await until("it answers", one.answers)
    await until("a gateway knows the Model", knows_the_model)


async def test_full_output_pipes_do_not_block_serve(tmp_path: Path) -> None:
    """Start, requests, replica transitions, a gateway's log messages and the stop must all work."""
    out, err = full_pipe(), full_pipe()
    async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0"), start=False) as one:
        await start_into(one, out[1], err[1])
        assert (await one.call("ada")).ending is Ending.COMPLETED
        await kept_route(one)
        async with no_autoscaler(one, "hangs"):
            await replace_gateway(one)
            assert (await one.call("ada")).ending is Ending.COMPLETED, "the line about what it serves from is lost"
        assert await one.stop() == 0
        assert one.marked() == []
    for fd in (*out, *err):
        os.close(fd)


async def test_closed_output_pipe_does_not_block_serve(tmp_path: Path) -> None:
    """Simulates `serve 2>&1 | head -1`."""
    reader, writer = os.pipe()
    async with serving(tmp_path, fake(tmp_path, "ada", "--tokens-per-s", "0"), start=False) as one:
        starting = asyncio.create_task(start_into(one, writer, writer))
        with os.fdopen(reader, "rb") as head:
            assert (await asyncio.to_thread(head.readline)).startswith(b"pilotlight: starting with 1 model,")
        os.close(writer)
        await starting
        assert (await one.call("ada")).ending is Ending.COMPLETED
        assert await one.stop() == 0
        assert one.marked() == []

"""Step `sharing`: two engines on one device, time-sliced and under MPS with memory limits; requests per second."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from loadtest.client import Client
from loadtest.result import Ending
from tests.gpu.bed import ENGINES, HOST, Bed, GpuRunError, call, listens, seen, shot
from tests.support.harness.serve.serve import Serving

CONTROL = "nvidia-cuda-mps-control"
NAMES = ("share-a", "share-b")
PROMPT_TOKENS, TOKENS, AT_ONCE = 2048, 4, 2
"""Long prompts and short answers: the GPU is the bottleneck, not Python."""
WORDS = ("--prompt-tokens", str(PROMPT_TOKENS), "--context-tokens", str(PROMPT_TOKENS + 64))
START_S, CLIENT_S = 20.0, 40.0
"""Time limits for the daemon to start, and for its first client, which starts its server."""
MEASURED_S = 15.0
"""Pilotlight measures an engine when it is ready and every 10 s."""
LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
LIMIT_BYTES, OVER_BYTES = 2 << 30, 3 << 30
"""The limit of a client, and the amount that it then tries to take."""


async def run(bed: Bed) -> None:
    """Run without the daemon, then with it."""
    await _measure(bed, "time-slicing", {})
    if shutil.which(CONTROL) is None:
        bed.report.row("sharing", "MPS", "skipped", "", f"{CONTROL} is not on the PATH")
    else:
        async with mps(bed) as env:
            if env is not None:
                await _limit_holds(bed, env)
                await _measure(bed, "MPS", env | {LIMIT: f"0={bed.need_bytes('large') >> 20}MB"})
    await _by_hand(bed)


@asynccontextmanager
async def mps(bed: Bed) -> AsyncIterator[dict[str, str] | None]:
    """The MPS daemon with its own pipes; yields the environment of its clients."""
    env = _environment(bed.folder)
    for path in env.values():
        Path(path).mkdir(parents=True)
    try:
        why = await asyncio.to_thread(_start, bed, env)
        if why:
            bed.report.row("sharing", "MPS", "skipped", "", why)
        bed.watch.mps = not why
        yield None if why else env
    finally:
        bed.watch.mps = False
        await asyncio.to_thread(end_daemon, bed.folder)


def _environment(folder: Path) -> dict[str, str]:
    own = folder / "mps"
    return {"CUDA_MPS_PIPE_DIRECTORY": str(own / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(own / "log")}


def _start(bed: Bed, env: dict[str, str]) -> str:
    """Start the daemon and a first client; return the reason if MPS is unavailable, empty otherwise.
    The daemon may keep its output open, so that goes to a file.
    """
    said = bed.folder / "mps" / "log" / "started.txt"
    with said.open("wb") as out:
        try:
            status = subprocess.run(
                [CONTROL, "-d"], env=os.environ | env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                timeout=START_S, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"the daemon does not start within {START_S:g} s"
    if status != 0:
        return f"the daemon cannot be started: {said.read_text(errors='replace').strip()[:120]}"
    try:
        refused = _allocate(bed, 1 << 20, env)
    except subprocess.TimeoutExpired:
        return f"a client of the daemon does not start within {CLIENT_S:g} s"
    return f"its server does not start: {refused}" if refused else ""


def _allocate(bed: Bed, size_bytes: int, env: dict[str, str]) -> str:
    """Take memory in a process of its own; return the reason if that is refused, empty otherwise."""
    tried = subprocess.run(
        [sys.executable, str(ENGINES / "allocate.py"), str(size_bytes), *(["--simulate"] if bed.simulated else [])],
        env=os.environ | env | {"CUDA_VISIBLE_DEVICES": bed.uuid}, capture_output=True, text=True, timeout=CLIENT_S,
        check=False,
    )  # fmt: skip
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["no reason"])[-1][:120]


def end_daemon(folder: Path) -> None:
    """Shut the daemon down; then kill it and its server if they are still running."""
    env = _environment(folder)
    pid_file = Path(env["CUDA_MPS_PIPE_DIRECTORY"]) / "nvidia-cuda-mps-control.pid"
    try:
        control = psutil.Process(int(pid_file.read_text()))
        both = [*control.children(recursive=True), control]
    except (OSError, ValueError, psutil.Error):
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([CONTROL], input=b"quit\n", env=os.environ | env, capture_output=True, timeout=10, check=False)
    _, alive = psutil.wait_procs(both, timeout=5)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


async def _limit_holds(bed: Bed, env: dict[str, str]) -> None:
    said = await asyncio.to_thread(_allocate, bed, OVER_BYTES, env | {LIMIT: f"0={LIMIT_BYTES >> 30}G"})
    refused = "out of memory" in said
    bed.report.figure(
        "sharing", f"MPS: 3 GiB over a limit of 2 GiB refused ({said})", float(refused), "1", holds=refused
    )


async def _measure(bed: Bed, how: str, env: dict[str, str]) -> None:
    seconds = 1.0 if bed.simulated else 2.5 if bed.quick else 4.0
    documents = [bed.model(name, "large", *WORDS) for name in NAMES]
    async with bed.serving(f"sharing-{how}", *documents, env=env) as serve:
        try:
            await asyncio.gather(*(call(serve.url, name) for name in NAMES))
        except GpuRunError:
            bed.tail(serve)
            raise
        if env:
            await _listed(bed, serve)
        rates = await _rates([(serve.url, name) for name in NAMES], seconds)
    _report(bed, how, *rates)
    ratio = rates.together / max(rates.alone)
    bed.report.figure("sharing", f"{how}: together over the faster alone", ratio, "reported", holds=None)


class Rates(NamedTuple):
    """Requests per second of each engine while the other is idle, and of both together."""

    alone: list[float]
    together: float


async def _rates(engines: list[tuple[str, str]], seconds: float) -> Rates:
    """`engines`: (URL, model) of each."""
    alone = [await _rate(url, name, seconds) for url, name in engines]
    return Rates(alone, sum(await asyncio.gather(*(_rate(url, name, seconds) for url, name in engines))))


def _report(bed: Bed, how: str, alone: list[float], together: float) -> None:
    for name, rate in zip(NAMES, alone, strict=True):
        bed.report.row("sharing", f"{how}: {name} alone", rate, "req/s")
    bed.report.row("sharing", f"{how}: both together, sum", together, "req/s")


async def _by_hand(bed: Bed) -> None:
    """The same engines without Pilotlight, time-sliced."""
    seconds = 1.0 if bed.simulated else 2.5
    with (
        bed.by_hand(NAMES[0], "large", *WORDS) as (first, first_port),
        bed.by_hand(NAMES[1], "large", *WORDS) as (second, second_port),
    ):
        await asyncio.gather(listens(first, first_port), listens(second, second_port))
        engines = [(f"http://{HOST}:{port}", name) for port, name in zip((first_port, second_port), NAMES, strict=True)]
        _report(bed, "by hand", *await _rates(engines, seconds))
    await bed.until_free([first.pid, second.pid])


async def _listed(bed: Bed, serve: Serving) -> None:
    """Report whether NVML lists clients of the daemon, on which proofs of free memory rely."""

    def measured() -> int:
        return sum(bool(record.gpu_pids) for record in serve.records())

    pids, look = serve.engines(), bed.watch.look()
    found = {pid: look.by_pid[pid] >> 20 for pid in pids if pid in look.by_pid}
    bed.report.row("sharing", "MPS clients that NVML lists", f"{len(found)} of {len(pids)}", "", f"MiB {found}")
    await seen(lambda: measured() == len(pids), MEASURED_S)
    bed.report.row("sharing", "MPS clients whose memory Pilotlight measures", f"{measured()} of {len(pids)}")


async def _rate(url: str, name: str, seconds: float) -> float:
    """Requests per second of a closed loop."""
    end_s, count = time.monotonic() + seconds, 0
    began_s = time.monotonic()

    async def loop() -> None:
        nonlocal count
        client = Client(url, reuse=True)
        with contextlib.closing(client):
            while time.monotonic() < end_s:
                result = await client.send(shot(name, tokens=TOKENS))
                if result.ending is not Ending.COMPLETED:
                    raise GpuRunError(f"a request for {name} ended as {result.ending} {result.code}")
                count += 1

    await asyncio.gather(*(loop() for _ in range(AT_ONCE)))
    return count / (time.monotonic() - began_s)

"""Step `misbehave`: engines that leak, exceed their claim, or leave a worker behind are detected and reported."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial

from tests.gpu.bed import Bed, GpuRunError, call, seen
from tests.support.harness.serve.serve import Serving

REPORTED_S = 25.0
"""Time limit for a report of excess memory: Pilotlight measures serving engines every 10 s."""
LEAKS = 5
SAYS = "event=device_memory_exceeded "
OUTLIVED = "event=engine_processes_outlived replica=orphan-"


async def run(bed: Bed) -> None:
    """Run three engines at the same time."""
    step, claim = (64, 512 << 20) if bed.simulated else (512, 0)
    documents = [
        bed.model("leaky", "small", "--leak-mib", str(step), memory_bytes=claim),
        bed.model("greedy", "small", "--excess-mib", str(8 * step), memory_bytes=claim),
        bed.model("orphan", "small", "--worker-mib", str(step), memory_bytes=claim),
    ]
    async with bed.serving("misbehave", *documents) as serve:
        for name in ("leaky", "greedy", "orphan"):
            await call(serve.url, name)
        began_s = time.time()
        needed = 2 * LEAKS if bed.simulated else LEAKS
        await asyncio.gather(_leak(serve, needed), _orphan(bed, serve))
        listed = bool({*serve.engines()} & bed.watch.look().by_pid.keys())
        for name in ("greedy", "leaky"):
            found = await seen(partial(_said, serve, name), REPORTED_S) if listed else ""
            after = time.time() - began_s
            value, holds = (float(bool(found)), bool(found)) if listed else (None, None)  # NVML lists no engine
            bed.report.figure("misbehave", f"{name}: reported", value, "1", holds=holds)
            bed.report.row("misbehave", f"{name}: reported after", after if found else None, "s", (found or "")[:160])


async def _leak(serve: Serving, times: int) -> None:
    for _ in range(times):
        await call(serve.url, "leaky")


async def _orphan(bed: Bed, serve: Serving) -> None:
    """Kill the engine; its worker, in a session of its own, must end before the next start."""
    (pid,) = serve.engines("orphan")
    if not await seen(lambda: len(_group(serve, pid)) > 1, 30.0):
        raise GpuRunError("the worker was not started")
    (worker,) = (one for one in _group(serve, pid) if one != pid)
    held = await seen(lambda: bed.watch.look().by_pid.get(worker, 0), 30.0)
    bed.report.row("misbehave", "orphan: memory of its worker", (held or 0) >> 20, "MiB")
    began_s = time.time()
    os.kill(pid, signal.SIGKILL)
    await seen(lambda: worker not in serve.marked(), 30.0)
    ended_s = time.time() - began_s
    await bed.until_free([pid, worker])
    bed.report.row("misbehave", "orphan: engine killed -> worker ended", ended_s, "s")
    await call(serve.url, "orphan")
    gone = worker not in serve.marked()
    bed.report.figure("misbehave", "orphan: its worker was ended", float(gone), "1", holds=gone)
    reported = OUTLIVED in serve.output()
    bed.report.figure("misbehave", "orphan: its worker was reported", float(reported), "1", holds=reported)


def _group(serve: Serving, pid: int) -> list[int]:
    """Processes with the mark of the replica that this main process belongs to."""
    from autoscaler.drivers.local.replica_processes import read_process_mark

    mark = read_process_mark(pid)
    return [one for one in serve.marked() if read_process_mark(one) == mark]


def _said(serve: Serving, name: str) -> str:
    """The line of `serve` that reports it for a Model."""
    lines = [line for line in serve.output().splitlines() if SAYS in line and f"{name}-" in line]
    return lines[0] if lines else ""

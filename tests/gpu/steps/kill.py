"""Step `kill`: SIGKILL an engine in the middle of streams; requests move or get one error, and it restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from loadtest.client import Client
from loadtest.result import Ending
from tests.gpu.bed import Bed, GpuRunError, call, listens, seen, shot

STREAMS, SLOTS = 4, 2
"""Two run in the engine and two wait when it is killed."""
SHARE = 0.6
"""Fraction of the device that it claims and takes: it cannot restart while its old memory is still held."""


async def run(bed: Bed) -> None:
    """Kill the engine when its slots are full."""
    tokens = 200
    words = ("--slots", "{slots}", "--memory-bytes", "{memory_bytes}")
    document = bed.model("killed", "medium", *words, memory_bytes=int(bed.device_bytes * SHARE), slots=SLOTS)
    async with bed.serving("kill", document) as serve:
        await call(serve.url, "killed")
        began_s = time.time()
        running = asyncio.create_task(Client(serve.url).run([shot("killed", tokens=tokens)] * STREAMS))
        if not await seen(lambda: serve.demand("killed").get("running", 0) >= SLOTS, 20.0):
            raise GpuRunError(f"the streams do not run: {serve.demand('killed')}")
        (pid,) = serve.engines("killed")
        await asyncio.sleep(0.1)  # so that tokens flow
        os.kill(pid, signal.SIGKILL)
        killed_s = time.time()
        results = await running
        await call(serve.url, "killed")
        if any(one.ending is Ending.LOST for one in results):
            bed.tail(serve)
    endings = {ending.value: sum(one.ending is ending for one in results) for ending in Ending}
    bed.report.row("kill", "endings of streams", endings, "", f"{SLOTS} ran, {STREAMS - SLOTS} waited")
    ended_s, freed_s = bed.watch.ended_s(pid), bed.watch.freed_s(pid)
    starts = [one for one in bed.phases(killed_s) if one.phase == "process"]
    tokens_s = [one for one in bed.phases(killed_s) if one.phase == "first token"]
    if not starts or not tokens_s:
        raise GpuRunError("the engine was not started again")
    if freed_s is not None:
        bed.report.row("kill", "SIGKILL -> memory free", freed_s - killed_s, "s")
    if ended_s is None:
        bed.report.say("kill       NVML did not list the engine after its end")
    bed.report.row("kill", "SIGKILL -> spawned again", starts[0].at_s - killed_s, "s")
    bed.report.row("kill", "SIGKILL -> first token", tokens_s[0].at_s - killed_s, "s")
    lost = endings["lost"] + endings["abandoned"]
    bed.report.figure("kill", "requests lost", float(lost), "0", holds=lost == 0)
    waiting = endings["completed"] >= STREAMS - SLOTS
    bed.report.figure("kill", "waiting requests answered", float(waiting), "1", holds=waiting)
    bed.reused_too_soon("kill", began_s)
    by_hand_s = bed.by_hand_free_s
    if by_hand_s is None and bed.watch.peak(pid):
        by_hand_s = await _by_hand_s(bed)
    what = "SIGKILL -> memory free, by hand"
    bed.report.row("kill", what, "not measured" if by_hand_s is None else by_hand_s, "" if by_hand_s is None else "s")


async def _by_hand_s(bed: Bed) -> float | None:
    """Seconds from the SIGKILL of an engine started without Pilotlight until NVML no longer lists it."""
    with bed.by_hand("killed", "medium") as (process, port):
        await listens(process, port)
        _, free_s = await bed.kill_by_hand(process)
    return free_s

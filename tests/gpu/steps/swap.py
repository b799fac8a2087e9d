"""Step `swap`: two models that do not fit together, both under load; every request is answered."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

from loadtest.client import Client
from loadtest.result import Ending
from tests.gpu import plots
from tests.gpu.bed import HOST, Bed, call, listens, shot

SHARE = 0.6
"""Fraction of the device that each of the two claims and takes."""
TURNS = 3
"""Minimum number of starts: the second model replaces the first, and the first returns."""


async def run(bed: Bed) -> None:
    """Open-loop load on both for some residencies; then plot the device memory over that time."""
    every_s, residency_s = (0.1, 0.5) if bed.simulated else (0.4, 3.0)
    lasts_s = load_s(bed, residency_s)
    claim = int(bed.device_bytes * SHARE)
    words = ("--memory-bytes", "{memory_bytes}", "--context-tokens", "1024")
    documents = [
        bed.model(name, weights, *words, memory_bytes=claim, residencySeconds=residency_s)
        for name, weights in (("swap-a", "large"), ("swap-b", "medium"))
    ]
    async with bed.serving("swap", *documents) as serve:
        began_s = time.time()
        shots = [
            shot(name, at_s=number * every_s)
            for number in range(int(lasts_s / every_s))
            for name in ("swap-a", "swap-b")
        ]
        results = await Client(serve.url).run(shots)
        lasted_s = time.time() - began_s
        if any(one.ending is not Ending.COMPLETED for one in results):
            bed.tail(serve)
    endings = {ending.value: sum(one.ending is ending for one in results) for ending in Ending}
    starts = bed.spawns(began_s)
    waits = [one.first_byte_s for one in results if one.first_byte_s is not None]
    say = bed.report.row
    say("swap", "requests", len(results))
    say("swap", "endings", endings)
    say("swap", "starts", len(starts))
    say("swap", "until the last answer", lasted_s, "s")
    say("swap", "longest wait for a first token", max(waits, default=0.0), "s")
    _gaps(bed, began_s)
    lost = len(results) - endings["completed"]
    bed.report.figure("swap", "requests lost", float(lost), "0", holds=lost == 0)
    turns = len(starts) >= TURNS
    bed.report.figure("swap", "starts, so that the models took turns", float(len(starts)), f">= {TURNS}", holds=turns)
    bed.reused_too_soon("swap", began_s)
    samples = bed.watch.since(began_s)[::5]
    marks = [(one.at_s - began_s, one.model) for one in starts]
    used = [(one.at_s - began_s, one.used_bytes / (1 << 30)) for one in samples]
    plots.lines(bed.folder / "swap.svg", "Memory in use while two models take turns", ("seconds", "GiB"),
                {"used, by NVML": used}, marks)  # fmt: skip
    say("swap", "swap by hand: engine killed -> first token of the other", await _by_hand_s(bed), "s")


def load_s(bed: Bed, residency_s: float) -> float:
    """Duration of the load: requests for the first model still arrive while the second one starts."""
    least_s = 4.0 if bed.simulated else 12.0 if bed.quick else 24.0
    return max(least_s, 2 * (bed.start_s + residency_s))


async def _by_hand_s(bed: Bed) -> float:
    """Seconds from the SIGKILL of one engine to the first token of the other, swapped manually."""
    with bed.by_hand("swap-a", "large") as (process, port):
        await listens(process, port)
        killed_s, bed.by_hand_free_s = await bed.kill_by_hand(process)
    with bed.by_hand("swap-b", "medium") as (process, port):
        await listens(process, port)
        await call(f"http://{HOST}:{port}", "swap-b")
        first_s = next(one.at_s for one in bed.phases(killed_s) if one.phase == "first token")
    await bed.until_free([process.pid])
    return first_s - killed_s


def _gaps(bed: Bed, began_s: float) -> None:
    """Times from the end of one engine until its memory is free, and to the start of the next."""
    starts, free, gaps, swaps = bed.spawns(began_s), list[float](), list[float](), list[float]()
    for before, after in pairwise(starts):
        ended_s, freed_s = bed.watch.ended_s(before.pid), bed.watch.freed_s(before.pid)
        if freed_s is None:
            continue
        if ended_s is not None:
            free.append(freed_s - ended_s)
        gaps.append(after.at_s - (ended_s or freed_s))
        first = next((one for one in bed.phases(after.at_s, after.model) if one.phase == "first token"), None)
        if first is not None:
            swaps.append(first.at_s - (ended_s or freed_s))
    if gaps:
        bed.report.row("swap", "engine ended -> next one spawned, median", statistics.median(gaps), "s")
    if swaps:
        bed.report.row("swap", "engine ended -> first token of the next, median", statistics.median(swaps), "s")
    if free:
        bed.report.row("swap", "engine ended -> memory free, longest", max(free), "s")

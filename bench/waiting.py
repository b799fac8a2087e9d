"""Memory of a waiting stream: 10,000 queued for a starting Model, and the maximum number at a silent engine.

One table, of the proportional set size (PSS) of the gateway: its growth per stream, including the body, after all have
arrived and at the end, after queued streams have got keep-alives. If one stream ends early, the run fails. Streams at
an engine need two open files each, so fewer may fit below the machine's limit.
"""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

from bench import engine, kit, streams
from bench.documents import Document, body, fake, key, settings, tenant
from bench.kit import KIB, MIB, Figures, say

STREAMS = 10_000
SPARE_FILES = 500
"""Open files of a gateway that are not streams."""
SETTLE_S = 2.0
AT_MOST_KIB = 8


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return kib_per_waiting: the worse of both, at the end."""
    hold_s = 10 if quick else 60
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    kit.title(f"waiting: streams of 1 KiB held for {hold_s} s, PSS of the gateway")
    if files < STREAMS + SPARE_FILES:
        say(f"kib_per_waiting is not measured: {STREAMS:,} connections need more than {files:,} open files (ulimit -n)")
        return {"kib_per_waiting": None}
    say(f"{'where':<10} {'streams':>8} {'idle MiB':>9} {'there MiB':>10} {'end MiB':>8} {'KiB each':>9} {'at end':>7}")
    silent = engine.document(place, "silent", slots=STREAMS)
    parked = fake("t", "--fail", "never-ready", queue={"callsMax": 2 * STREAMS})
    fit = min(STREAMS, (files - SPARE_FILES) // 2)
    kib = [
        await _held(place / "parked", parked, STREAMS, hold_s, ready=False),
        await _held(place / "silent", silent, fit, hold_s, ready=True),
    ]
    say(f"the higher of both values at the end: {max(kib):.2f} KiB per stream   (at most {AT_MOST_KIB})")
    return {"kib_per_waiting": max(kib)}


async def _held(place: Path, model: Document, count: int, hold_s: float, *, ready: bool) -> float:
    limits = settings(limits={"connectionsPerAddressMax": 2 * STREAMS})
    async with kit.serving(place, [limits, tenant("a"), model], core=kit.PROXY_CORE) as one:
        if ready:
            await one.model_ready("t", key("a"))
        await asyncio.sleep(SETTLE_S)
        before = kit.pss_bytes(one.gateways())
        made = await streams.connect(one.url, count)
        asked = streams.request(one.url, body("t", bytes_min=KIB))
        for number, stream in enumerate(made):
            stream.ask(asked)
            if number % streams.CONNECT_AT_ONCE == 0:
                await asyncio.sleep(0.01)
        await asyncio.sleep(SETTLE_S)
        there = kit.pss_bytes(one.gateways())
        await asyncio.sleep(hold_s - SETTLE_S)
        end = kit.pss_bytes(one.gateways())
        broken = [stream.broken for stream in made if not stream.running]
        if broken:
            raise kit.BenchError(f"{len(broken)} of {count} streams were not held: {broken[0]}")
        for stream in made:
            stream.leave()
    kib = [(pss - before) / count / KIB for pss in (there, end)]
    name = "engine" if ready else "parked"
    say(
        f"{name:<10} {count:>8,} {before / MIB:>9.1f} {there / MIB:>10.1f} {end / MIB:>8.1f}"
        f" {kib[0]:>9.2f} {kib[1]:>7.2f}"
    )
    return kib[1]

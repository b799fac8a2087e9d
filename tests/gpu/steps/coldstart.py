"""Step `cold`: from zero to the first token, through Pilotlight and manually, from the page cache and from disk."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tests.gpu import plots
from tests.gpu.bed import (
    Bed,
    cached_fraction,
    call,
    disk_bytes_per_s,
    drop_from_page_cache,
    listens,
    read_into_page_cache,
)
from tests.support.harness.serve.serve import Serving

RATIO_MAX = 1.3
MODEL = "large"
CACHED_MAX = 0.05
"""Fraction of the weights that may stay in memory in a start from disk."""
DISK_S_MAX = 60.0
"""Maximum time to read the weights twice from the disk: once by hand and once through Pilotlight."""

Prepare = Callable[[Path], None]


async def run(bed: Bed) -> None:
    """Rounds that alternate between both; then the limit that the cold start is compared with."""
    taken, began_s = _Taken(bed), time.time()
    document = bed.model("cold", MODEL, "--slots", "1", idleSeconds=0.2, residencySeconds=0)
    async with bed.serving("cold", document) as serve:
        for _ in range(1 if bed.quick else 2):
            await taken.both(serve, "page cache", read_into_page_cache)
        await taken.by_hand("no weights", "--empty")
        taken.report()
        bed.reused_too_soon("cold", began_s)
        if why := await asyncio.to_thread(no_disk, bed.weights(MODEL) / "model.safetensors"):
            bed.report.row("cold", "disk", "not measured", "", why)
        else:
            await taken.both(serve, "disk", drop_from_page_cache)
            taken.report_source("disk")


def no_disk(weights: Path) -> str:
    """Why a start from disk cannot be measured, with the fix; empty: it can be."""
    drop_from_page_cache(weights)
    cached = cached_fraction(weights)
    if cached > CACHED_MAX:
        return f"{cached:.0%} of the file stay in memory, as on tmpfs: name a disk with --work"
    rate = disk_bytes_per_s(weights)
    if 2 * weights.stat().st_size / rate > DISK_S_MAX:
        return f"the disk reads only {rate / 1e6:.0f} MB/s: name a faster one with --work"
    return ""


class _Taken:
    """Seconds to the first token by side and source of the weights, and the phases of the last start of each."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._weights = bed.weights(MODEL) / "model.safetensors"
        self._seconds: dict[str, list[float]] = {}
        self._phases: dict[str, dict[str, float]] = {}

    async def both(self, serve: Serving, source: str, prepare: Prepare) -> None:
        """One start manually, one through Pilotlight."""
        await asyncio.to_thread(prepare, self._weights)
        await self.by_hand(source)
        await asyncio.to_thread(prepare, self._weights)
        began_s = time.time()
        result = await call(serve.url, "cold")
        assert result.first_byte_s is not None
        self._note(f"Pilotlight, {source}", began_s, result.first_byte_s)
        self._bed.report.keep("cold", f"server timing, {source}", result.server_timing)
        await serve.zero("cold", 60.0)

    async def by_hand(self, source: str, *words: str) -> None:
        """The same command without Pilotlight."""
        began_s = time.time()
        with self._bed.by_hand("cold", MODEL, "--slots", "1", *words) as (process, port):
            await listens(process, port)
            await call(f"http://127.0.0.1:{port}", "cold")
            first_s = next(one.at_s for one in self._bed.phases(began_s) if one.phase == "first token")
        await self._bed.until_free([process.pid])
        self._note(f"by hand, {source}", began_s, first_s - began_s)

    def report(self) -> None:
        """Report the figure of the page cache and write the plot."""
        report, bed = self._bed.report, self._bed
        initialisation = self._median("by hand, no weights")
        copy_s = bed.weights_bytes[MODEL] / bed.copy_bytes_per_s if bed.copy_bytes_per_s else 0.0
        report.row("cold", "bytes / measured host-to-device rate", copy_s or "not measured", "s" if copy_s else "")
        report.row("cold", "the engine's own initialisation", initialisation, "s", "a start that reads no weights")
        ratio = self._median("Pilotlight, page cache") / max(copy_s, initialisation)
        holds = None if bed.simulated else ratio <= RATIO_MAX
        report.figure("cold", "page cache, over the larger of the two", ratio, f"<= {RATIO_MAX}", holds=holds)
        self.report_source("page cache")

    def report_source(self, source: str) -> None:
        """Compare both sides, and write the plot with the phases so far."""
        over = self._median(f"Pilotlight, {source}") - self._median(f"by hand, {source}")
        report = self._bed.report
        report.row("cold", f"{source}: Pilotlight beyond by hand", over, "s")
        report.keep("cold", "seconds", self._seconds)
        report.keep("cold", "phases", self._phases)
        plots.bars(self._bed.folder / "coldstart.svg", "Cold start, from zero to the first token", "s", self._phases)

    def _median(self, label: str) -> float:
        return statistics.median(self._seconds[label])

    def _note(self, label: str, began_s: float, seconds: float) -> None:
        parts, at_s = dict[str, float](), began_s
        for row in self._bed.phases(began_s, "cold"):
            parts["decide and spawn" if row.phase == "process" else row.phase] = max(0.0, row.at_s - at_s)
            at_s = row.at_s
        parts["to the client"] = max(0.0, began_s + seconds - at_s)
        self._seconds.setdefault(label, []).append(seconds)
        self._phases[label] = parts
        shown = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value >= 0.005)
        self._bed.report.row("cold", label, seconds, "s", shown)

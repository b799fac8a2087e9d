"""Step `cold`: from zero to the first token, through Pilotlight and by hand, from the page cache and from disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from tests.gpu import plots
from tests.gpu.bed import Bed, GpuRunError, call, drop_from_page_cache, listens, read_into_page_cache
from tests.kit.serving import Serving

RATIO_MAX = 1.3
MODEL = "large"

Bars = dict[str, dict[str, float]]


async def run(bed: Bed) -> None:
    """Rounds of both sides in turn; then the limit that the cold start is compared with."""
    rounds, weights = 1 if bed.quick else 2, bed.weights(MODEL) / "model.safetensors"
    took: dict[str, list[float]] = {}
    bars: Bars = {}
    read_into_page_cache(weights)
    document = bed.model("cold", MODEL, "--slots", "1", idleSeconds=0.2, residencySeconds=0)
    async with bed.serving("cold", document) as serve:
        for source, prepare, times in (("page cache", read_into_page_cache, rounds), ("disk", drop_from_page_cache, 1)):
            for _ in range(times):
                await _both(bed, serve, took, bars, source, lambda p=prepare: p(weights))
    await _by_hand(bed, took, bars, "no weights", "--empty")
    _figures(bed, took, bars)


async def _both(
    bed: Bed, serve: Serving, took: dict[str, list[float]], bars: Bars, source: str, prepare: Callable[[], None]
) -> None:
    prepare()
    await _by_hand(bed, took, bars, source)
    prepare()
    began_s, label = time.time(), f"Pilotlight, {source}"
    result = await call(serve.url, "cold")
    assert result.first_byte_s is not None
    took.setdefault(label, []).append(result.first_byte_s)
    bars[label] = _parts(bed, began_s, result.first_byte_s)
    bed.report.row("cold", label, result.first_byte_s, "s", _shown(bars[label]))
    bed.report.keep("cold", f"server timing, {source}", result.server_timing)
    await serve.zero("cold", 60.0)
    too_soon = bed.reused_too_soon(began_s)
    if too_soon:
        raise GpuRunError(f"{too_soon} starts over memory that was not free")


async def _by_hand(bed: Bed, took: dict[str, list[float]], bars: Bars, source: str, *words: str) -> None:
    began_s, label = time.time(), f"by hand, {source}"
    with bed.by_hand("cold", MODEL, "--slots", "1", *words) as (process, port):
        await listens(process, port)
        await call(f"http://127.0.0.1:{port}", "cold")
        seconds = next(one.at_s for one in bed.phases(began_s) if one.phase == "first token") - began_s
    await bed.stays_free([process.pid])
    took.setdefault(label, []).append(seconds)
    bars[label] = _parts(bed, began_s, seconds)
    bed.report.row("cold", label, seconds, "s", _shown(bars[label]))


def _parts(bed: Bed, began_s: float, seconds: float) -> dict[str, float]:
    """Phase -> seconds, from the moment at which the request was sent to the first byte at the client."""
    rows = bed.phases(began_s, "cold")
    parts, at_s = dict[str, float](), began_s
    for row in rows:
        parts["decide and spawn" if row.phase == "process" else row.phase] = max(0.0, row.at_s - at_s)
        at_s = row.at_s
    return parts | {"to the client": max(0.0, began_s + seconds - at_s)}


def _shown(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= 0.005)


def _figures(bed: Bed, took: dict[str, list[float]], bars: Bars) -> None:
    middle = {label: statistics.median(values) for label, values in took.items()}
    bed.report.keep("cold", "seconds", took)
    bed.report.keep("cold", "phases", bars)
    plots.bars(bed.folder / "coldstart.svg", "Cold start of a model, from zero to the first token", "s", bars)
    initialisation = middle["by hand, no weights"]
    copy_s = bed.weights_bytes[MODEL] / bed.copy_bytes_per_s if bed.copy_bytes_per_s else 0.0
    bed.report.row("cold", "bytes / measured host-to-device rate", copy_s, "s")
    bed.report.row("cold", "the engine's own initialisation", initialisation, "s", "a start that reads no weights")
    limit = max(copy_s, initialisation)
    ratio = middle["Pilotlight, page cache"] / limit
    holds = None if bed.simulated else ratio <= RATIO_MAX
    bed.report.figure("cold", "page cache, over the larger of the two", ratio, f"<= {RATIO_MAX}", holds=holds)
    for source in ("page cache", "disk"):
        over = middle[f"Pilotlight, {source}"] - middle[f"by hand, {source}"]
        bed.report.figure("cold", f"{source}: Pilotlight beyond by hand, s", over, "reported", holds=None)

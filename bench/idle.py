"""CPU time of `serve` with 100 Models at zero and no requests: all of its processes, over 20 s.

One figure, as the share of one core.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bench import kit
from bench.documents import Document, real, settings
from bench.kit import Figures, say

MODELS = 100
SPAN_S = 20.0
SETTLE_S = 5.0


async def measure(place: Path, weights: Path) -> Figures:
    """Return idle_cpu_core."""
    kit.title(f"idle: {MODELS} Models at zero, {SPAN_S:.0f} s, share of a core")
    documents: list[Document] = [settings(), *(real(f"m{number:03}", weights) for number in range(MODELS))]
    async with kit.serving(place / "idle", documents) as one:
        await asyncio.sleep(SETTLE_S)
        processes = one.processes()
        before = [kit.cpu_s([process]) for process in processes]
        began_s = time.monotonic()
        await asyncio.sleep(SPAN_S)
        took_s = time.monotonic() - began_s
        shares = [(kit.cpu_s([process]) - cpu_s) / took_s for process, cpu_s in zip(processes, before, strict=True)]
        names = [next((word for word in ("autoscaler", "gateway") if word in p.cmdline()), "serve") for p in processes]
    say("  ".join(f"{name} {share:.4f}" for name, share in zip(names, shares, strict=True)))
    say(f"all {sum(shares):.4f}   (at most 0.01)")
    return {"idle_cpu_core": sum(shares)}

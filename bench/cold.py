"""`make bench-cold`: cold starts, bursts, fairness, idleness and throughput of `pilotlight serve`, beside its peers.

Runs every part (or those named on the command line), each of which prints its table while it works, and prints as its
last line one JSON object (interfaces, section 10). `QUICK=1` takes fewer rounds of the same sizes, about 7 minutes.
Exits 0 when it ran to the end, whatever the figures.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench import burst, coldstart, fairness, idle, memory, starvation, throughput, wake
from bench.documents import SENTENCE
from bench.kit import Figures, say
from loadtest import tinygguf
from pilotlight import process

KEYS = (
    "overhead_ms_median", "burst_p99_ratio_direct", "overhead_ms_p95", "spawn_ms_p99", "first_send_ms_p99", "calls",
    "lost", "starts", "fair_releases_max", "starved_s_max", "kib_per_parked_call", "idle_cpu_core", "ratio_aiohttp",
    "llama_swap_overhead_ms_median",
)  # fmt: skip
"""Of the last line; a part that was not asked for leaves null."""

Part = Callable[[], Awaitable[Figures]]


def parts(place: Path, weights: Path, *, quick: bool) -> dict[str, Part]:
    """All parts by name, in the order in which they run."""
    return {
        "coldstart": lambda: coldstart.measure(place, weights, quick=quick),
        "wake": lambda: wake.measure(place, quick=quick),
        "burst": lambda: burst.measure(place, weights, quick=quick),
        "fairness": lambda: fairness.measure(place, quick=quick),
        "starvation": lambda: starvation.measure(place, quick=quick),
        "memory": lambda: memory.measure(place, quick=quick),
        "idle": lambda: idle.measure(place, weights),
        "throughput": lambda: throughput.measure(place, quick=quick),
    }


async def run(names: list[str], *, quick: bool) -> None:
    """Runs the named parts and prints all figures."""
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, {platform.platform()}"
    say(f"{machine}, Python {platform.python_version()}")
    figures: Figures = dict.fromkeys(KEYS)
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        place = Path(folder)
        weights = place / "tiny.gguf"
        tinygguf.make(weights, SENTENCE)
        for name, part in parts(place, weights, quick=quick).items():
            if not names or name in names:
                figures |= await part()
    say(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}))


def main() -> None:
    """Runs what the command line names."""
    names = [word for word in sys.argv[1:] if word != "--quick"]
    known = parts(Path(), Path(), quick=True)
    unknown = sorted(set(names) - known.keys())
    if unknown:
        sys.exit(f"bench-cold has no part {', '.join(unknown)}; it has {', '.join(known)}")
    process.run(run(names, quick="--quick" in sys.argv or os.environ.get("QUICK", "") not in {"", "0"}))


if __name__ == "__main__":
    main()

"""`make bench-cold`: cold starts, bursts, fairness, idle CPU and throughput of `pilotlight serve` and of its peers.

Runs all parts, or those named on the command line. Each part prints its table while it runs. The last line is one JSON
object (interfaces, section 10). `QUICK=1` uses fewer rounds of the same sizes, about 5 minutes. The exit status is 0 if
all parts ran to their end, whatever the figures.
"""

from __future__ import annotations

from pathlib import Path

from bench import burst, coldstart, fairness, idle, memory, parts, starvation, throughput, wake
from bench.documents import SENTENCE
from bench.kit import Figures
from loadtest import tiny_gguf

KEYS = (
    "overhead_ms_median", "burst_p99_ratio_direct", "overhead_ms_p95", "spawn_ms_p99", "first_send_ms_p99", "calls",
    "lost", "starts", "fair_releases_max", "starved_s_max", "kib_per_parked_call", "idle_cpu_core", "ratio_aiohttp",
    "llama_swap_overhead_ms_median",
)  # fmt: skip
"""The keys of the last line. The keys of a part that was not selected are null."""


async def _coldstart(place: Path, *, quick: bool) -> Figures:
    return await coldstart.measure(place, _weights(place), quick=quick)


async def _burst(place: Path, *, quick: bool) -> Figures:
    return await burst.measure(place, _weights(place), quick=quick)


async def _idle(place: Path, *, quick: bool) -> Figures:
    del quick  # already short
    return await idle.measure(place, _weights(place))


def _weights(place: Path) -> Path:
    """Create the weights of the tiny model."""
    path = place / "tiny.gguf"
    tiny_gguf.make_model(path, SENTENCE)
    return path


PARTS: dict[str, parts.Part] = {
    "coldstart": _coldstart,
    "wake": wake.measure,
    "burst": _burst,
    "fairness": fairness.measure,
    "starvation": starvation.measure,
    "memory": memory.measure,
    "idle": _idle,
    "throughput": throughput.measure,
}
"""The parts, in the order in which they run."""


if __name__ == "__main__":
    parts.main("cold", __doc__, KEYS, PARTS)

"""The command line of a benchmark that has parts: runs all, or those that are named, and tells the figures at the end.

Owns its words, the folder that each part gets, and the last line: one JSON object with every key (interfaces, section
10), null where no part gave it. `QUICK=1` takes fewer rounds of the same sizes. The exit status is 0 when every part
ran to its end, whatever the figures; one that cannot go on is said to have failed, and the others still run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bench.kit import BenchError, Figures, compiled, say
from pilotlight import process


class Part(Protocol):
    """One part: measures in an empty folder of its own, prints while it works, gives figures."""

    def __call__(self, place: Path, *, quick: bool) -> Awaitable[Figures]:
        """Runs it."""


def main(name: str, about: str | None, keys: Sequence[str], parts: Mapping[str, Part]) -> None:
    """Runs what the command line of `bench.NAME` says."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    parser.add_argument("part", nargs="*", help=f"{', '.join(parts)}; none named: all of them")
    parser.add_argument("--quick", action="store_true", help="as QUICK=1")
    asked = parser.parse_args()
    unknown = sorted(set(asked.part) - parts.keys())
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(parts)}")
    chosen = {part: one for part, one in parts.items() if not asked.part or part in asked.part}
    failed: list[str] = []
    process.run(run(keys, chosen, failed, quick=asked.quick or quick()))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def quick() -> bool:
    """Whether the environment asks for fewer rounds: `QUICK=1`, not `QUICK=0`."""
    return os.environ.get("QUICK", "") not in {"", "0"}


async def run(keys: Sequence[str], parts: Mapping[str, Part], failed: list[str], *, quick: bool) -> None:
    """Runs the parts and prints all figures. The names of those that could not go on are added to `failed`."""
    say(machine())
    figures: Figures = dict.fromkeys(keys)
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        for name, part in parts.items():
            place, begun_s = Path(folder) / name, time.monotonic()
            place.mkdir()
            try:
                figures |= await part(place, quick=quick)
            except (BenchError, OSError, ExceptionGroup) as error:  # the last two: what it measures is gone
                failed.append(name)
                say(f"{name} FAILED: {error!r}")
            say(f"({name}: {time.monotonic() - begun_s:.0f} s)")
    say(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}))


def machine() -> str:
    """What the figures were taken on. The empty turns tell builds of Python apart that their version does not."""
    begun_s = time.perf_counter()
    for _ in range(1_000_000):
        pass
    turns_ms = (time.perf_counter() - begun_s) * 1e3
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, {platform.platform()}\n"
        f"Python {platform.python_version()} of {sys.base_prefix}, {platform.python_compiler()}; "
        f"a million empty turns in {turns_ms:.0f} ms\n"
        f"gateway {'compiled' if compiled() else 'as source: make bench-... measures the one that users get'}"
    )

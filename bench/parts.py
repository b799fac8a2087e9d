"""The command line of a benchmark with parts: runs all, or the named ones, and prints the figures at the end.

The last line is one JSON object with every key (interfaces, section 10), null if no part returned it. `QUICK=1` uses
fewer rounds of the same sizes. The exit status is 0 if every part ran to its end, whatever the figures. A part that
cannot continue is reported as failed, and the others still run.
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
    """One part: measures in its own empty folder, prints while it runs, and returns figures."""

    def __call__(self, place: Path, *, quick: bool) -> Awaitable[Figures]:
        """Run the part."""


def main(name: str, about: str | None, keys: Sequence[str], parts: Mapping[str, Part]) -> None:
    """Run the parts on the command line of `bench.NAME`."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    parser.add_argument("part", nargs="*", help=f"{', '.join(parts)}; default: all of them")
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
    """Return whether the environment requests fewer rounds: `QUICK=1`, not `QUICK=0`."""
    return os.environ.get("QUICK", "") not in {"", "0"}


async def run(keys: Sequence[str], parts: Mapping[str, Part], failed: list[str], *, quick: bool) -> None:
    """Run the parts and print all figures. The names of parts that fail are added to `failed`."""
    say(machine())
    figures: Figures = dict.fromkeys(keys)
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        for name, part in parts.items():
            place, begun_s = Path(folder) / name, time.monotonic()
            place.mkdir()
            try:
                figures |= await part(place, quick=quick)
            except (BenchError, OSError, ExceptionGroup) as error:  # the last two: the measured process is gone
                failed.append(name)
                say(f"{name} FAILED: {error!r}")
            say(f"({name}: {time.monotonic() - begun_s:.0f} s)")
    say(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}))


def machine() -> str:
    """Describe the machine. The time of empty loop iterations distinguishes builds of Python with the same version."""
    begun_s = time.perf_counter()
    for _ in range(1_000_000):
        pass
    turns_ms = (time.perf_counter() - begun_s) * 1e3
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, {platform.platform()}\n"
        f"Python {platform.python_version()} of {sys.base_prefix}, {platform.python_compiler()}; "
        f"a million empty loop iterations in {turns_ms:.0f} ms\n"
        f"gateway {'compiled' if compiled() else 'as source: make bench-... measures the one that users get'}"
    )

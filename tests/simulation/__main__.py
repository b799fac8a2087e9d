"""Replays seeds: `python -m tests.simulation SEED [SEED ...]` or `FIRST-LAST`; `--trace` prints the notes, too.

A note is a virtual second and an event; the hash at the end of a run covers all its notes.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.scenario import play


def seeds(text: str) -> range:
    """`7` or `1-200`. Raises ValueError."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    """Exit status 1 if a seed violates an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seeds", nargs="+", type=seeds, metavar="SEED", help="one, or FIRST-LAST")
    parser.add_argument("--trace", action="store_true", help="print the notes of each run, too")
    asked = parser.parse_args()
    failed = 0
    for seed in (seed for some in asked.seeds for seed in some):
        began_s = time.perf_counter()
        result = play(seed, print) if asked.trace else play(seed)
        took_s = time.perf_counter() - began_s
        print(
            f"seed {seed}: {result.calls} calls, {result.completed} completed, {result.full} found a full queue, "
            f"{result.starts} starts, trace {result.trace[:12]}, {took_s:.2f} s"
        )
        for line in result.broken[:10]:
            print(f"  {line}")
        failed += bool(result.broken)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Replays seeds: `python -m tests.sim SEED [SEED ...]`, or `python -m tests.sim FIRST-LAST`."""

from __future__ import annotations

import sys
import time

from tests.sim.scenario import play


def main() -> int:
    """Exit status 1 when a seed breaks something."""
    failed = 0
    for text in sys.argv[1:]:
        first, _, last = text.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            began_s = time.perf_counter()
            result = play(seed)
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

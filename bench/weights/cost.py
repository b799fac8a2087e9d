"""The cost of this process since a point in time: duration, CPU time, and its maximum memory. I/O.

Has the output format of the benchmark's processes: one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


class Cost:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._begun_s, self._begun_cpu_s = time.perf_counter(), time.process_time()

    def report(self, **more: object) -> None:
        """Print the cost to stdout, with `more`."""
        cost = {
            "wall_s": time.perf_counter() - self._begun_s,
            "cpu_s": time.process_time() - self._begun_cpu_s,
            "rss_mib": _largest_mib(),
        }
        sys.stdout.write(json.dumps(cost | more))


def _largest_mib() -> float:
    """Return the maximum memory of this program. `getrusage` may return that of the parent program."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

"""What this process has cost since a moment: time, CPU, and its largest memory. I/O.

Owns the form in which the processes of the bench tell it: one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


class Cost:
    """From now on."""

    def __init__(self) -> None:
        self._begun_s, self._begun_cpu_s = time.perf_counter(), time.process_time()

    def tell(self, **more: object) -> None:
        """Onto stdout; `more` comes beside it."""
        cost = {
            "wall_s": time.perf_counter() - self._begun_s,
            "cpu_s": time.process_time() - self._begun_cpu_s,
            "rss_mib": _largest_mib(),
        }
        sys.stdout.write(json.dumps(cost | more))


def _largest_mib() -> float:
    """Of this program; what `getrusage` says may be that of the one which started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

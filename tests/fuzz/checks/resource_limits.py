"""Limits on CPU time and memory of one input, cheap enough to check after each input.

Memory is the peak of the resident set of this process since the last reset, as Linux counts it (`VmHWM`); on other
systems only the time is checked. Reading the peak costs microseconds; allocations are not traced.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

CPU_S_MAX: Final = 2.0
"""Per input, on a machine that runs a million empty loop turns in 10 ms; more on a slower one."""
MEMORY_BYTES_MAX: Final = 64 << 20
"""Per input, above the resident set before it."""
INPUTS_PER_RESET: Final = 200
"""Caches grow: the resident set before an input is measured again after this many inputs."""

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SIZES = re.compile(rb"VmHWM:\s+(\d+) kB\s+VmRSS:\s+(\d+) kB")


class LimitError(AssertionError):
    """An input exceeded its limit of time or memory."""


def peak_bytes() -> int:
    """The largest resident set since the last reset; 0 if unknown."""
    return _sizes()[0]


def reset_peak() -> int:
    """Reset the peak. Returns the current resident set; 0 if unknown."""
    try:
        _RESET.write_bytes(b"5")
    except OSError:
        return 0
    return _sizes()[1]


def slowness() -> float:
    """The time of a million empty loop turns divided by 10 ms; at least 1."""
    began_s = time.thread_time()
    for _ in range(1_000_000):
        pass
    return max(1.0, (time.thread_time() - began_s) / 0.01)


def _sizes() -> tuple[int, int]:
    """(peak, current)."""
    try:
        found = _SIZES.search(_STATUS.read_bytes())
    except OSError:
        found = None
    return (0, 0) if found is None else (int(found[1]) << 10, int(found[2]) << 10)


class Limited:
    """A target that also raises LimitError."""

    def __init__(
        self, one_input: Callable[[bytes], None], *,
        cpu_s_max: float = CPU_S_MAX, memory_bytes_max: int = MEMORY_BYTES_MAX,
    ) -> None:  # fmt: skip
        self._one_input = one_input
        self._cpu_s_max = cpu_s_max
        self._memory_bytes_max = memory_bytes_max
        self._inputs = 0
        self._before_bytes = 0

    def __call__(self, data: bytes) -> None:
        """Run the target on one input."""
        if self._inputs % INPUTS_PER_RESET == 0:
            self._before_bytes = reset_peak()
        self._inputs += 1
        began_s = time.thread_time()
        self._one_input(data)
        took_s = time.thread_time() - began_s
        if took_s > self._cpu_s_max and took_s > (most_s := self._cpu_s_max * slowness()):
            raise LimitError(f"{len(data)} bytes took {took_s:.1f} s of CPU; at most {most_s:.1f} s are allowed")
        if self._before_bytes and (took := peak_bytes() - self._before_bytes) > self._memory_bytes_max:
            self._inputs = 0
            most = self._memory_bytes_max >> 20
            raise LimitError(f"{len(data)} bytes took {took >> 20} MiB; at most {most} MiB are allowed")

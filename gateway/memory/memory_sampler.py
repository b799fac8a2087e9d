"""Samples a gateway's memory and returns free allocator pages to the kernel. I/O: uses `gateway.memory.process_memory`.

Decides when to trim, and what counts as used: the resident set, unless the accounted bytes show that most of it is only
kept by the allocator. Trimming takes no noticeable share of the loop's time. Without a limit there is no pressure.
"""

from __future__ import annotations

import math
import time

from gateway.dispatch.memory_pressure import Pressure, compute_pressure, estimate_used_bytes
from gateway.memory import process_memory

ENOUGH_SHARE = 0.5
"""Below this share of the limit, or without a limit, memory that the allocator keeps is not trimmed."""
GROWTH_BYTES = 16 << 20
"""Growth since the last trim after which it is tried again."""
GIVE_BACK_S_MIN = 1.0
"""Minimum seconds between two trims."""
GIVE_BACK_SHARE = 0.01
"""Maximum share of the time spent on trimming."""


class MemoryGuard:
    """The memory of one process; `limit_bytes` is its limit."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self._enough_bytes = limit_bytes * ENOUGH_SHARE if limit_bytes else math.inf
        self._base_bytes: int | None = None
        """Resident set when idle."""
        self._least_bytes = 0
        """Minimum since the last trim."""
        self._due_s = 0.0

    def weigh(self, now_s: float, counted_bytes: int, before: Pressure) -> Pressure:
        """Return the current pressure step. `counted_bytes`: twice the bytes of bodies, connections and requests."""
        resident = process_memory.resident_bytes()
        if resident is None:
            return before
        self._least_bytes = min(self._least_bytes or resident, resident)
        grown = resident > self._least_bytes + GROWTH_BYTES and resident > self._enough_bytes
        if now_s >= self._due_s and (before or grown):
            resident = self._give_back(now_s) or resident
        if self._base_bytes is None or (not counted_bytes and not before):
            self._base_bytes = resident
        if self.limit_bytes is None:
            return before
        return compute_pressure(
            estimate_used_bytes(resident, self._base_bytes, counted_bytes), self.limit_bytes, before
        )

    def _give_back(self, now_s: float) -> int | None:
        begun_s = time.perf_counter()
        process_memory.give_back(0)
        took_s = time.perf_counter() - begun_s
        self._due_s = now_s + max(GIVE_BACK_S_MIN, took_s / GIVE_BACK_SHARE)
        resident = process_memory.resident_bytes()
        self._least_bytes = resident or 0
        return resident

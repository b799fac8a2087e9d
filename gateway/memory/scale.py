"""Weighs one gateway's memory, and gives back what the allocator keeps. Shell: calls `gateway.memory.guard` and takes
time.

Owns when memory is given back, and what is taken for used: the resident set, unless what we count says that most of it
is only kept. Promises: giving back takes no noticeable share of the loop's time. Without a limit there is no pressure.
"""

from __future__ import annotations

import math
import time

from gateway.dispatch.memory_pressure import Pressure, compute_pressure, estimate_used_bytes
from gateway.memory import guard

ENOUGH_SHARE = 0.5
"""Up to so much of the limit, and where there is none, the allocator may keep what it has."""
GROWTH_BYTES = 16 << 20
"""Grown by so much since memory was last given back: it is tried again."""
GIVE_BACK_S_MIN = 1.0
"""Not sooner than so long after the last time,"""
GIVE_BACK_SHARE = 0.01
"""and never for more of the time than this."""


class MemoryGuard:
    """One process's memory; `limit_bytes` is what it may have."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self._enough_bytes = limit_bytes * ENOUGH_SHARE if limit_bytes else math.inf
        self._base_bytes: int | None = None
        """What it had when nobody was here."""
        self._least_bytes = 0
        """The least since memory was last given back."""
        self._due_s = 0.0

    def weigh(self, now_s: float, counted_bytes: int, before: Pressure) -> Pressure:
        """The step now. `counted_bytes`: twice what bodies, connections and Calls take."""
        resident = guard.resident_bytes()
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
        guard.give_back(0)
        took_s = time.perf_counter() - begun_s
        self._due_s = now_s + max(GIVE_BACK_S_MIN, took_s / GIVE_BACK_SHARE)
        resident = guard.resident_bytes()
        self._least_bytes = resident or 0
        return resident

"""Load shedding when a gateway's memory runs short: first no cold requests, then none at all. Pure.

Defines the steps, comparable to Envoy's overload manager:
https://www.envoyproxy.io/docs/envoy/latest/configuration/operations/overload_manager. Running requests are never
killed. The memory figures are passed in by the caller.
"""

from __future__ import annotations

from enum import IntEnum

COLD_SHARE, ALL_SHARE = 0.8, 0.9
"""Shares of the limit: above the first no request may wait for a start, above the second none is accepted."""
RELIEF_SHARE = 0.05
"""Hysteresis: a step ends only this far below its threshold."""


class Pressure(IntEnum):
    """Memory pressure step."""

    NONE = 0
    NO_COLD = 1
    NO_CALLS = 2


def estimate_used_bytes(resident_bytes: int, base_bytes: int, counted_bytes: int) -> int:
    """Estimate the memory in use from the resident set, without memory that was freed but is kept by the allocator.
    `counted_bytes`: twice the accounted bytes, since not everything is accounted; `base_bytes`: resident set when idle.
    """
    return min(resident_bytes, base_bytes + counted_bytes)


def compute_pressure(used_bytes: int, limit_bytes: int, before: Pressure) -> Pressure:
    """Return the step for this memory use."""
    share = used_bytes / limit_bytes
    now = Pressure((share >= COLD_SHARE) + (share >= ALL_SHARE))
    if now < before:
        eased = share + RELIEF_SHARE
        now = Pressure((eased >= COLD_SHARE) + (eased >= ALL_SHARE))
    return now

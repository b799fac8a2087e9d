"""What a gateway still takes when its memory runs short: first no cold Calls, then none at all. Pure.

Owns the steps, which every proxy in front of engines needs in some form (Envoy calls it overload:
https://www.envoyproxy.io/docs/envoy/latest/configuration/operations/overload_manager); what runs is never killed for
it. It must not know where the numbers come from.
"""

from __future__ import annotations

from enum import IntEnum

COLD_SHARE, ALL_SHARE = 0.8, 0.9
"""Of the limit: above the first no Call may park for a start, above the second none is taken."""
RELIEF_SHARE = 0.05
"""A step is left only this far below where it began, so that it does not flicker."""


class Pressure(IntEnum):
    """How short memory is."""

    NONE = 0
    NO_COLD = 1
    NO_CALLS = 2


def estimate_used_bytes(resident_bytes: int, base_bytes: int, counted_bytes: int) -> int:
    """What is used of the resident set. The allocator may keep what was freed: where nearly nothing is counted, that is
    no reason to refuse. `counted_bytes` counts twice over, for there is more than we count; `base_bytes` is what the
    process had when nobody was here.
    """
    return min(resident_bytes, base_bytes + counted_bytes)


def compute_pressure(used_bytes: int, limit_bytes: int, before: Pressure) -> Pressure:
    """The step at so much memory in use."""
    share = used_bytes / limit_bytes
    now = Pressure((share >= COLD_SHARE) + (share >= ALL_SHARE))
    if now < before:
        eased = share + RELIEF_SHARE
        now = Pressure((eased >= COLD_SHARE) + (eased >= ALL_SHARE))
    return now

"""Leases that leave, since when, and which of them do not go: told from one World to the next. Pure.

A Lease says when it was ordered to go last, not first, and who follows ordered nothing: so whoever counts them
(metrics) or tells of them (Events) has one `Leaving` that sees every World. What somebody is on is waited for, and is
not stuck.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from autoscaler.state.leases import Capacity, Lease, LeaseId

STUCK_S: Final = 300.0
"""A fabric lets go of a GPU in seconds, a cloud of a machine in some minutes, and by then the order was given seven
times: what is there after so long a person has to look at. The alert has the same number."""


def leaves(lease: Lease) -> bool:
    """It was ordered to go, or its provider takes it away."""
    return lease.leaving or (lease.listed is not None and lease.listed.phase == "leaving")


class Leaving:
    """Call `look` with every World."""

    def __init__(self) -> None:
        self._since_s: Mapping[LeaseId, float] = {}
        self._now_s = 0.0

    def look(self, capacity: Capacity, now_s: float) -> None:
        """Takes what there is now."""
        before = self._since_s
        self._since_s = {
            id: before.get(id, now_s) for id, one in capacity.leases.items() if leaves(one) and not one.in_use
        }
        self._now_s = now_s

    def longest_s(self) -> Mapping[str, float]:
        """By provider that has any: for how long the one that leaves longest does."""
        found: dict[str, float] = {}
        for id, since_s in self._since_s.items():
            found[id.provider] = max(found.get(id.provider, 0.0), self._now_s - since_s)
        return found

    def stuck(self) -> frozenset[LeaseId]:
        """Those that have left for longer than STUCK_S and are still there."""
        return frozenset(id for id, since_s in self._since_s.items() if self._now_s - since_s > STUCK_S)

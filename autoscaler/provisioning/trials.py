"""Offers that are tried for those who lack room, so many in one Plan. Pure.

Owns how that work is shared out: what labels, taints or numbers tell costs nothing, each question is asked once, and
each kind of Want has its share of the others. So who fits on nothing, first in line and in all Plans, takes nobody the
Offers that would do for them.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoscaler.placement.model.types import Force, Want
from autoscaler.placement.tryout import Ground, devices_for
from autoscaler.provisioning.offer_filter import devices_by_node, suits
from autoscaler.state.leases import Offer, OfferId
from autoscaler.state.world import NodeId

TRIALS_MAX = 256
"""In one Plan, together; of the best first, so those that it does not come to would be worse."""


def alike(want: Want) -> Want:
    """What it has in common with those that have room where it has, and wait as long."""
    return want._replace(ordinal=0, unserved_since_s=0.0, reason="", force=Force.NONE, begins_s=0.0)


class Trials:
    """One Plan's. `wants`: those that Offers may be tried for."""

    def __init__(self, ground: Ground, wants: Iterable[Want]) -> None:
        self._ground = ground
        self._left, self._shares = TRIALS_MAX, dict[Want, int]()
        self._kinds = len(set(map(alike, wants)))
        self._known: dict[tuple[Want, OfferId, int], int | None] = {}
        self._there = devices_by_node(ground.world)

    def devices(self, want: Want, offer: Offer) -> int | None:
        """The fewest of the Offer with which it has room; None: no number does, or there is no time to find out."""
        kind = alike(want)
        key = kind, offer.id, offer.devices_max
        if key not in self._known:
            tried = suits(want, offer, self._there.get(NodeId(offer.node), 0)) and self._may(kind)
            self._known[key] = devices_for(self._ground, want, offer) if tried else None
        return self._known[key]

    def _may(self, kind: Want) -> bool:
        """What kinds before it did not use is shared out among those that are left."""
        if kind not in self._shares:
            self._shares[kind] = -(-self._left // max(1, self._kinds - len(self._shares)))
        may = self._shares[kind] > 0 and self._left > 0
        self._shares[kind] -= may
        self._left -= may
        return may

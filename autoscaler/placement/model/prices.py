"""Hourly device prices from the `prices` of the Settings. Pure.

A node's capacity type is read from its labels. The price of a device is the first entry for its product and that type,
else the on-demand entry, as an upper bound, else the first entry of any type. A device without an entry is owned: it
has no marginal cost. All amounts are in one currency.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from autoscaler.spec.settings import Price
from autoscaler.state.capacity import Bought
from autoscaler.state.world import Slice

SAID: Mapping[str, Bought] = {
    "on-demand": "on-demand", "spot": "spot", "reserved": "reserved", "committed": "committed", "flex": "flex",
}  # fmt: skip
CLASSES: tuple[tuple[str, Mapping[str, Bought]], ...] = (
    ("pilotlight.dev/class", SAID),
    ("karpenter.sh/capacity-type", {"spot": "spot", "on-demand": "on-demand", "reserved": "reserved"}),
    ("cloud.google.com/gke-flex-start", {"true": "flex"}),
    ("cloud.google.com/gke-spot", {"true": "spot"}),
    ("cloud.google.com/gke-preemptible", {"true": "spot"}),
    ("eks.amazonaws.com/capacityType", {"on_demand": "on-demand", "spot": "spot", "capacity_block": "reserved"}),
    ("kubernetes.azure.com/scalesetpriority", {"regular": "on-demand", "spot": "spot"}),
)
"""Node label -> lower-case value -> capacity type, as documented by the provisioners that add nodes. The operator's own
label comes first, because committed capacity is on-demand by the cloud's labels."""


def read_capacity_type(labels: Mapping[str, str]) -> Bought:
    """Return the capacity type of a node with these labels; on-demand if they do not state one."""
    return next((said[one] for label, said in CLASSES if (one := labels.get(label, "").lower()) in said), "on-demand")


class Prices:
    """Prices by product and capacity type, cached: there are many slices but few products."""

    def __init__(self, entries: Sequence[Price]) -> None:
        self.entries = tuple(entries)
        self._known: dict[tuple[str, Bought], float] = {}

    def of(self, slice_: Slice) -> float:
        """Return the price per hour of its whole device; 0: it is owned."""
        if not self.entries:
            return 0.0
        return self.at(slice_.product, read_capacity_type(slice_.labels))

    def at(self, product: str, bought: Bought) -> float:
        """Return the price per hour of a device of that capacity type; 0: no entry names it."""
        key = product.lower(), bought
        if key not in self._known:
            self._known[key] = self._price(*key)
        return self._known[key]

    def _price(self, product: str, bought: Bought) -> float:
        named = [entry for entry in self.entries if _names(entry.device.lower(), product)]
        of: dict[Bought, float] = {entry.bought: entry.per_hour for entry in reversed(named)}
        return of.get(bought, of.get("on-demand", named[0].per_hour if named else 0.0))


def _names(device: str, product: str) -> bool:
    """Whether `device`, a glob or some words of the product name, matches: `T4` names `Tesla-T4-SHARED`."""
    if any(mark in device for mark in "*?["):
        return fnmatchcase(product, device)
    words, all_words = (re.sub(r"[^a-z0-9]+", " ", name).strip() for name in (device, product))
    return bool(words) and f" {words} " in f" {all_words} "

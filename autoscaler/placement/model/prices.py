"""What an hour of a Device costs, by the Settings' `prices`. Pure.

Owns how a node was bought, by its labels, and which entry is a Device's: the first that names its product, of that
class, else of on-demand (a spot market that nobody gave a price for costs no less), else of any. What no entry names is
owned: it costs nothing at the margin, whoever uses it. Amounts are of one currency.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from autoscaler.spec.settings import Price
from autoscaler.state.capacity_orders import Bought
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
"""Labels of nodes, in small letters what they say -> the class, as those who add the nodes document them; the
first is who runs the cluster: what was committed to is on demand to the cloud's labels."""


def read_capacity_type(labels: Mapping[str, str]) -> Bought:
    """How a node was bought that has these labels; on-demand where they do not say."""
    return next((said[one] for label, said in CLASSES if (one := labels.get(label, "").lower()) in said), "on-demand")


class Prices:
    """Answers are kept: few products are asked for many Slices."""

    def __init__(self, entries: Sequence[Price]) -> None:
        self.entries = tuple(entries)
        self._known: dict[tuple[str, Bought], float] = {}

    def of(self, slice_: Slice) -> float:
        """Per hour, of its whole Device; 0: it is owned."""
        if not self.entries:
            return 0.0
        return self.at(slice_.product, read_capacity_type(slice_.labels))

    def at(self, product: str, bought: Bought) -> float:
        """Per hour, of a Device that is bought so; 0: nobody says."""
        key = product.lower(), bought
        if key not in self._known:
            self._known[key] = self._price(*key)
        return self._known[key]

    def _price(self, product: str, bought: Bought) -> float:
        named = [entry for entry in self.entries if _names(entry.device.lower(), product)]
        of: dict[Bought, float] = {entry.bought: entry.per_hour for entry in reversed(named)}
        return of.get(bought, of.get("on-demand", named[0].per_hour if named else 0.0))


def _names(device: str, product: str) -> bool:
    """A glob over the product, or some of its words: `T4` names `Tesla-T4-SHARED`."""
    if any(mark in device for mark in "*?["):
        return fnmatchcase(product, device)
    words, all_words = (re.sub(r"[^a-z0-9]+", " ", name).strip() for name in (device, product))
    return bool(words) and f" {words} " in f" {all_words} "

"""What an hour of a Device costs, by the Settings' `prices`. Pure.

Owns which entry is a Device's: the first that names its product, of the class that its node's labels tell, else of any
class. What no entry names is owned: it costs nothing at the margin, whoever uses it. Amounts are of one currency.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from autoscaler.settings import Price
from autoscaler.world import Slice

CLASS_LABELS = (
    "karpenter.sh/capacity-type", "cloud.google.com/gke-spot", "eks.amazonaws.com/capacityType",
    "kubernetes.azure.com/scalesetpriority",
)  # fmt: skip
"""Of nodes: how they were bought, as those who add them say it."""
SAID = {"spot": "spot", "on-demand": "on-demand", "on_demand": "on-demand", "reserved": "reserved",
        "true": "spot", "regular": "on-demand"}  # fmt: skip
"""What these labels say, in small letters -> the class."""


class Prices:
    """Answers are kept: few products are asked for many Slices."""

    def __init__(self, entries: Sequence[Price]) -> None:
        self.entries = tuple(entries)
        self._known: dict[tuple[str, str], float] = {}

    def of(self, slice_: Slice) -> float:
        """Per hour, of its whole Device; 0: it is owned."""
        if not self.entries:
            return 0.0
        return self.at(slice_.product, _class(slice_))

    def at(self, product: str, bought: str) -> float:
        """Per hour, of a Device that is bought so; 0: nobody says."""
        key = product.lower(), bought
        if key not in self._known:
            self._known[key] = self._price(*key)
        return self._known[key]

    def _price(self, product: str, bought: str) -> float:
        named = [entry for entry in self.entries if _names(entry.device.lower(), product)]
        exact = [entry for entry in named if entry.bought == bought]
        return next((entry.per_hour for entry in exact or named), 0.0)


def _class(slice_: Slice) -> str:
    said = (slice_.labels.get(label, "").lower() for label in CLASS_LABELS)
    return next((SAID[one] for one in said if one in SAID), "on-demand")


def _names(device: str, product: str) -> bool:
    """A glob over the product, or some of its words: `T4` names `Tesla-T4-SHARED`."""
    if any(mark in device for mark in "*?["):
        return fnmatchcase(product, device)
    words, all_words = (re.sub(r"[^a-z0-9]+", " ", name).strip() for name in (device, product))
    return bool(words) and f" {words} " in f" {all_words} "

"""Policies for which Offer is taken and how long capacity is kept: ours and competing ones, on the same provisioner.

All of them have the same information: Offers with prices and learned times, and the waiting requests with their
deadlines. The provisioner's other rules (no double orders, overdue orders fail, unneeded orders are cancelled) apply to
all. Competing policies keep idle capacity for a fixed time, as `keepSeconds` in Settings; ours does that or uses
`auto`, and consolidates replicas from paid capacity after a surge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any, NamedTuple
from unittest.mock import patch

from autoscaler.provisioning import offer_selection
from autoscaler.provisioning.offer_selection import RatedOffer
from autoscaler.rearrange import paid_capacity
from autoscaler.spec.model import Auto

DDS_S = 600.0
"""How long Dynamic Device Scaling leaves a device idle, and Cluster Autoscaler a node."""
FIXED_S = (30.0, 120.0, 300.0, DDS_S, 1800.0)
KEEP_S = (30.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0, 86_400.0, 31_536_000.0)
"""Values of `keepSeconds` for our policy, in addition to `auto`."""


class Policy(NamedTuple):
    """One policy.
    `first`: the kind tried first; `keep`: `keepSeconds` of Settings; `ours`: the whole product with these settings.
    """

    name: str
    first: str = ""
    keep: float | Auto = "auto"
    ours: bool = False


OURS = Policy("ours", ours=True)
RULES = {"GPU first": "gpu", "node first": "node", "cheapest": ""}
"""The kind that is ordered first. DDS attaches a device wherever one suffices, and only otherwise adds a node."""


def points() -> list[Policy]:
    """All policies: ours, and the others with each timeout and with none."""
    found = [OURS, *(Policy(f"ours, keepSeconds {keep_s:.0f}", keep=keep_s, ours=True) for keep_s in KEEP_S)]
    for rule, first in RULES.items():
        found += [Policy(f"{rule}, {kept_s:.0f} s", first, kept_s) for kept_s in FIXED_S]
        found.append(Policy(f"{rule}, never given back", first, inf))
    return found


@contextmanager
def acting(policy: Policy) -> Iterator[None]:
    """Apply the policy to every plan of this process while the context is active."""
    own = offer_selection.rated_offer_sort_key

    def order(one: RatedOffer) -> Any:
        attached = bool(one.offer.node)
        return (attached is not (policy.first == "gpu"), *own(one)) if policy.first else own(one)

    stays = patch.object(paid_capacity, "is_rented", lambda world, lease: False) if not policy.ours else nullcontext()
    with patch.object(offer_selection, "rated_offer_sort_key", order), stays:
        yield

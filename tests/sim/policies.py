"""Rules for which Offer is taken and how long it is kept: ours, and those of others in its place, in the same ledger.

Owns them. All know the same: Offers with prices and learnt times, who waits and until when. Whatever else the ledger
does (nothing ordered twice, what does not come given up, what nobody waits for taken back) the others have, too. Theirs
is a fixed time for which what is idle is kept, as Settings' `keepSeconds` say it; ours is that or `auto`, and who is on
what costs goes home when the surge is over.
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
"""So long Dynamic Device Scaling leaves a Device idle, and Cluster Autoscaler a node."""
FIXED_S = (30.0, 120.0, 300.0, DDS_S, 1800.0)
KEEP_S = (30.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0, 86_400.0, 31_536_000.0)
"""Of ours, Settings' `keepSeconds`, beside what it is by itself."""


class Policy(NamedTuple):
    """One point. `first`: what is tried before anything else; `keep`: the Settings' `keepSeconds`; `ours`: all of it is
    as users of ours may set it.
    """

    name: str
    first: str = ""
    keep: float | Auto = "auto"
    ours: bool = False


OURS = Policy("ours", ours=True)
RULES = {"GPU first": "gpu", "node first": "node", "cheapest": ""}
"""What is ordered first. DDS attaches wherever a Device would do, and lets a node be added only where none does."""


def points() -> list[Policy]:
    """All: ours, and the others with each timeout, and without end."""
    found = [OURS, *(Policy(f"ours, keepSeconds {keep_s:.0f}", keep=keep_s, ours=True) for keep_s in KEEP_S)]
    for rule, first in RULES.items():
        found += [Policy(f"{rule}, {kept_s:.0f} s", first, kept_s) for kept_s in FIXED_S]
        found.append(Policy(f"{rule}, never given back", first, inf))
    return found


@contextmanager
def acting(policy: Policy) -> Iterator[None]:
    """While this lasts every plan of this process goes by it."""
    ours = offer_selection.rated_offer_sort_key

    def order(one: RatedOffer) -> Any:
        attached = bool(one.offer.node)
        return (attached is not (policy.first == "gpu"), *ours(one)) if policy.first else ours(one)

    stays = patch.object(paid_capacity, "is_rented", lambda world, lease: False) if not policy.ours else nullcontext()
    with patch.object(offer_selection, "rated_offer_sort_key", order), stays:
        yield

"""What of an Offer can still be had, by what was ordered since it was offered and what became of that. Pure.

Owns that answer, which the ledger asks before it orders, and who publishes what a fabric could attach. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from msgspec.structs import replace

from autoscaler.leases import Barred, Capacity, Lease, Offer, OfferId
from autoscaler.words import seconds

SILENT_S = 180.0
"""Nothing is ordered of a provider that has said nothing for so long, and what it offered longer ago does not count."""
SILENT = "its provider has said nothing for a while"
GONE = "what was offered was ordered meanwhile"


def heard(capacity: Capacity, provider: str, now_s: float) -> bool:
    """Whether what it offered counts."""
    said_s = min(capacity.offered_s.get(provider, -inf), capacity.listed_s.get(provider, -inf))
    return now_s < said_s + SILENT_S


def barred(capacity: Capacity, of: OfferId, now_s: float) -> Barred | None:
    """Where it is left alone now."""
    found = capacity.barred.get(of)
    return found if found is not None and now_s < found.until_s else None


def left(capacity: Capacity, leases: Collection[Lease], offer: Offer, now_s: float) -> Offer | str:
    """What of it there is, or why nothing. `leases`: with those that are ordered now, of its product at least."""
    if (bar := barred(capacity, offer.id, now_s)) is not None:
        return f"{bar.why}; it is left alone for {seconds(bar.until_s - now_s)}"
    if any(one.offer.id == offer.id and _lapsed(one, now_s) for one in leases):
        return "what was ordered of it did not come; it is left alone for a while"
    said_s = capacity.offered_s[offer.provider]
    of_pool = [one for one in leases if _is_kin(one.offer, offer) and one.asked_s >= said_s]
    since = [one for one in of_pool if one.offer.id == offer.id]
    if not offer.node:
        return offer if len(since) < offer.many else GONE
    rest = offer.devices_max - sum(one.devices for one in since)
    if offer.pool is not None:
        rest = min(rest, offer.pool - sum(one.devices for one in of_pool))
    return replace(offer, devices_max=rest) if rest >= offer.devices_min else GONE


def _is_kin(one: Offer, other: Offer) -> bool:
    return one.provider == other.provider and one.product == other.product


def _lapsed(lease: Lease, now_s: float) -> bool:
    """It should have come, and is given up in this Plan."""
    return lease.here_s is None and not lease.leaving and not lease.coming(now_s)

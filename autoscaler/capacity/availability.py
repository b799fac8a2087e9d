"""What of an Offer can still be had, by what was ordered since it was offered and what became of that. Pure.

Owns that answer, which the ledger asks before it orders, who publishes what a fabric could attach, and who counts what
is on offer: what is free and has a place, never what there is at most. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from msgspec.structs import replace

from autoscaler.state.capacity_orders import BackedOffOffer, Capacity, Lease, Offer, OfferId
from autoscaler.text import format_duration

SILENT_S = 180.0
"""Nothing is ordered of a provider that has said nothing for so long, and what it offered longer ago does not count."""
SILENT = "its provider has said nothing for a while"
GONE = "what was offered was ordered meanwhile"


def has_current_offers(capacity: Capacity, provider: str, now_s: float) -> bool:
    """Whether what it offered counts."""
    said_s = min(capacity.offered_s.get(provider, -inf), capacity.listed_s.get(provider, -inf))
    return now_s < said_s + SILENT_S


def find_offer_backoff(capacity: Capacity, of: OfferId, now_s: float) -> BackedOffOffer | None:
    """Where it is left alone now."""
    found = capacity.barred.get(of)
    return found if found is not None and now_s < found.until_s else None


def compute_remaining_offer(capacity: Capacity, leases: Collection[Lease], offer: Offer, now_s: float) -> Offer | str:
    """What of it there is, or why nothing. `leases`: with those that are ordered now, of its product at least."""
    if (bar := find_offer_backoff(capacity, offer.id, now_s)) is not None:
        return f"{bar.why}; it is left alone for {format_duration(bar.until_s - now_s)}"
    if any(one.offer.id == offer.id and _lapsed(one, now_s) for one in leases):
        return "what was ordered of it did not come; it is left alone for a while"
    of_pool = _since(capacity, leases, offer)
    since = [one for one in of_pool if one.offer.id == offer.id]
    if not offer.node:
        return offer if len(since) < offer.many else GONE
    rest = offer.devices_max - sum(one.devices for one in since)
    if offer.pool is not None:
        rest = min(rest, offer.pool - sum(one.devices for one in of_pool))
    return replace(offer, devices_max=rest) if rest >= offer.devices_min else GONE


def count_offered_devices(capacity: Capacity, now_s: float) -> dict[tuple[str, str], int]:
    """By provider and product: so many Devices more could really be had now. Of queues nobody knows that."""
    found: dict[tuple[str, str], int] = {}
    for provider, offers in capacity.offers.items():
        leases = [one for id, one in capacity.leases.items() if id.provider == provider]
        for offer in offers:
            if not offer.queued:
                key = provider, offer.product
                many = _devices(capacity, leases, offer, now_s) if has_current_offers(capacity, provider, now_s) else 0
                found[key] = found.get(key, 0) + many
                if offer.pool is not None:
                    ordered = sum(one.devices for one in _since(capacity, leases, offer))
                    found[key] = min(found[key], max(0, offer.pool - ordered))
    return found


def _devices(capacity: Capacity, leases: Collection[Lease], offer: Offer, now_s: float) -> int:
    rest = compute_remaining_offer(capacity, leases, offer, now_s)
    if isinstance(rest, str):
        return 0
    ordered = sum(one.offer.id == offer.id for one in _since(capacity, leases, offer))
    return rest.devices_max if offer.node else (offer.many - ordered) * offer.devices_max


def _since(capacity: Capacity, leases: Collection[Lease], offer: Offer) -> list[Lease]:
    """Those of its product that were ordered since it was offered."""
    said_s = capacity.offered_s[offer.provider]
    return [one for one in leases if _is_kin(one.offer, offer) and one.asked_s >= said_s]


def _is_kin(one: Offer, other: Offer) -> bool:
    return one.provider == other.provider and one.product == other.product


def _lapsed(lease: Lease, now_s: float) -> bool:
    """It should have come, and is given up in this Plan."""
    return lease.here_s is None and not lease.leaving and not lease.coming(now_s)

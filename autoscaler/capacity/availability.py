"""Computes what is left of an offer, from what was ordered since and how that went. Pure; decides nothing.

Used before ordering, to publish what a fabric could attach, and to count what is on offer. It counts what is free and
has a place, never the maximum that could exist.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from msgspec.structs import replace

from autoscaler.state.capacity_orders import BackedOffOffer, Capacity, Lease, Offer, OfferId
from autoscaler.text import format_duration

SILENT_S = 180.0
"""Nothing is ordered from a provider that was silent for this long, and its older offers do not count."""
SILENT = "its provider has said nothing for a while"
GONE = "what was offered was ordered meanwhile"


def has_current_offers(capacity: Capacity, provider: str, now_s: float) -> bool:
    """Whether the provider's offers count."""
    said_s = min(capacity.offered_s.get(provider, -inf), capacity.listed_s.get(provider, -inf))
    return now_s < said_s + SILENT_S


def find_offer_backoff(capacity: Capacity, of: OfferId, now_s: float) -> BackedOffOffer | None:
    """The back-off in effect, if any."""
    found = capacity.barred.get(of)
    return found if found is not None and now_s < found.until_s else None


def compute_remaining_offer(capacity: Capacity, leases: Collection[Lease], offer: Offer, now_s: float) -> Offer | str:
    """What is left of it, or why nothing is. `leases`: including new orders, of its product at least."""
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
    """By provider and product: how many more devices could be had now. Queued offers are unknown, and left out."""
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
    """Orders of its product placed since it was offered."""
    said_s = capacity.offered_s[offer.provider]
    return [one for one in leases if _is_kin(one.offer, offer) and one.asked_s >= said_s]


def _is_kin(one: Offer, other: Offer) -> bool:
    return one.provider == other.provider and one.product == other.product


def _lapsed(lease: Lease, now_s: float) -> bool:
    """It is overdue, and given up in this plan."""
    return lease.here_s is None and not lease.leaving and not lease.coming(now_s)

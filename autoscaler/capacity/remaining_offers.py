"""Computes what remains of an offer after orders placed since it was read, and its back-off. Pure; decides nothing.

Used before ordering, to publish attachable devices, and to count offered devices. The result counts free devices for
which a node has room, not the maximum number that nodes could have.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from msgspec.structs import replace

from autoscaler.state.capacity import BackedOffOffer, Capacity, Lease, Offer, OfferId
from autoscaler.text import format_duration

SILENT_S = 180.0
"""After this many seconds without a response, a provider's offers are ignored."""
SILENT = "its provider has not responded for a while"
GONE = "the offered capacity was ordered meanwhile"


def has_current_offers(capacity: Capacity, provider: str, now_s: float) -> bool:
    """Whether the provider's offers are recent enough to be used."""
    said_s = min(capacity.offered_s.get(provider, -inf), capacity.listed_s.get(provider, -inf))
    return now_s < said_s + SILENT_S


def find_offer_backoff(capacity: Capacity, of: OfferId, now_s: float) -> BackedOffOffer | None:
    """The back-off in effect, if any."""
    found = capacity.barred.get(of)
    return found if found is not None and now_s < found.until_s else None


def compute_remaining_offer(capacity: Capacity, leases: Collection[Lease], offer: Offer, now_s: float) -> Offer | str:
    """The remaining offer, or why nothing remains. `leases`: all orders of its product, including new ones."""
    if (bar := find_offer_backoff(capacity, offer.id, now_s)) is not None:
        return f"{bar.why}; the next attempt is in {format_duration(bar.until_s - now_s)}"
    pending = (one for one in leases if one.offer.id == offer.id and one.here_s is None and not one.leaving)
    if not all(one.coming(now_s) for one in pending):
        return "its last order was not delivered; it is retried later"
    of_pool = _since(capacity, leases, offer)
    since = [one for one in of_pool if one.offer.id == offer.id]
    if not offer.node:
        return offer if len(since) < offer.many else GONE
    rest = offer.devices_max - sum(one.devices for one in since)
    if offer.pool is not None:
        rest = min(rest, offer.pool - sum(one.devices for one in of_pool))
    return replace(offer, devices_max=rest) if rest >= offer.devices_min else GONE


def count_offered_devices(capacity: Capacity, now_s: float) -> dict[tuple[str, str], int]:
    """Count the devices that can be ordered now, by provider and product, without offers of queues."""
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
    """Orders of its product placed since the offer was read."""
    said_s, of = capacity.offered_s[offer.provider], (offer.provider, offer.product)
    return [one for one in leases if (one.offer.provider, one.offer.product) == of and one.asked_s >= said_s]

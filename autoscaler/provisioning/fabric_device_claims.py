"""Decides which fabric devices are published and ordered for device claims, and the status of the claims. Pure.

A published device that the scheduler allocates to a claim (`autoscaler.state.pending_claims`) is a commitment: an order
for it is in flight, or it was attached, or it is unavailable and the claim's status gives the reason. The devices that
can be attached to a node now are published, minus commitments that are not ordered yet. A committed device remains
published until its claim's status is written.

FabricDeviceReady is never set: the scheduler would bind the pod with our device, and the kubelet would request our
driver to prepare it (KEP-5007 cannot transfer a claim to another driver's device). Our driver has no plug-in on nodes,
so the pod would wait forever. Instead, FabricDeviceReschedule returns the pod to the scheduler, which allocates the
attached device of the node's own driver. If another claim gets that device first, another one is ordered. If no claim
uses it, it is released, and the claim's status reports this for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autoscaler.capacity.remaining_offers import SILENT, compute_remaining_offer, find_offer_backoff, has_current_offers
from autoscaler.state.capacity import Lease, Offer, OfferId
from autoscaler.state.pending_claims import (
    FAILED,
    OVER,
    READY,
    RESCHEDULE,
    PendingDeviceClaim,
    device_of,
    kind_of,
    pool_of,
)
from autoscaler.state.world import World

PUBLISHED_MAX = 64
"""Maximum devices of one pool, the limit of a ResourceSlice for this kind of device."""
SAID_MAX = 200
"""Maximum characters of a condition's message."""
UNKNOWN_S = 60.0
"""How long devices published by an earlier leader remain while a fabric does not respond."""
CLAIM_S = 60.0
"""How long a device attached for a claim waits for the scheduler to allocate it to that claim, or to a similar one."""
TEXT_MAX = 64
"""Maximum characters of an attribute (resource.k8s.io)."""


class ClaimCommitment(NamedTuple):
    """The order for one claim, the offer to order, or the reason for neither."""

    awaited: PendingDeviceClaim
    lease: Lease | None = None
    """The order, in flight or delivered and not used yet."""
    offer: Offer | None = None
    """The offer to order for it."""
    reason: str = ""
    """Why it cannot be delivered, in one word; empty if it can, or this is unknown."""
    says: str = ""


class DevicePool(NamedTuple):
    """Devices that could be attached to one node."""

    name: str
    node: str
    devices: tuple[Mapping[str, Any], ...]
    """The devices, in the format of a ResourceSlice."""


class ClaimStatus(NamedTuple):
    """The status to write to one claim."""

    namespace: str
    name: str
    uid: str
    devices: Mapping[str, tuple[str, str, str]]
    """By device: the condition's type, its reason and its message."""


class Published(NamedTuple):
    """All pools and claim statuses to publish in a cluster."""

    pools: tuple[DevicePool, ...] = ()
    statuses: tuple[ClaimStatus, ...] = ()


def commit_claim(one: PendingDeviceClaim, world: World, leases: Collection[Lease], now_s: float) -> ClaimCommitment:
    """Find the order or offer for one claim. `leases`: all orders, including those for earlier claims of this plan."""
    capacity = world.capacity
    mine = [each for each in leases if each.owner == one.owner and _is_of(one, each.offer) and not each.leaving]
    for lease in sorted(mine, key=lambda each: each.id):
        if len(one.devices) <= lease.devices and (lease.coming(now_s) or (lease.here_s is not None and not lease.used)):
            return ClaimCommitment(one, lease)
    if one.provider not in list_publishing_providers(world):
        return ClaimCommitment(one, reason="NotPublished", says=f"{one.provider} no longer publishes devices")
    if (bar := find_offer_backoff(capacity, OfferId(one.provider, one.owner), now_s)) is not None:
        return ClaimCommitment(one, reason="NotTaken", says=f"the device attached for it was not allocated: {bar.why}")
    if one.provider not in capacity.offers:
        return ClaimCommitment(one)
    if not has_current_offers(capacity, one.provider, now_s):
        return ClaimCommitment(one, says=SILENT)
    offer = next((each for each in capacity.offers[one.provider] if _is_of(one, each)), None)
    rest = (
        "no device of its kind is available for that node"
        if offer is None
        else compute_remaining_offer(capacity, leases, offer, now_s)
    )
    if isinstance(rest, str):
        return ClaimCommitment(one, reason="NotAttached", says=rest)
    if rest.devices_max < len(one.devices):
        return ClaimCommitment(
            one, reason="NotAttached", says=f"only {rest.devices_max} of its kind are available for that node"
        )
    return ClaimCommitment(one, offer=rest)


def find_published_devices(world: World, now_s: float, were: Collection[str] = ()) -> Published | None:
    """Return the pools and claim statuses to publish; None if unknown: published devices then remain. `were`: providers
    that the Settings named before. Claims on devices of other providers belong to other installations.
    """
    unknown = list_publishing_providers(world) - (world.capacity.offers.keys() & world.capacity.listed_s.keys())
    if not world.leadership.leads or (unknown and now_s < world.leadership.leading_since_s + UNKNOWN_S):
        return None
    leases = [*world.capacity.leases.values()]
    ours = {*were, *(one.name for one in world.settings.capacity)}
    found = [commit_claim(one, world, leases, now_s) for one in world.capacity.awaited if one.provider in ours]
    statuses = tuple(_claim_statuses(found))
    over = {one.uid for one in statuses}
    waiting = [one for one in found if one.awaited.uid not in over]
    return Published(tuple(_pools(world, leases, waiting, now_s)), statuses)


def list_publishing_providers(world: World) -> set[str]:
    """Providers that publish devices, by the Settings."""
    return {one.name for one in world.settings.capacity if one.redfish is not None and one.redfish.publish}


def _is_of(one: PendingDeviceClaim, offer: Offer) -> bool:
    return (offer.provider, offer.node, kind_of(offer.product)) == (one.provider, one.node, one.kind)


# --- claims -----------------------------------------------------------------------------------------------------------


def _claim_statuses(pledges: Sequence[ClaimCommitment]) -> Iterator[ClaimStatus]:
    """Yield a claim's status once all its devices are attached or one is unavailable."""
    claims: dict[str, list[ClaimCommitment]] = {}
    for one in pledges:
        claims.setdefault(one.awaited.uid, []).append(one)
    for uid, mine in sorted(claims.items()):
        failed = [one for one in mine if one.reason]
        if failed or all(one.lease is not None and one.lease.here_s is not None for one in mine):
            devices = {name: _condition(one) for one in failed or mine for name in one.awaited.devices}
            first = mine[0].awaited
            yield ClaimStatus(first.namespace, first.name, uid, devices)


def _condition(one: ClaimCommitment) -> tuple[str, str, str]:
    if one.reason:
        return FAILED, one.reason, one.says[:SAID_MAX]
    return (RESCHEDULE, "Attached", f"it was attached to {one.awaited.node}, whose own driver publishes it")


# --- pools ------------------------------------------------------------------------------------------------------------


def _pools(
    world: World, leases: Sequence[Lease], waiting: Sequence[ClaimCommitment], now_s: float
) -> Iterator[DevicePool]:
    for provider in sorted(list_publishing_providers(world)):
        offers = world.capacity.offers.get(provider, ())
        some = {one.node: None for one in offers} | {one.awaited.node: None for one in waiting}
        for node in sorted(filter(None, some)):
            devices = [
                _device(offer, name)
                for offer in _products(offers, leases, provider, node)
                for name in _names(world, leases, [one for one in waiting if _is_of(one.awaited, offer)], offer, now_s)
            ]
            if devices:
                yield DevicePool(pool_of(provider, node), node, tuple(devices[:PUBLISHED_MAX]))


def _products(offers: Sequence[Offer], leases: Sequence[Lease], provider: str, node: str) -> list[Offer]:
    """Offers by product; for a product that is not offered any more, that of its order."""
    ordered = [one.offer for one in leases if one.id.provider == provider]
    found = {one.product: one for one in (*ordered, *offers) if one.node == node}
    return [found[product] for product in sorted(found)]


def _names(
    world: World, leases: Sequence[Lease], waiting: Sequence[ClaimCommitment], offer: Offer, now_s: float
) -> list[str]:
    """Names of committed devices, and of the devices that can be ordered in addition."""
    kept = sorted({name for one in waiting for name in one.awaited.devices})
    there = any(one.id == offer.id for one in world.capacity.offers.get(offer.provider, ()))
    rest = (
        compute_remaining_offer(world.capacity, leases, offer, now_s)
        if there and has_current_offers(world.capacity, offer.provider, now_s)
        else ""
    )
    unordered = sum(len(one.awaited.devices) for one in waiting if one.lease is None)
    many = 0 if isinstance(rest, str) else max(0, rest.devices_max - unordered)
    fresh = (name for number in range(len(kept) + many) if (name := device_of(offer.product, number)) not in kept)
    return [*kept, *(name for name, _ in zip(fresh, range(many), strict=False))]


def _device(offer: Offer, name: str) -> Mapping[str, Any]:
    """Build a device with the attributes of NVIDIA's driver, so that selectors of its GPUs match."""
    of = "gpu.nvidia.com"
    return {
        "name": name,
        "attributes": {f"{of}/type": {"string": "gpu"}, f"{of}/productName": {"string": offer.product[:TEXT_MAX]}},
        "capacity": {f"{of}/memory": {"value": _binary(offer.memory_bytes)}},
        "bindsToNode": True, "bindingConditions": [READY], "bindingFailureConditions": [*OVER],
    }  # fmt: skip


def _binary(size: int) -> str:
    """Format a size as the API returns it (`40Gi`), so that published devices can be compared."""
    powers = next((each for each in range(6, 0, -1) if size % (1 << 10 * each) == 0), 0)
    return f"{size >> 10 * powers}{('', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi', 'Ei')[powers]}"

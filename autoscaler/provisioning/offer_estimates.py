"""Estimates whether and when offers and orders in flight can serve unplaced requests. Pure; decides nothing.

The provisioner uses these estimates to select the requests to order for, and to report how long the others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf

from autoscaler.capacity.lead_times import NO_LEARNT, Expected, estimate_lead_time
from autoscaler.contract import ModelName
from autoscaler.demand.schedule import compute_replica_floor
from autoscaler.placement.model.types import PlacementRequest
from autoscaler.state.capacity_orders import Capacity, Lease, Offer
from autoscaler.state.node_labels import PendingLabels, can_label_appear, find_untolerated_taint
from autoscaler.state.world import NodeId, World


def list_offers(capacity: Capacity) -> tuple[Offer, ...]:
    """All current offers."""
    return tuple(one for each in capacity.offers.values() for one in each)


def estimate_delivery(capacity: Capacity, offer: Offer) -> Expected:
    """Expected delivery of an offer, from observed lead times."""
    return estimate_lead_time(offer, capacity.learnt.get(offer.kind, NO_LEARNT))


def build_offer_filter(world: World, coming: Iterable[Offer]) -> Callable[[PlacementRequest], bool]:
    """Return a function that reports whether an offer suits a request, or an order in flight has its size and product.
    Other requests are ignored, so that they do not block the requests behind them.
    """
    offers, sizes = list_offers(world.capacity), {(one.product, one.memory_bytes // one.parts) for one in coming}
    known: dict[tuple[object, ...], bool] = {}
    there = devices_by_node(world)

    def one(want: PlacementRequest) -> bool:
        least_bytes = want.kind.memory_bytes - want.kind.spare_bytes
        key = want.kind.products, least_bytes, want.kind.devices, want.choice.selector, want.choice.tolerations
        if key not in known:
            known[key] = any(least_bytes <= size and want.kind.rank(of) is not None for of, size in sizes) or any(
                is_offer_suitable(want, offer, there.get(NodeId(offer.node), 0)) for offer in offers
            )
        return known[key]

    return one


def devices_by_node(world: World) -> Mapping[NodeId, int]:
    """How many devices each node has now."""
    return Counter(node for node, _ in {(one.node, one.device) for one in world.nodes.slices.values()})


def is_offer_suitable(want: PlacementRequest, offer: Offer, there: int) -> bool:
    """Whether nothing known about an offer excludes the request. `there`: devices that its node has now."""
    kind, tolerations = want.kind, want.choice.tolerations
    fits = kind.memory_bytes - kind.spare_bytes <= offer.memory_bytes // offer.parts
    enough = kind.devices <= offer.devices_max + there and kind.rank(offer.product) is not None
    return fits and enough and _labelled(want, offer) and find_untolerated_taint(offer.taints, tolerations) is None


def _labelled(want: PlacementRequest, offer: Offer) -> bool:
    labels, coming = offer.labels, PendingLabels.DEVICES if offer.node else PendingLabels.NODE
    unlabelled = bool(offer.node) and not labels
    return all(
        labels[key] == value if key in labels else unlabelled or can_label_appear(key, coming)
        for key, value in want.choice.selector
    )


def remaining_delivery_s(capacity: Capacity, lease: Lease, now_s: float) -> float:
    """Remaining delivery time; infinite if unknown, or if a queued order is overdue or waits for an exhausted quota."""
    of, past_s = estimate_delivery(capacity, lease.offer), now_s - lease.asked_s
    dry = lease.listed is not None and lease.listed.dry
    return inf if lease.offer.queued and (dry or past_s >= of.p95_s) else of.left_s(past_s)


def is_order_too_slow(world: World, lease: Lease, start_s: float, now_s: float) -> bool:
    """Whether no request should wait for a queued order. `start_s`: start time of its owner.

    True if its delivery time is unknown, or such orders usually take longer than its owner's requests wait; other
    offers are then ordered in addition. The total time is compared, not the remaining time, which decreases and
    increases, so that requests would alternate between waiting and not waiting.
    """
    left, model = remaining_delivery_s(world.capacity, lease, now_s), world.models.get(lease.owner)
    if left == inf or not lease.offer.queued:
        return left == inf
    long_s = estimate_delivery(world.capacity, lease.offer).p50_s + start_s
    return model is not None and long_s > model.spec.queue.wait_seconds_max


def compute_deadline_s(world: World, model: ModelName, now_s: float) -> float:
    """When the first waiting request of a model times out, or its next window begins; infinite if neither."""
    levels = ((g.seen_s, one) for g in world.gateways.values() for one in g.levels.get(model, ()))
    waits = ((seen_s, one.soonest_deadline_s) for seen_s, one in levels if one.waiting)
    given_up_s = min((seen_s + left for seen_s, left in waits if left is not None), default=inf)
    return min(
        given_up_s, compute_replica_floor(world, world.models[model], now_s).begins_s if model in world.models else inf
    )

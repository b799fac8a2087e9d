"""Converts announced interruptions (node removal, withdrawn or expiring orders) into drains. Pure.

Interruptions are derived from taints of Karpenter, Cluster Autoscaler and clouds, from a provider that withdraws an
order, and from the end time of an order. An order for room on existing nodes (`Offer.room`) does not expire; instead
its pods may be preempted. An interruption becomes a drain with a reason, like an operator's: nothing new is placed
there, and a successor starts elsewhere first, with ordered capacity if necessary. When the time for that is over,
replicas drain without a successor: their requests finish, and new requests wait. Karpenter waits for our pods before it
removes a node (`autoscaler.providers.karpenter.disruption_guard`), but nothing relies on that. On a node that its
autoscaler considers unneeded, replicas continue; only idle attached devices are released, since they would be removed
with the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from autoscaler.capacity.lead_times import NO_LEARNT, estimate_lead_time
from autoscaler.state.capacity import Lease
from autoscaler.state.node_labels_and_taints import UNNEEDED
from autoscaler.state.world import Cordon, CordonTarget, World

TAKEN: Mapping[str, tuple[str, bool]] = {
    "karpenter.sh/disrupted": ("Karpenter removes it", False),
    "karpenter.sh/disruption": ("Karpenter removes it", False),
    "ToBeDeletedByClusterAutoscaler": ("Cluster Autoscaler removes it", False),
    "aws-node-termination-handler/spot-itn": ("its spot machine is being reclaimed", True),
    "aws-node-termination-handler/asg-lifecycle-termination": ("its autoscaling group is terminating it", True),
    "aws-node-termination-handler/scheduled-maintenance": ("it has scheduled maintenance", False),
    "cloud.google.com/impending-node-termination": ("its spot machine is being reclaimed", True),
    "node.cloudprovider.kubernetes.io/shutdown": ("its machine is being shut down", True),
}
"""Taints of nodes -> description, and whether the remaining time only allows requests to finish."""
SUCCESSOR_S = 30.0
"""How long the drain of a node to be removed is delayed so that a successor can start elsewhere."""
LEAD_S = (300.0, 3600.0)
"""Minimum and maximum time before the end of an order at which its replicas begin to move."""
DRAIN_S = 600.0
"""The part of that time in which requests finish."""
LEAD_PART = 0.25
"""Maximum lead time as a share of an order's lifetime, if that is known. For an order of an earlier leader, only the
lifetime in its offer is used.
"""


def derive_cordons(world: World, before: World, now_s: float) -> Mapping[CordonTarget, Cordon]:
    """Return the cordons of operators in `world`, and those derived from interruptions.
    `before`: the `World` of the previous call; derived cordons are reused while their inputs are unchanged.
    """
    timed = any(one.ends_s is not None for one in _here(world))
    now, was = world.nodes, before.nodes
    ours = any(one.why for one in now.cordons.values())
    still = now.slices is was.slices and world.capacity is before.capacity and now.cordons is was.cordons
    if still and not timed and not ours:
        return world.nodes.cordons
    of_operators = {place: one for place, one in world.nodes.cordons.items() if not one.why}
    found = _found(world, now_s)
    return {**of_operators, **{place: one for place, one in found.items() if place not in of_operators}}


def _found(world: World, now_s: float) -> dict[CordonTarget, Cordon]:
    found: dict[CordonTarget, Cordon] = {}
    for one in (*_by_taints(world, now_s), *_by_leases(world, now_s)):
        known = world.nodes.cordons.get(one.place)
        since_s = known.since_s if known is not None and known.why else now_s
        waited = (one.soon and now_s >= since_s + SUCCESSOR_S) or (known is not None and known.at_once)
        after = replace(one, since_s=since_s, at_once=one.at_once or waited)
        other = found.get(one.place)
        found[one.place] = after if other is None or (after.at_once and not other.at_once) else other
    return found


def _by_taints(world: World, now_s: float) -> Iterator[Cordon]:
    seen: set[str] = set()
    for slice_ in world.nodes.slices.values():
        if not slice_.taints or slice_.node in seen:
            continue
        for taint in slice_.taints:
            if taint.key in TAKEN:
                seen.add(slice_.node)
                why, at_once = TAKEN[taint.key]
                place = CordonTarget("node", slice_.node)
                yield Cordon(
                    place=place, node=slice_.node, since_s=now_s, drain=True, at_once=at_once, soon=True,
                    why=f"node {slice_.node}: {why}",
                )  # fmt: skip


def _by_leases(world: World, now_s: float) -> Iterator[Cordon]:
    for lease in _here(world):
        listed = lease.listed
        if listed is None or not listed.node or (lease.leaving and not lease.in_use):
            continue
        ends_s, begins_s = lease.ends_s, now_s
        if listed.phase != "leaving":
            if ends_s is None:
                continue
            begins_s = ends_s - lead_s(world, lease, ends_s)
        if now_s < begins_s:
            continue
        why = f"its capacity order from {lease.id.provider} ends" + (f" ({listed.says})" if listed.says else "")
        soon = listed.phase == "leaving" or (ends_s is not None and now_s >= ends_s)
        at_once = ends_s is not None and not soon and now_s >= ends_s - min(DRAIN_S, (ends_s - begins_s) / 2)
        places = [CordonTarget("device", one) for one in listed.device_ids] or [CordonTarget("node", listed.node)]
        for place in places:
            yield Cordon(
                place=place, node=listed.node, since_s=now_s, drain=True, at_once=at_once, soon=soon,
                why=f"{place.kind} {place.name}: {why}",
            )  # fmt: skip


def is_lease_ending(world: World, lease: Lease) -> bool:
    """Whether an order, or its node, is being withdrawn."""
    if lease.listed is None or not world.nodes.cordons:
        return False
    places = [
        CordonTarget("node", lease.listed.node),
        *(CordonTarget("device", one) for one in lease.listed.device_ids),
    ]
    return any(place in world.nodes.cordons and world.nodes.cordons[place].why for place in places)


def is_on_unneeded_node(world: World, lease: Lease) -> bool:
    """Whether the order's devices are attached to a node that the cluster's node autoscaler considers unneeded."""
    if lease.listed is None or not lease.offer.node:
        return False
    there = (one for one in world.nodes.slices.values() if one.taints and one.node == lease.listed.node)
    return any(taint.key in UNNEEDED for one in there for taint in one.taints)


def lead_s(world: World, lease: Lease, ends_s: float) -> float:
    """How long before its end an order's replicas begin to move: time to replace it and to finish requests."""
    p95_s = estimate_lead_time(lease.offer, world.capacity.learnt.get(lease.offer.kind, NO_LEARNT)).p95_s
    lead = min(max(LEAD_S[0], 2 * p95_s + DRAIN_S), LEAD_S[1])
    began_s = lease.asked_s if lease.here_s is None else lease.here_s
    lasts_s = lease.offer.lasts_s if lease.found else max(0.0, ends_s - began_s)
    return lead if lasts_s is None else min(lead, lasts_s * LEAD_PART)


def _here(world: World) -> Iterator[Lease]:
    """Delivered orders, except orders for room on existing nodes: these nodes are not removed."""
    return (one for one in world.capacity.leases.values() if one.here_s is not None and not one.offer.room)

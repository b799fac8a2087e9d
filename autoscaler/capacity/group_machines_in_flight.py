"""Machine groups that others scale (MachineSet, MachineDeployment): their nodes in flight count as supply. Pure.

Tracks how many machines of each group are in flight and how many of them our requests can use; correspondingly less is
ordered. The cause of the growth does not matter: Cluster Autoscaler for a pending pod, a person, or our own order.
Machines for pods of others, and machines for our own orders, are subtracted. A missing machine is waited for as long as
Cluster Autoscaler waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.state.capacity import Group, GroupGrowth, Lease, LeaseId, Listed
from autoscaler.state.world import World

GROW_S = 900.0
"""Cluster Autoscaler's `--max-node-provision-time`; later, a missing machine is not expected any more."""


def adopt_group(group: Group, now_s: float) -> GroupGrowth:
    """Track a new group, with nothing in flight.

    A machine that is not ready may have been broken for weeks; unplaced requests would wait GROW_S for it after each
    start of an autoscaler. If it does arrive, little is ordered twice. Machines for pods of other controllers would not
    count anyway, providers list the orders that a group grows for before anything is ordered, and followers have
    observed all other growth. Only a scale-up by a person while no autoscaler ran can add one surplus node, which is
    released when idle.
    """
    return GroupGrowth(group=group, coming=0, shown=0, since_s=now_s)


def update_growth(before: GroupGrowth | None, group: Group, shown: int, now_s: float) -> GroupGrowth:
    """Update after a poll. `shown`: number of nodes that show devices (`count_nodes_with_devices`).

    Only an increase of the group's size counts as in flight, so that a lost node does not. For a group that the last
    poll did not find, all machines that are not ready count.
    """
    if before is None:
        before = adopt_group(replace(group, wanted=group.ready), now_s)
    more, came = max(0, group.wanted - before.group.wanted), max(0, shown - before.shown) if before.coming else 0
    coming = min(max(0, group.wanted - shown), max(0, before.coming + more - came))
    return GroupGrowth(group=group, coming=coming, shown=shown, since_s=now_s if more else before.since_s)


def recount_growth(growth: GroupGrowth, world: World, now_s: float) -> GroupGrowth:
    """Update as nodes show devices between polls.

    A node that has arrived is no longer counted as coming. If it were, it would seem to serve a second order, which
    would be withdrawn. A node whose device plug-in restarts is not counted as arrived again.
    """
    if not growth.coming:
        return growth
    return update_growth(growth, growth.group, max(growth.shown, count_nodes_with_devices(world, growth.group)), now_s)


def count_nodes_with_devices(world: World, group: Group) -> int:
    """How many of the group's nodes show devices."""
    nodes = {one.node: one.labels for one in world.nodes.slices.values()}
    return sum(group.labels.items() <= labels.items() for labels in nodes.values())


def list_group_leases(world: World, now_s: float) -> Iterator[Lease]:
    """Yield one order for each machine in flight that our requests can use. These orders are never released."""
    for name, growth in sorted(world.capacity.groups.items()):
        group, offer = growth.group, growth.group.offer
        if offer is None or not growth.coming or now_s >= growth.since_s + GROW_S:
            continue
        theirs = -(-group.claimed // (offer.devices_max * offer.parts))
        ours = sum(_of(one, group.labels) for one in world.capacity.leases.values())
        for number in range(growth.coming - theirs - ours):
            listed = Listed(name=f"{number}", offer=offer, devices=offer.devices_max, committed=True)
            yield Lease(
                id=LeaseId(name, listed.name), offer=offer, devices=listed.devices, owner=ModelName(""),
                asked_s=growth.since_s, sent_s=growth.since_s, due_s=growth.since_s + GROW_S, listed=listed,
            )  # fmt: skip


def _of(lease: Lease, labels: Mapping[str, str]) -> bool:
    """Whether the group grows for this order: the order is committed to a node with the group's labels, and not
    delivered yet.
    """
    offered = lease.offer.labels
    agrees = bool(offered) and all(offered.get(key, said) == said for key, said in labels.items())
    return agrees and not lease.offer.node and lease.here_s is None and lease.committed

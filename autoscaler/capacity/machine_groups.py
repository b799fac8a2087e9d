"""Groups of machines that others make nodes of (MachineSet, MachineDeployment): what grows there is on its way, too.

Owns what is known of them, how much of that growth is still to come, and what of it is left for us: so much less is
ordered. Whoever raised `replicas`, Cluster Autoscaler for a pod that waits, a person, our own order, the machines come
once. What pods of others wait for is theirs, and what our own Leases stand for is counted there. A machine that does
not come is waited for as long as Cluster Autoscaler does. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import Groups
from autoscaler.contract import ModelName
from autoscaler.state.capacity_orders import Group, GroupGrowth, Lease, LeaseId, Listed
from autoscaler.state.world import World

GROW_S = 900.0
"""Cluster Autoscaler's `--max-node-provision-time`: what has not come by then is not counted on."""


def adopt_group(group: Group, now_s: float) -> GroupGrowth:
    """At the first look of all nothing of it is on its way: a machine that is not ready may have been broken for weeks,
    and after each start of an autoscaler those who lack room would wait for it for GROW_S. Should it come all the same,
    little is ordered twice. What grows for pods of others is theirs, and what grows for orders of ours their provider
    lists, before anything is ordered; what else grows whoever follows has looked at, too, and knows when it leads. So
    only of what a person raised while no autoscaler ran one node too much is ordered, and goes when it stands idle.
    """
    return GroupGrowth(group=group, coming=0, shown=0, since_s=now_s)


def update_growth(before: GroupGrowth | None, group: Group, shown: int, now_s: float) -> GroupGrowth:
    """After another look. `count_nodes_with_devices`: so many of its nodes show their Devices; a node that is ready may
    not yet.

    Only what it was raised by is on its way, so that a node that is lost is nobody's supply; a group that was not there
    at the look before, by all that is not ready.
    """
    if before is None:
        before = adopt_group(replace(group, wanted=group.ready), now_s)
    more, came = max(0, group.wanted - before.group.wanted), max(0, shown - before.shown) if before.coming else 0
    coming = min(max(0, group.wanted - shown), max(0, before.coming + more - came))
    return GroupGrowth(group=group, coming=coming, shown=shown, since_s=now_s if more else before.since_s)


def recount_growth(growth: GroupGrowth, world: World, now_s: float) -> GroupGrowth:
    """As nodes show their Devices between looks. One that came for an order of ours is no more counted as that: it
    would stand for the order of somebody else until the next look, and have it taken back. One whose device plug-in
    starts anew shows none for a moment, and is not another that came then.
    """
    if not growth.coming:
        return growth
    return update_growth(growth, growth.group, max(growth.shown, count_nodes_with_devices(world, growth.group)), now_s)


def count_nodes_with_devices(world: World, group: Group) -> int:
    """How many of its nodes show Devices."""
    nodes = {one.node: one.labels for one in world.slices.values()}
    return sum(group.labels.items() <= labels.items() for labels in nodes.values())


def list_group_leases(world: World, now_s: float) -> Iterator[Lease]:
    """What is left for us of it, as Leases that nobody has to give back: one for each node."""
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
    """Whether the group grows for a Lease of ours: a node with such labels was promised, and is not here yet."""
    offered = lease.offer.labels
    agrees = bool(offered) and all(offered.get(key, said) == said for key, said in labels.items())
    return agrees and not lease.offer.node and lease.here_s is None and lease.committed


def read_group_limits(world: World) -> Groups:
    """Of groups that say it, how many Devices each of their nodes can have."""
    return collect_group_limits(one.group for one in world.capacity.groups.values())


def collect_group_limits(groups: Iterable[Group]) -> Groups:
    """The same of any groups."""
    return {one.name: (one.most, one.labels) for one in groups if one.most}

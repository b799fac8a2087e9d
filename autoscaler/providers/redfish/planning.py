"""Computes the offers of a Redfish fabric, the orders that it contains, and the next change for an order. Pure.

All functions take a Fabric: the state that was read at one time. A block with our mark is ours, attached or not; one
marked as gone is ours only while it is attached. An order chooses the same free blocks in every process. `provider`
executes the changes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import AttachableNode
from autoscaler.providers.redfish.schema import Block, BlockMark, ComputerSystem, RedfishGpu
from autoscaler.state.capacity import OFFERS_MAX, AcquireOrder, Listed, Offer

COMPOSING = "Composing"
EXPECTED_S = 60.0
"""Default delivery time in seconds, until one is learned or set in Settings."""
NODES_NAMED_MAX = 4
"""Maximum number of nodes that a message names."""


class FabricContext(NamedTuple):
    """Inputs from Settings and `World` for offers and orders."""

    provider: str
    expected_s: float | None
    price_per_hour: Callable[[str], float]
    """Price per hour of one device of a product."""
    seen_on: Callable[[str], int]
    """Number of devices that a node reports."""
    reports_uuids: Callable[[tuple[str, ...]], bool]
    """Whether the node reports devices with these ids."""


class Fabric(NamedTuple):
    """A fabric, as read at one time."""

    blocks: Mapping[str, Block]
    systems: Mapping[str, ComputerSystem]
    """By node; those that were read."""
    gpus: Mapping[str, RedfishGpu]
    """By block, if it has exactly one."""
    marks: Mapping[str, BlockMark]
    """By block."""
    keeps: bool
    """Marks can be stored, by the service or in Notes."""
    missing: frozenset[str] = frozenset()
    """Nodes whose systems the service does not have."""

    def at(self, block: str) -> str:
        """The node that a block is attached to; empty: none of `systems`."""
        return next((node for node, one in self.systems.items() if block in one.blocks), "")

    def attached(self, block: str) -> bool:
        """Whether a block is attached to any system."""
        return bool(self.at(block) or self.blocks[block].systems)

    def free(self, block: str) -> bool:
        """Whether a block can be claimed."""
        one, mark = self.blocks[block], self.marks.get(block)
        if not one.sound or one.state == COMPOSING or self.attached(block):
            return False
        return mark.gone if mark is not None else not one.free_for and not one.reserved

    def of(self, name: str) -> list[str]:
        """Blocks that this order claimed and has not released."""
        return sorted(path for path, one in self.marks.items() if one.name == name and not one.gone)

    def unread(self, node: str) -> str:
        """Why a node's system was not read, with the fix; empty: it was read."""
        if node in self.systems:
            return ""
        if node in self.missing:
            return f"the fabric has no system for node {node}: fix its path in `systems`"
        return f"node {node} was removed from `systems`: restore it until this order is released"


class BlockClaim(NamedTuple):
    """The blocks to mark for an order, in addition to its marked ones. `refused`: why it gets none."""

    blocks: tuple[str, ...] = ()
    refused: str = ""


class LeaseProgress(NamedTuple):
    """The part of an order's state that only this process knows."""

    arrived: bool = False
    """All of its blocks were attached."""
    leaving: bool = False
    failed: str = ""
    """Why it was not delivered."""


def build_offers(fabric: Fabric, terms: FabricContext, there: Mapping[str, AttachableNode]) -> tuple[Offer, ...]:
    """Return one offer per node and product with free blocks. `there`: nodes that can have more devices."""
    if not fabric.keeps:
        return ()
    found: list[Offer] = []
    pool = Counter(one.product for path, one in fabric.gpus.items() if path in fabric.blocks and fabric.free(path))
    for node in sorted(fabric.systems.keys() & there.keys()):
        free: dict[str, list[RedfishGpu]] = {}
        for path in _free_for(fabric, node):
            free.setdefault(fabric.gpus[path].product, []).append(fabric.gpus[path])
        room = _room(fabric, there[node], terms)
        found += [
            _offer(there[node], gpus, terms, min(len(gpus), room), pool[product])
            for product, gpus in sorted(free.items())
        ]
    return _most([one for one in found if one.devices_max > 0])


def _most(found: Sequence[Offer]) -> tuple[Offer, ...]:
    """Select at most OFFERS_MAX offers: the products in turn, and of each the offers with the most devices first."""
    before: Counter[str] = Counter()
    ranked: list[tuple[int, int]] = []
    for at in sorted(range(len(found)), key=lambda at: (-found[at].devices_max, at)):
        ranked.append((before[found[at].product], at))
        before[found[at].product] += 1
    return tuple(found[at] for at in sorted(at for _, at in sorted(ranked)[:OFFERS_MAX]))


def plan_claim(fabric: Fabric, order: AcquireOrder, terms: FabricContext, site: AttachableNode | None) -> BlockClaim:
    """Choose the blocks to mark for an order, in addition to its marked ones. `site`: None if the node is unusable."""
    name, node, product = order.id.name, order.offer.node, order.offer.product
    ours = fabric.of(name)
    missing = order.devices - len(ours)
    if missing <= 0 or any(fabric.attached(path) for path in ours):
        return BlockClaim()
    if not fabric.keeps:
        return BlockClaim(refused="the fabric cannot store which order owns a block, so it offers nothing")
    if site is None or node not in fabric.systems:
        return BlockClaim(refused=f"node {node} is not ready and schedulable, or has no system in this fabric")
    back = sorted(
        path for path, one in fabric.marks.items() if one.name == name and one.gone and fabric.at(path) == node
    )
    free = [path for path in _free_for(fabric, node) if fabric.gpus[path].product == product]
    can, room = [*back, *sorted(free, key=lambda path: _rank(name, path))], _room(fabric, site, terms)
    if ours or (len(can) >= missing and room + len(back) >= missing):
        return BlockClaim(tuple(can[:missing]))  # a partly marked order may get fewer
    what = f"{len(can)} x {product} available" if len(can) < missing else f"room for {room}"
    return BlockClaim(refused=f"node {node} has {what}, and the order needs {missing}")


def plan_links(fabric: Fabric, node: str, attach: Collection[str], detach: Collection[str]) -> tuple[str, ...]:
    """The blocks that a system should be linked to: the current ones with `attach` and without `detach`."""
    now = fabric.systems[node].blocks
    more = (path for path in sorted(attach) if path not in now)
    return (*(path for path in now if path not in detach), *more)


def is_settled(fabric: Fabric, blocks: Iterable[str]) -> bool:
    """Whether none of the blocks is being composed."""
    return all(fabric.blocks[path].state != COMPOSING for path in blocks)


def list_unattached_leases(fabric: Fabric) -> dict[str, str]:
    """Orders with a block that is not attached to our nodes, by name, and their nodes."""
    return {one.name: one.node for path, one in fabric.marks.items() if not one.gone and not fabric.at(path)}


def list_late_blocks(fabric: Fabric) -> dict[str, BlockMark]:
    """Blocks that were released and may still be attached."""
    return {path: one for path, one in fabric.marks.items() if one.gone and not fabric.attached(path)}


def describe_missing_systems(fabric: Fabric) -> str:
    """The nodes without a system in the service, as a phrase that follows the provider's name; empty: none."""
    names = sorted(fabric.missing)
    more = f" and {len(names) - NODES_NAMED_MAX} more" if len(names) > NODES_NAMED_MAX else ""
    said = f"has no system for node {', '.join(names[:NODES_NAMED_MAX])}{more}: fix its path in `systems`"
    return said if names else ""


def list_leases(fabric: Fabric, terms: FabricContext, held: Mapping[str, LeaseProgress]) -> tuple[Listed, ...]:
    """All our orders, except those that a person detached: attached at the last read of this process, but not now."""
    names = {one.name for path, one in fabric.marks.items() if path in fabric.blocks and _ours(fabric, path)}
    found = (_listed(fabric, terms, name, held.get(name, LeaseProgress())) for name in sorted(names))
    return tuple(one for one in found if one is not None)


def _ours(fabric: Fabric, path: str) -> bool:
    return not fabric.marks[path].gone or bool(fabric.at(path))


def _listed(fabric: Fabric, terms: FabricContext, name: str, held: LeaseProgress) -> Listed | None:
    marks = {path: one for path, one in fabric.marks.items() if one.name == name and path in fabric.blocks}
    marks = {path: one for path, one in marks.items() if _ours(fabric, path)}
    first, there = next(iter(marks.values())), [path for path in sorted(marks) if fabric.at(path)]
    gpus = [fabric.gpus[path] for path in marks if path in fabric.gpus] or [RedfishGpu("", 0, "", 0.0)]
    plain = Listed(
        name=name, offer=_offer(AttachableNode(first.node, 0), gpus, terms, first.devices), devices=first.devices,
        owner=first.owner, epoch=first.epoch,
    )  # fmt: skip
    if not there and fabric.unread(first.node):
        return _unread(fabric, terms, plain, [path for path in sorted(marks) if fabric.attached(path)], held)
    if held.arrived and not there and not held.leaving:
        return None
    node = fabric.at(there[0]) if there else ""
    here = bool(there) and (held.arrived or len(there) == len(marks)) and is_settled(fabric, there)
    ids = tuple(f"{node}/{one}" for one in list_attached_uuids(fabric, name).get(node, ()))
    return replace(
        plain,
        phase="leaving" if held.leaving else "failed" if held.failed else "here" if here else "coming",
        committed=here, node=node if here else "", device_ids=ids if here else (),
        counted_from=_counted_from(fabric, node, there) if here else None, alone=here and not terms.reports_uuids(ids),
        says=held.failed,
    )  # fmt: skip


def _unread(fabric: Fabric, terms: FabricContext, plain: Listed, there: Sequence[str], held: LeaseProgress) -> Listed:
    """An order whose node's system was not read. Attached blocks count as present, so that their users keep them.
    A missing system may reappear. On a node that Settings no longer name, nothing can be attached or detached.
    """
    node = plain.offer.node
    ids = tuple(f"{node}/{fabric.gpus[path].uuid}" for path in there if path in fabric.gpus)
    lost = held.failed or node not in fabric.missing
    return replace(
        plain,
        phase="leaving" if held.leaving else "failed" if lost else "coming", committed=bool(there),
        node=node if there else "", device_ids=ids, alone=bool(there) and not terms.reports_uuids(ids),
        says=held.failed or fabric.unread(node),
    )  # fmt: skip


def count_foreign_devices(fabric: Fabric, node: str, terms: FabricContext) -> int:
    """Number of devices of a node that Pilotlight did not attach."""
    recorded = [one.before for one in fabric.marks.values() if one.node == node and not one.gone]
    return min(recorded) if recorded else terms.seen_on(node)


def _counted_from(fabric: Fabric, node: str, there: Sequence[str]) -> int:
    """Number of the first of these devices: a node numbers its own first, then ours in the order of its links."""
    linked = fabric.systems[node].blocks
    ours = [path for path in linked[: min(map(linked.index, there))] if path in fabric.marks]
    return min(fabric.marks[path].before for path in there) + len(ours)


def _room(fabric: Fabric, site: AttachableNode, terms: FabricContext) -> int:
    """How many more devices can be attached to the node. Devices that other clients attached take up room, too."""
    ours = sum(one.node == site.node and not one.gone for one in fabric.marks.values())
    return site.most - max(terms.seen_on(site.node), count_foreign_devices(fabric, site.node, terms) + ours)


def list_attached_uuids(fabric: Fabric, name: str) -> dict[str, tuple[str, ...]]:
    """UUIDs of the order's attached GPUs, by node. A UUID is empty while it is not reported."""
    found: dict[str, tuple[str, ...]] = {}
    for path, mark in sorted(fabric.marks.items()):
        if mark.name == name and path in fabric.blocks and (node := fabric.at(path)):
            found[node] = (*found.get(node, ()), fabric.gpus[path].uuid if path in fabric.gpus else "")
    return found


def _free_for(fabric: Fabric, node: str) -> list[str]:
    """Free blocks with one GPU that can be composed with the node's blocks (shared zones)."""
    own = [fabric.blocks[path].zones for path in fabric.systems[node].blocks if path in fabric.blocks]
    zones = {zone for group in own for zone in group}
    near = (path for path in fabric.gpus if path in fabric.blocks and fabric.free(path))
    return sorted(path for path in near if not zones or not fabric.blocks[path].zones
                  or not zones.isdisjoint(fabric.blocks[path].zones))  # fmt: skip


def _offer(
    site: AttachableNode, gpus: Sequence[RedfishGpu], terms: FabricContext, devices_max: int, pool: int | None = None
) -> Offer:
    product = gpus[0].product
    return Offer(
        provider=terms.provider, name=f"{site.node}/{product}", product=product, node=site.node,
        memory_bytes=min(one.memory_bytes for one in gpus), devices_max=devices_max, pool=pool, parts=site.parts,
        bought="fabric",
        labels=dict(site.labels), taints=site.taints,
        price_per_hour=terms.price_per_hour(product), watts=max(one.watts for one in gpus),
        expected_s=EXPECTED_S if terms.expected_s is None else terms.expected_s,
    )  # fmt: skip


def _rank(name: str, path: str) -> bytes:
    """Sort key of an order's choice of blocks: concurrent processes choose the same blocks."""
    return hashlib.sha256(f"{name}/{path}".encode()).digest()

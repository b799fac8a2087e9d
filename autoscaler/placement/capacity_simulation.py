"""Simulates placements on capacity that does not exist yet, by running the packer on virtual slices. Pure.

An offer or a capacity order is represented by virtual slices until its own are seen. Two queries use them: which of the
unplaced requests have room on orders in flight, and the fewest devices of an offer that give one request room. Slices
that the plan has assigned already are left out.

`SimulationCache` computes equivalent queries once per plan. Two are equivalent if they have the same requests in the
same order, on the same devices of one node without other devices. Names of nodes and models do not matter, nor do
preferences among nodes (weight copies, images, spreading, nearness), since there is only one node. Results are not
reused if there are other facts about the node, such as cordons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from autoscaler.capacity.delivered_slices import slices_of
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.index_cache import IndexCache
from autoscaler.placement.model.topology import CLIQUE
from autoscaler.placement.model.types import EvictionLevel, PlacementRequest, RequiredArtifacts, RestartCosts
from autoscaler.placement.packer import pack, request_sort_key
from autoscaler.state.capacity import Lease, LeaseId, Offer
from autoscaler.state.node_labels_and_taints import PendingLabels
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId, World

Got: TypeAlias = list[tuple[PlacementRequest, tuple[SliceId, ...]]]
"""Requests that have room, with their slices."""
_OWN: Final = {"id", "device", "node", "labels"}
_same = attrgetter(*(name for name in Slice.__struct_fields__ if name not in _OWN))


class SimulationCache:
    """Query results for one world at one time and one state of the plan."""

    def __init__(self) -> None:
        self._known: dict[object, list[tuple[int, tuple[int, ...]]]] = {}

    def of(
        self, world: World, wants: Sequence[PlacementRequest], added: Sequence[Slice], ask: Callable[[], Got]
    ) -> Got:
        """Return the result of `ask`, or of an equivalent earlier query. `added`: all slices of their nodes."""
        nodes = {one.node for one in added}
        if len(nodes) != 1 or not _plain(world, *nodes):
            return ask()
        wants = sorted(wants, key=request_sort_key)
        key = (world.nodes.hosts.get(*nodes), _wanted(wants, *nodes), _there(wants, added))
        if key not in self._known:
            number = {one.id: at for at, one in enumerate(added)}
            turn = {want: at for at, want in enumerate(wants)}
            self._known[key] = [(turn[want], tuple(number[id] for id in ids)) for want, ids in ask()]
        return [(wants[at], tuple(added[one].id for one in ids)) for at, ids in self._known[key]]


def _plain(world: World, node: NodeId) -> bool:
    """Whether no known fact about the node could close the slices that are added there."""
    if world.nodes.cordons or world.nodes.mps_failures or node in world.nodes.cuttable or node in world.nodes.others:
        return False
    agent = world.nodes.agents.get(node)
    return agent is None or not agent.unhealthy


def _wanted(wants: Sequence[PlacementRequest], node: NodeId) -> tuple[PlacementRequest, ...]:
    """Normalize the requests: drop what cannot change the result, but keep which ones share a model."""
    models = {model: ModelName(str(at)) for at, model in enumerate(dict.fromkeys(want.model for want in wants))}
    return tuple(
        want._replace(
            model=models[want.model], ordinal=at, reason="", supplies=RequiredArtifacts(), spread=None,
            urgency=want.urgency._replace(unserved_since_s=0.0, force=EvictionLevel.NONE),
            choice=want.choice._replace(avoids=(node,)[: node in want.choice.avoids]),
        )
        for at, want in enumerate(wants)
    )  # fmt: skip


def _there(wants: Sequence[PlacementRequest], added: Sequence[Slice]) -> tuple[object, ...]:
    """Describe the devices, with the labels that any request selects."""
    asked = sorted({key for want in wants for key, _ in want.choice.selector})
    devices = {device: at for at, device in enumerate(dict.fromkeys(one.device for one in added))}
    return tuple(
        (devices[one.device], _same(one), bool(one.labels.get(CLIQUE)), tuple(one.labels.get(key) for key in asked))
        for one in added
    )


TRIAL = "offered"
"""Name of the virtual slices of an offer."""


class SimulationContext(NamedTuple):
    """Context of a simulation. `taken`: slices that the plan has assigned; `answers`: results cached for this world."""

    world: World
    restart_costs: RestartCosts
    now_s: float
    going: frozenset[ReplicaId] = frozenset()
    taken: frozenset[SliceId] = frozenset()
    answers: SimulationCache | None = None


def build_virtual_slices(world: World, offer: Offer, devices: Iterable[int], name: str) -> tuple[Slice, ...]:
    """Return the slices that these devices of an offer, by number, would have.
    On an existing node they get its labels; `labels_coming` names the labels that have yet to appear.
    """
    node = NodeId(offer.node or name)
    known = next((one for one in world.nodes.slices.values() if offer.node and one.node == node), None)
    labels, taints = (offer.labels, offer.taints) if known is None else (known.labels, known.taints)
    labels_known = known.labels_known if known is not None else not offer.node or bool(offer.labels)
    coming = PendingLabels.NODE if not offer.node else PendingLabels.DEVICES if known is None else PendingLabels.NOTHING
    return tuple(
        Slice(
            id=SliceId(f"{name}/{number}/{part}"),
            device=DeviceId(f"{name}/{number}"),
            node=node,
            memory_bytes=offer.memory_bytes // offer.parts,
            device_bytes=offer.memory_bytes if offer.parts > 1 else offer.device_bytes,
            shared=offer.shared,
            product=offer.product,
            labels=labels,
            labels_known=labels_known,
            labels_coming=coming,
            taints=taints,
        )
        for number in devices
        for part in range(offer.parts)
    )


def list_obtainable_slices(world: World) -> tuple[Slice, ...]:
    """List slices that could be added now, that are ordered, or that can be ordered again once they are released."""
    capacity = world.capacity
    found = [
        one
        for provider in sorted(capacity.offers)
        for offer in capacity.offers[provider]
        for one in build_virtual_slices(world, offer, range(offer.devices_max), f"{TRIAL} {provider} {offer.name}")
    ]
    coming = (lease for _, lease in sorted(capacity.leases.items()) if lease.here_s is None or lease.leaving)
    return (*found, *(one for lease in coming for one in _awaited(world, lease)))


def list_missing_devices(world: World, lease: Lease) -> range:
    """Return the numbers of those devices of a capacity order that do not exist yet."""
    return range(len({one.device for one in slices_of(world, lease)}), lease.devices)


def match_requests_to_orders(
    context: SimulationContext, wants: Sequence[PlacementRequest], leases: Sequence[Lease]
) -> dict[PlacementRequest, LeaseId]:
    """Match unplaced requests, each once, to the capacity orders in flight on which they have room.
    Each order is tried alone, in sequence; then the remaining requests are tried on all unmatched orders together.
    """
    found: dict[PlacementRequest, LeaseId] = {}
    had: set[LeaseId] = set()
    left = _Left(wants)
    for some in (*([one] for one in leases), leases if len(leases) > 1 else ()):
        offered = {lease.id: _awaited(context.world, lease) for lease in some if lease.id not in had} if left else {}
        where = {one.id: lease for lease, there in offered.items() for one in there}
        got = _packed(context, left, [one for there in offered.values() for one in there]) if where else ()
        for want, ids in got:
            leased = [where[slice_] for slice_ in ids if slice_ in where]
            if leased:
                found[want] = leased[0]
                had.add(leased[0])
                left.drop(want)
    return found


def compute_min_devices(want: PlacementRequest, offer: Offer) -> int:
    """Return the minimum number of devices that an order of this offer may have; the request may need more."""
    return max(1, offer.devices_min if offer.node else max(offer.devices_min, want.kind.devices))


def devices_for(context: SimulationContext, want: PlacementRequest, offer: Offer) -> int | None:
    """Return the fewest devices of the offer with which the request has room. None: no number of them suffices."""
    for many in range(compute_min_devices(want, offer), offer.devices_max + 1):
        added = build_virtual_slices(context.world, offer, range(many), TRIAL)
        got = _packed(context, _Left([want]), added)
        new = {one.id for one in added}
        if any(not new.isdisjoint(ids) for _, ids in got):
            return many
    return None


def _awaited(world: World, lease: Lease) -> tuple[Slice, ...]:
    node = lease.offer.node or ("" if lease.listed is None else lease.listed.node)
    known = any(one.node == node for one in world.nodes.slices.values())
    offer = replace(lease.offer, node=node) if known else lease.offer
    return build_virtual_slices(world, offer, list_missing_devices(world, lease), lease.id.name)


def _packed(context: SimulationContext, wants: _Left, added: Sequence[Slice]) -> Got:
    """Return the requests that have room on these slices and the other slices of the same nodes."""
    world, nodes = context.world, {one.node for one in added}
    there = [one for one in world.nodes.slices.values() if one.node in nodes and one.id not in context.taken]
    few = wants.few((*there, *added))
    if context.answers is None or there:
        return _asked(context, few, (*there, *added))
    return context.answers.of(world, few, added, lambda: _asked(context, few, added))


def _asked(context: SimulationContext, wants: Sequence[PlacementRequest], there: Sequence[Slice]) -> Got:
    """Run the packer on all slices of some nodes, without evictions."""
    world, slices = context.world, {one.id: one for one in there}
    nodes = {one.node for one in there}
    hosts = {node: host for node, host in world.nodes.hosts.items() if node in nodes}
    trial = replace(world, nodes=replace(world.nodes, slices=slices, hosts=hosts))
    index = IndexCache().update(trial, context.now_s, context.going)
    without_force = {want._replace(urgency=want.urgency._replace(force=EvictionLevel.NONE)): want for want in wants}
    packing = pack([*without_force], index, world.nodes.copies, context.restart_costs, context.now_s, explain=False)
    found = [(without_force[placed.want], placed.slices) for placed in packing.placements]
    return [*found, *((without_force[one.want], one.slices) for one in packing.unmet if one.promised)]


class _Left:
    """Requests that still lack room, in order."""

    def __init__(self, wants: Sequence[PlacementRequest]) -> None:
        self._alike: dict[tuple[object, ...], dict[PlacementRequest, int]] = {}
        """All properties that decide where a request fits -> (request with these properties -> its number)."""
        self._groups: dict[PlacementRequest, dict[PlacementRequest, int]] = {}
        for number, want in enumerate(wants):
            group = self._alike.setdefault((want.kind, want.choice, want.trust), {})
            group[want] = number
            self._groups[want] = group

    def __bool__(self) -> bool:
        return bool(self._groups)

    def drop(self, want: PlacementRequest) -> None:
        """Remove a request that has room now."""
        del self._groups.pop(want)[want]

    def few(self, slices: Collection[Slice]) -> list[PlacementRequest]:
        """Return, of each group of equivalent requests, at most as many as fit on these slices if they are empty.
        More requests would only make the packer slower.
        """
        found: list[tuple[int, PlacementRequest]] = []
        for group in filter(None, self._alike.values()):
            most = sum(_most(next(iter(group)), one) for one in slices)
            found += ((number, want) for want, number in islice(group.items(), most))
        return [want for _, want in sorted(found, key=itemgetter(0))]


def _most(want: PlacementRequest, slice_: Slice) -> int:
    memory_bytes = want.kind.memory_bytes - want.kind.spare_bytes
    if want.kind.devices != 1 or not memory_bytes or not slice_.shared:
        return 1
    return slice_.memory_bytes // memory_bytes

"""Converts the `World` into the packer's types: a `Bin` per slice with its occupants, host resources, and the start
locks of devices.

Also computes the free amounts, and when each replica may be evicted. Invariants: a slice not known to be clean is not
free, and a replica of unknown load is busy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from autoscaler.capacity.delivered_slices import list_withheld_slices as given_back
from autoscaler.contract import ReplicaId
from autoscaler.demand.desired_replicas import exclude_replaced_replicas, list_live_replicas
from autoscaler.demand.residency import evictable_s
from autoscaler.demand.schedule import compute_replica_floor
from autoscaler.placement.index.elastic_requests import ElasticBudget
from autoscaler.placement.model.prices import Prices
from autoscaler.placement.model.request_builder import tenant_set_of
from autoscaler.placement.model.tenant_isolation import TenantSet, domain_of
from autoscaler.placement.model.types import (
    Bin,
    Occupant,
)
from autoscaler.queries.device_health import STUCK_S, list_closed_slices
from autoscaler.queries.gateway_reports import count_running_calls, is_demand_complete
from autoscaler.queries.granted_memory import spare_bytes
from autoscaler.queries.operator_orders import explain_closed_slice
from autoscaler.queries.overcommitted_slices import compute_usable_resources, room_of
from autoscaler.spec.model import StartLimits
from autoscaler.state.lifecycle import BEGINNING, LEAVING, LIVE
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import NO_ROOM, HostAmount, HostResources, Isolation
from autoscaler.state.world import NO_LOAD, DeviceId, NodeId, Replica, Slice, SliceId, World

EXCLUSIVE_S = StartLimits().exclusive_seconds
"""The start lock of a replica whose model document was deleted."""
NOTHING_KEPT: Mapping[SliceId, str] = MappingProxyType({})
ENDING = frozenset({S.STOPPING, S.SCRUBBING, S.FAILED})


def list_start_locks(world: World, now_s: float) -> dict[DeviceId, float]:
    """Return the devices on which a replica starts or wakes, and until when that blocks other starts there.
    A start on a hardware-isolated partition blocks no other.
    """
    ends: dict[DeviceId, float] = {}
    for replica in world.replicas.values():
        came_from = replica.drain.came_from if replica.drain is not None else None
        if replica.state not in BEGINNING and not (replica.state == S.DRAINING and came_from == S.STARTING):
            continue
        model = world.models.get(replica.model)
        last_s = max(replica.since_s, replica.times.started_s or 0.0, replica.times.grown_s or 0.0)
        end_s = last_s + (EXCLUSIVE_S if model is None else model.spec.start.exclusive_seconds)
        for id in replica.resources.slices if end_s > now_s else ():
            slice_ = world.nodes.slices.get(id)
            if slice_ is not None and not _is_cut(slice_):
                ends[slice_.device] = max(end_s, ends.get(slice_.device, 0.0))
    return ends


def _is_cut(slice_: Slice) -> bool:
    return slice_.kind == "dra" and slice_.device_bytes > 0 and slice_.isolation is Isolation.HARDWARE


def stuck_s(replica: Replica) -> float:
    """Return the time from which the replica counts as stuck; infinite while it may still serve."""
    return replica.since_s + STUCK_S if replica.state in ENDING else inf


class BinContext(NamedTuple):
    """Common inputs of all bins of one tick."""

    world: World
    now_s: float
    calls: Mapping[ReplicaId, int]
    demand_complete: bool
    whole: Collection[DeviceId]
    locked: Collection[DeviceId]
    leaving: Collection[ReplicaId]
    staying: Collection[ReplicaId]
    shut: Mapping[SliceId, str]
    prices: Prices


def build_bin_context(
    world: World,
    now_s: float,
    leaving: Collection[ReplicaId] = (),
    staying: Collection[ReplicaId] = (),
    *,
    whole: Collection[DeviceId] | None = None,
    kept: Mapping[SliceId, str] = NOTHING_KEPT,
) -> BinContext:
    """Build the context. `leaving` and `staying`: replicas that this tick drains and revives; `whole`: devices with one
    slice, if known; `kept`: further slices on which nothing new is placed, and why.
    """
    return BinContext(
        world=world,
        now_s=now_s,
        calls=count_running_calls(world),
        demand_complete=is_demand_complete(world, now_s),
        whole=list_whole_devices(world.nodes.slices.values()) if whole is None else whole,
        locked=list_start_locks(world, now_s),
        leaving=leaving,
        staying=staying,
        shut={**kept, **list_closed_slices(world, now_s), **given_back(world)},
        prices=Prices(world.settings.prices),
    )


def build_bins(
    world: World, now_s: float, leaving: Collection[ReplicaId] = (), staying: Collection[ReplicaId] = ()
) -> tuple[Bin, ...]:
    """Build a `Bin` for each slice, in order of ids; see `build_bin_context`."""
    context = build_bin_context(world, now_s, leaving, staying)
    return tuple(build_occupied_bin(context, world.nodes.slices[id]) for id in sorted(world.nodes.slices))


def build_hosts(
    world: World, now_s: float, leaving: Collection[ReplicaId] = (), staying: Collection[ReplicaId] = ()
) -> dict[NodeId, HostResources]:
    """Return the host resources left on each node; see `build_bin_context`."""
    context, ids = build_bin_context(world, now_s, leaving, staying, whole=()), slices_by_node(world)
    return {node: build_host(context, node, ids.get(node, ())) for node in world.nodes.hosts}


def slices_by_node(world: World) -> dict[NodeId, list[SliceId]]:
    """Return the slices of each node."""
    found: dict[NodeId, list[SliceId]] = {}
    for id, slice_ in world.nodes.slices.items():
        found.setdefault(slice_.node, []).append(id)
    return found


def build_host(context: BinContext, node: NodeId, slices: Collection[SliceId]) -> HostResources:
    """Return the resources of a known node and the free part of them. `slices`: all slices of the node."""
    world = context.world
    host, coming = world.nodes.hosts[node], HostAmount()
    for id in {one for slice_ in slices for one in world.by_slice.get(slice_, ())}:
        replica = world.replicas[id]
        host = host.without(replica.resources.host_request)
        if _leaves(context, replica) and context.now_s < stuck_s(replica):
            coming = coming.plus(replica.resources.host_request)
    return host._replace(coming=coming)


def build_empty_bins(world: World) -> tuple[Bin, ...]:
    """Build a `Bin` for each slice, in order of ids, as if it were empty."""
    whole, nothing = list_whole_devices(world.nodes.slices.values()), NO_ROOM
    return tuple(
        Bin(
            slice=slice_,
            whole=slice_.device in whole,
            incumbents=(),
            free=compute_usable_resources(slice_),
            coming=nothing,
            locked=False,
        )
        for _, slice_ in sorted(world.nodes.slices.items())
    )


def build_occupied_bin(context: BinContext, slice_: Slice) -> Bin:
    """Build the `Bin` of a slice with its occupants."""
    shelf = build_bare_bin(context, slice_)
    on_it = (context.world.replicas[id] for id in context.world.by_slice.get(slice_.id, ()))
    shelf.incumbents = tuple(_incumbent(context, replica, slice_) for replica in on_it)
    return shelf


def build_bare_bin(context: BinContext, slice_: Slice) -> Bin:
    """Build the `Bin` of a slice with its free and coming room, but without listing its occupants."""
    free, coming = compute_usable_resources(slice_), NO_ROOM
    trusts, common = set[TenantSet](), domain_of(slice_) is not None
    for replica in (context.world.replicas[id] for id in context.world.by_slice.get(slice_.id, ())):
        if common:
            trusts.add(tenant_set_of(context.world.models.get(replica.model)))
        room = room_of(replica, slice_)
        free = free.less(room)
        if _leaves(context, replica) and context.now_s < stuck_s(replica):
            coming = coming.plus(room)
    return Bin(
        slice=slice_,
        whole=slice_.device in context.whole,
        incumbents=(),
        free=free,
        coming=coming,
        locked=slice_.device in context.locked,
        closed=explain_closed_slice(context.world, slice_) or context.shut.get(slice_.id, ""),
        price=context.prices.of(slice_),
        trusts=frozenset(trust for trust in trusts if trust),
    )


def _leaves(context: BinContext, replica: Replica) -> bool:
    """Whether the replica's room is coming."""
    if replica.id in context.staying:
        return False
    return replica.state in LEAVING or replica.model not in context.world.models or replica.id in context.leaving


def compute_elastic_budget(context: BinContext) -> ElasticBudget:
    """Sum the requested and granted memory of elastic replicas with the current spec.
    Leaving replicas do not count, so that the remaining ones meet the budget without them.
    """
    found, world = ElasticBudget(), context.world
    for name, model in world.models.items():
        for id in world.by_model.get(name, ()) if model.spec.gpu.elastic_percent and spare_bytes(model) else ():
            replica = world.replicas[id]
            same = replica.spec_hash == model.spec_hash() and replica.resources.memory_bytes > 0
            if same and not _leaves(context, replica):
                found.add(model.memory_bytes, min(model.memory_bytes, replica.resources.memory_bytes))
    return found


def list_whole_devices(slices: Collection[Slice]) -> set[DeviceId]:
    """Return the devices that consist of one slice."""
    counts: dict[DeviceId, int] = {}
    for slice_ in slices:
        is_part = slice_.device_bytes > slice_.memory_bytes
        counts[slice_.device] = counts.get(slice_.device, 0) + 1 + is_part
    return {device for device, count in counts.items() if count == 1}


def _incumbent(context: BinContext, replica: Replica, slice_: Slice) -> Occupant:
    world, model = context.world, context.world.models.get(replica.model)
    load = world.loads.get(replica.model, NO_LOAD)
    calls = context.calls.get(replica.id, 0)
    leaving = _leaves(context, replica)
    stays = model is None or leaving or replica.state not in LIVE
    return Occupant(
        replica=replica.id,
        model=replica.model,
        state=replica.state,
        room=room_of(replica, slice_),
        priority=0 if model is None else model.spec.priority,
        busy=not context.demand_complete or load.waiting > 0 or calls > 0,
        kept=model is not None
        and 0
        < compute_replica_floor(world, model, context.now_s).least
        >= len(exclude_replaced_replicas(list_live_replicas(world, model.name))),
        evictable_s=inf if model is None or stays else evictable_s(world, replica, model, calls),
        leaving=leaving,
        stuck=context.now_s >= stuck_s(replica),
        others=len(replica.resources.slices) - 1,
        trust=tenant_set_of(model),
        host_usage=replica.resources.host_request,
    )

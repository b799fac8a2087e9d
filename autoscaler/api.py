"""The read API of the operations port as types (interfaces, section 4).

Owns what a Model, Device or Tenant looks like to a program that asks; `autoscaler.openapi` describes it. Pure: reads
the World that decisions are taken on; knows nothing of HTTP, and never shows a key or its hash.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from autoscaler import weightwords
from autoscaler.contract import DeviceReport, ModelName, PodDevices, ReplicaId, TenantName
from autoscaler.demand import NO_HISTORY, NO_LOAD, idle_s
from autoscaler.fold_faults import quarantined
from autoscaler.model import Model
from autoscaler.nodes import devices_of, fresh, measured, shut
from autoscaler.operators import closed, cordons_on
from autoscaler.ordered import Place
from autoscaler.phases import last_start, told_s
from autoscaler.states import ReplicaState
from autoscaler.world import DeviceId, Fact, NodeId, Replica, Slice, SliceId, World


class DemandView(Fact, frozen=True):
    """Calls of one Model at all gateways, as last reported."""

    waiting: int
    running: int


class ModelView(Fact, frozen=True):
    """One Model and what runs of it."""

    name: ModelName
    engine: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]
    """Each is called as `model:adapter`."""
    memory_bytes: int
    """Of a device, for one Replica; 0 is the whole device."""
    slots: int
    replicas: dict[str, int]
    """State -> how many."""
    demand: DemandView
    last_start_seconds: float | None = None
    last_start_phases: dict[str, float] = {}
    """Seconds of each phase of the start that ended last, of those that are there and were seen to start; `place.*` are
    parts of `place`. A status keeps it longer."""
    idle_seconds: float = 0.0
    """Without a Call for so long it goes to zero, as it is now."""
    idle_auto: bool = False
    """`idleSeconds: auto`: it is doubled each time the Model is called soon after it went to zero."""
    weights: str = ""
    """Those that come from elsewhere: here, absent or failed, as a row of the status says it; empty: none do."""
    faulty: str = ""
    """The exception that quarantined it; empty: it is not quarantined."""


class HeldView(Fact, frozen=True):
    """A Replica that holds a Slice."""

    id: ReplicaId
    model: ModelName
    state: ReplicaState
    memory_bytes: int
    devices: tuple[str, ...] = ()
    """Which Devices of the node its pod has, by their own ids, as its agent says; empty: nobody says so."""


class DeviceView(Fact, frozen=True):
    """A Slice of a Device and who holds it."""

    id: SliceId
    device: DeviceId
    node: NodeId
    product: str
    memory_bytes: int
    compute_percent: int
    isolation: str
    """none, memory or hardware."""
    shared: bool
    healthy: bool
    replicas: tuple[HeldView, ...]
    closed: str = ""
    """Why nothing new is put there; empty: it is open."""
    drains: bool = False
    """What is there moves away."""
    used_bytes: int | None = None
    """Of its Device's memory, as its node's agent measured it lately; None: no agent says so."""


class NodeView(Fact, frozen=True):
    """One node, and what its agent said last."""

    name: NodeId
    cordoned: bool
    drains: bool
    age_seconds: float | None = None
    """Of the report; None: there was none."""
    fresh: bool = False
    """The report is recent enough to count."""
    copies: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    pods: tuple[PodDevices, ...] = ()


class TenantView(Fact, frozen=True):
    """One Tenant. Of its keys only the number is told."""

    name: TenantName
    weight: float
    keys: int


class Sentences(Fact, frozen=True):
    """An explanation for people, one sentence each; of what happened the newest first."""

    sentences: tuple[str, ...]


class Problem(Fact, frozen=True):
    """What was wrong with the request, and what there is instead."""

    error: str


def named(world: World, name: str) -> Model | None:
    """The Model that clients reach by `name`, which may be an alias, or one of its adapters; None: nobody has it."""
    known = world.models.get(ModelName(name))
    return known or next((m for m in world.models.values() if name in (*m.names(), *m.adapter_names())), None)


def model_view(world: World, model: Model) -> ModelView:
    """One Model as it is now."""
    if model.name in quarantined(world):
        return _faulty_view(world, model)
    load, history = world.loads.get(model.name, NO_LOAD), world.histories.get(model.name, NO_HISTORY)
    last = last_start(world.replicas[id] for id in world.by_model.get(model.name, ()))
    return ModelView(
        name=model.name,
        engine=model.spec.engine,
        aliases=model.spec.aliases,
        adapters=tuple(adapter.name for adapter in model.spec.adapters),
        memory_bytes=model.memory_bytes,
        slots=model.slots,
        replicas=dict(Counter(world.replicas[id].state.value for id in world.by_model.get(model.name, ()))),
        demand=DemandView(waiting=load.waiting, running=load.running),
        last_start_seconds=history.starts_s[-1] if history.starts_s else None,
        last_start_phases={} if last is None else told_s(last),
        idle_seconds=idle_s(world, model, history)[0],
        idle_auto=model.spec.idle_seconds == "auto",
        weights=weightwords.word(world, model),
    )


def _faulty_view(world: World, model: Model) -> ModelView:
    """Of a quarantined Model: only what is read, and nothing that is computed of it."""
    load = world.loads.get(model.name, NO_LOAD)
    return ModelView(
        name=model.name,
        engine=model.spec.engine,
        aliases=model.spec.aliases,
        adapters=tuple(adapter.name for adapter in model.spec.adapters),
        memory_bytes=model.memory_bytes,
        slots=model.slots,
        replicas=dict(Counter(world.replicas[id].state.value for id in world.by_model.get(model.name, ()))),
        demand=DemandView(waiting=load.waiting, running=load.running),
        faulty=world.faults[model.name].reason,
    )


def models(world: World) -> tuple[ModelView, ...]:
    """All Models, in order of names."""
    return tuple(model_view(world, world.models[name]) for name in sorted(world.models))


def devices(world: World, now_s: float) -> tuple[DeviceView, ...]:
    """All Slices, in order of ids."""
    sick = shut(world, now_s)
    return tuple(_device(world, world.slices[id], now_s, sick.get(id, "")) for id in sorted(world.slices))


def nodes(world: World, now_s: float) -> tuple[NodeView, ...]:
    """All nodes that have a Slice, an order or an agent, in order of names."""
    ordered = {cordon.node for cordon in world.cordons.values()}
    names = {one.node for one in world.slices.values()} | ordered | world.nodes.keys()
    return tuple(_node(world, NodeId(name), now_s) for name in sorted(names))


def _node(world: World, name: NodeId, now_s: float) -> NodeView:
    cordon, known = world.cordons.get(Place("node", name)), world.nodes.get(name)
    view = NodeView(name=name, cordoned=cordon is not None, drains=cordon is not None and cordon.drain)
    if known is None:
        return view
    said = known.report
    return replace(
        view,
        age_seconds=now_s - known.seen_s,
        fresh=fresh(known, now_s),
        copies=said.copies,
        images=said.images,
        devices=said.devices,
        pods=said.pods,
    )


def _device(world: World, one: Slice, now_s: float, sick: str) -> DeviceView:
    report = measured(world, one, now_s)
    held = (world.replicas[id] for id in world.by_slice.get(one.id, ()))
    return DeviceView(
        id=one.id,
        device=one.device,
        node=one.node,
        product=one.product,
        memory_bytes=one.memory_bytes,
        compute_percent=one.compute_percent,
        isolation=one.isolation.name.lower(),
        shared=one.shared,
        healthy=one.healthy,
        replicas=tuple(_held(world, replica, now_s) for replica in held),
        closed=closed(world, one) or sick,
        drains=any(cordon.drain for cordon in cordons_on(world, one)),
        used_bytes=None if report is None else report.used_bytes,
    )


def _held(world: World, replica: Replica, now_s: float) -> HeldView:
    devices = tuple(device.id for device in devices_of(world, replica, now_s))
    return HeldView(
        id=replica.id, model=replica.model, state=replica.state, memory_bytes=replica.memory_bytes, devices=devices
    )


def tenants(world: World) -> tuple[TenantView, ...]:
    """All Tenants, in order of names."""
    rows = (world.tenants[name] for name in sorted(world.tenants))
    return tuple(TenantView(name=row.name, weight=row.spec.weight, keys=len(row.spec.keys)) for row in rows)

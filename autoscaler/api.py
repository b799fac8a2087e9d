"""The read API of the operations port as types, and its description (interfaces, section 4).

Owns what a Model, Device or Tenant looks like to a program that asks, and the OpenAPI document that is generated from
those types, so that it cannot say anything else than the answers do. Pure: reads the World that decisions are taken on;
knows nothing of HTTP, and never shows a key or its hash.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from autoscaler.actions import Plan
from autoscaler.contract import DeviceReport, ModelName, PodDevices, ReplicaId, TenantName
from autoscaler.demand import NO_HISTORY, NO_LOAD, idle_window_s
from autoscaler.explain import Explanation, Row
from autoscaler.model import Model
from autoscaler.nodes import devices_of, fresh, ill, measured
from autoscaler.operators import closed, cordons_on
from autoscaler.ordered import Place
from autoscaler.orders import Told, Wish
from autoscaler.phases import last_start, told_s
from autoscaler.states import ReplicaState
from autoscaler.world import DeviceId, Fact, NodeId, Replica, Slice, SliceId, World

OPENAPI = "3.1.0"
OPENAPI_PATH = "/api/v1/openapi.json"
REF = "#/components/schemas/{name}"


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
        idle_seconds=idle_window_s(model, history),
        idle_auto=model.spec.idle_seconds == "auto",
    )


def models(world: World) -> tuple[ModelView, ...]:
    """All Models, in order of names."""
    return tuple(model_view(world, world.models[name]) for name in sorted(world.models))


def devices(world: World, now_s: float) -> tuple[DeviceView, ...]:
    """All Slices, in order of ids."""
    sick = ill(world, now_s)
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


class Read(NamedTuple):
    """One path of the API: what it says, and of which type the answer is."""

    path: str
    summary: str
    kind: object
    named: bool = False
    """Ends in {name}: a Model's name or alias, which may be unknown."""


READS = (
    Read("/api/v1/status", "What runs, waits and sleeps, and why", tuple[Row, ...]),
    Read("/api/v1/off", "What does not work in this mode; mostly nothing", Sentences),
    Read("/api/v1/models", "All Models", tuple[ModelView, ...]),
    Read("/api/v1/models/{name}", "One Model", ModelView, named=True),
    Read("/api/v1/tenants", "All Tenants", tuple[TenantView, ...]),
    Read("/api/v1/devices", "All Devices, and who holds them", tuple[DeviceView, ...]),
    Read("/api/v1/nodes", "All nodes, and what their agents say", tuple[NodeView, ...]),
    Read("/api/v1/plan", "The latest Plan", Plan),
    Read("/api/v1/explain/model/{name}", "Why a Model runs, waits or is stopped", Explanation, named=True),
    Read("/api/v1/explain/last", "The latest decisions, newest first", Sentences),
)


class Act(NamedTuple):
    """One order: where it is posted, and what it does."""

    path: str
    summary: str


ACTS = (
    Act("/api/v1/models/{name}/wake", "Start a Model now and keep it for an idle window"),
    Act("/api/v1/models/{name}/stop", "Drain all that runs of a Model; Calls wake it again"),
    Act("/api/v1/devices/{name}/cordon", "Put nothing new on a Device"),
    Act("/api/v1/devices/{name}/uncordon", "Open a Device again"),
    Act("/api/v1/devices/{name}/drain", "Put nothing new on a Device, and move what is there"),
    Act("/api/v1/nodes/{name}/cordon", "Put nothing new on a node"),
    Act("/api/v1/nodes/{name}/uncordon", "Open a node again"),
    Act("/api/v1/nodes/{name}/drain", "Put nothing new on a node, and move what is there"),
)
REFUSALS = {
    "400": "The body is not what it should be",
    "401": "An order needs a key of role operator",
    "403": "The key has another role, or a page of another origin asks",
    "404": "There is none of this name",
    "409": "It cannot be done as things are",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "500": "The order could not be kept, and is not in force",
    "503": "This autoscaler does not lead, or has just begun",
}


def openapi(version: str) -> bytes:
    """The description of READS and ACTS as JSON (https://spec.openapis.org/oas/v3.1.0). `version` is Pilotlight's."""
    kinds = [*(read.kind for read in READS), Told, Wish, Problem]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    paths: dict[str, object] = {}
    for read, schema in zip(READS, schemas, strict=False):
        answers = {"200": _answer("The answer", schema)}
        if read.named:
            answers["404"] = _answer("There is none of this name", schemas[-1])
        operation: dict[str, object] = {"summary": read.summary, "operationId": _id(read.path), "responses": answers}
        if read.named:
            operation["parameters"] = [NAMED]
        paths[read.path] = {"get": operation}
    for act in ACTS:
        paths[act.path] = {"post": _act(act, *schemas[-3:])}
    document = {
        "openapi": OPENAPI,
        "info": {
            "title": "Pilotlight operations",
            "version": version,
            "description": "What decisions rest on, and an operator's orders. Times are seconds; sizes are bytes.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(document)


NAMED: dict[str, object] = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def _act(act: Act, told: object, wish: object, problem: object) -> dict[str, object]:
    answers = {"200": _answer("What will happen", told)}
    answers |= {status: _answer(why, problem) for status, why in REFUSALS.items()}
    return {
        "summary": act.summary,
        "operationId": _id(act.path),
        "parameters": [NAMED],
        "requestBody": {"required": True, "content": {"application/json": {"schema": wish}}},
        "responses": answers,
    }


def _answer(description: str, schema: object) -> dict[str, object]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _id(path: str) -> str:
    """`explain-model` for /api/v1/explain/model/{name}; a collection and its one member differ by `one-`."""
    words = [word for word in path.removeprefix("/api/v1/").split("/") if word != "{name}"]
    return "-".join((["one"] if path == "/api/v1/models/{name}" else []) + words)

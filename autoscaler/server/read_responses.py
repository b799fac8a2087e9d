"""The read API of the operations port (interfaces, section 4): the `World` as the types of
`autoscaler.queries.response_types`.

Pure: reads the `World` that decisions use. It does not depend on HTTP, and never returns an API key or its hash.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.demand.idle_timeout import effective_idle_window
from autoscaler.explain import weights
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.fold.quarantine_mask import mask_quarantined
from autoscaler.queries.agent_reports import devices_of, find_device_report, is_report_fresh
from autoscaler.queries.device_health import list_closed_slices
from autoscaler.queries.operator_orders import cordons_on, explain_closed_slice
from autoscaler.queries.response_types import DemandView, DeviceView, HeldView, ModelView, NodeView, TenantView
from autoscaler.queries.start_phases import last_start, phases_with_parts_s
from autoscaler.spec.model import Model
from autoscaler.state.world import NO_HISTORY, NO_LOAD, CordonTarget, NodeId, Replica, Slice, World


def find_model(world: World, name: str) -> Model | None:
    """Return the Model with this name, alias or adapter name; None: there is no such Model."""
    known = world.models.get(ModelName(name))
    return known or next((m for m in world.models.values() if name in (*m.names(), *m.adapter_names())), None)


def model_view(world: World, model: Model) -> ModelView:
    """Return the current state of one Model."""
    if model.name in list_quarantined_models(world):
        return replace(_documented(world, model), faulty=world.learned.faults[model.name].reason)
    history = world.learned.histories.get(model.name, NO_HISTORY)
    last = last_start(world.replicas[id] for id in world.by_model.get(model.name, ()))
    return replace(
        _documented(world, model),
        last_start_seconds=history.starts_s[-1] if history.starts_s else None,
        last_start_phases={} if last is None else phases_with_parts_s(last),
        idle_seconds=effective_idle_window(world, model, history)[0],
        idle_auto=model.spec.idle_seconds == "auto",
        weights=weights.weights_state(world, model),
    )


def _documented(world: World, model: Model) -> ModelView:
    """Return the data that need no computation, so that a quarantined Model can be shown."""
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
    )


def list_models(world: World) -> tuple[ModelView, ...]:
    """Return all Models, ordered by name."""
    return tuple(model_view(world, world.models[name]) for name in sorted(world.models))


def list_devices(world: World, now_s: float) -> tuple[DeviceView, ...]:
    """Return all slices, ordered by ID."""
    masked = mask_quarantined(world)
    sick = list_closed_slices(masked, now_s)
    slices = (world.nodes.slices[id] for id in sorted(world.nodes.slices))
    return tuple(_device(world, masked, one, now_s, sick.get(one.id, "")) for one in slices)


def list_nodes(world: World, now_s: float) -> tuple[NodeView, ...]:
    """Return all nodes that have a slice, an order or an agent, ordered by name."""
    ordered = {cordon.node for cordon in world.nodes.cordons.values()}
    names = {one.node for one in world.nodes.slices.values()} | ordered | world.nodes.agents.keys()
    return tuple(_node(world, NodeId(name), now_s) for name in sorted(names))


def _node(world: World, name: NodeId, now_s: float) -> NodeView:
    cordon, known = world.nodes.cordons.get(CordonTarget("node", name)), world.nodes.agents.get(name)
    view = NodeView(name=name, cordoned=cordon is not None, drains=cordon is not None and cordon.drain)
    if known is None:
        return view
    said = known.report
    return replace(
        view,
        age_seconds=now_s - known.seen_s,
        fresh=is_report_fresh(known, now_s),
        copies=said.copies,
        images=said.images,
        devices=said.devices,
        pods=said.pods,
    )


def _device(world: World, masked: World, one: Slice, now_s: float, sick: str) -> DeviceView:
    report, out = find_device_report(masked, one, now_s), list_quarantined_models(world)
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
        replicas=tuple(
            _held(replica, () if replica.model in out else _device_ids(world, replica, now_s)) for replica in held
        ),
        closed=explain_closed_slice(masked, one) or sick,
        drains=any(cordon.drain for cordon in cordons_on(masked, one)),
        used_bytes=None if report is None else report.used_bytes,
    )


def _device_ids(world: World, replica: Replica, now_s: float) -> tuple[str, ...]:
    return tuple(device.id for device in devices_of(world, replica, now_s))


def _held(replica: Replica, devices: tuple[str, ...]) -> HeldView:
    return HeldView(
        id=replica.id,
        model=replica.model,
        state=replica.state,
        memory_bytes=replica.resources.memory_bytes,
        devices=devices,
    )


def list_tenants(world: World) -> tuple[TenantView, ...]:
    """Return all Tenants, ordered by name."""
    rows = (world.tenants[name] for name in sorted(world.tenants))
    return tuple(TenantView(name=row.name, weight=row.spec.weight, keys=len(row.spec.keys)) for row in rows)

"""Masks quarantined Models in the `World` that the planner sees (`autoscaler.controller.fault_attribution`). Pure.

Invariants: replicas of a quarantined Model keep their slices, state and tenants, and cannot be evicted; other Models
are unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.world import Fault, World

NEVER_S: Final = 1e9
"""A time that the monotonic clock does not reach."""
PINNED: Final = 2_000_000_000
"""Priority that prevents eviction: above the highest that a document may have."""

V = TypeVar("V")


def assume_quarantined(world: World, names: Collection[ModelName]) -> World:
    """Return the `World` in which these Models are quarantined, too."""
    if not names:
        return world
    fault = Fault(reason="", seen_s=0.0, until_s=NEVER_S)
    faults = {**world.learned.faults, **dict.fromkeys(names, fault)}
    return replace(world, learned=replace(world.learned, faults=faults))


def mask_quarantined(world: World, names: Collection[ModelName] | None = None) -> World:
    """Return the `World` for the planner while `names` (None: those quarantined now) are quarantined.

    Their replicas belong to stand-in Models without demand. A Model that an operator stopped gets no stand-in, so that
    its replicas drain.
    """
    out = list_quarantined_models(world) if names is None else frozenset(names)
    if not out:
        return world
    aliases = {name: ModelName(f"{name} (quarantined)") for name in out}
    models = {name: model for name, model in world.models.items() if name not in out}
    by_model = _without(world.by_model, out)
    stops = _without(world.stops, out)
    replicas = dict(world.replicas)
    for name in out:
        ids = world.by_model.get(name, ())
        for id in ids:
            replicas[id] = replace(replicas[id], model=aliases[name], move=None)
        if name in world.stops or name not in world.models:
            by_model[aliases[name]] = ids
        else:
            models[aliases[name]] = _stand_in(world.models[name], aliases[name])
        if name in world.stops:
            stops[aliases[name]] = world.stops[name]
    hidden = {id for name in out for id in world.by_model.get(name, ())}
    rented = replace(world.rented, guests=world.rented.guests - hidden, idlers=world.rented.idlers - out)
    return replace(
        world, models=models, by_model=by_model, replicas=replicas, stops=stops, rented=rented,
        loads=_without(world.loads, out),
        learned=replace(world.learned, histories=_without(world.learned.histories, out)),
    )  # fmt: skip


def _stand_in(model: Model, name: ModelName) -> Model:
    of = model.spec
    spec = ModelSpec(
        engine="command", tenants=of.tenants, priority=PINNED, paused=True, start=of.start,
        drain_seconds_max=of.drain_seconds_max,
    )  # fmt: skip
    return Model(name=name, spec=spec, memory_bytes=model.memory_bytes)


def _without(mapping: Mapping[ModelName, V], names: Collection[ModelName]) -> dict[ModelName, V]:
    return {name: value for name, value in mapping.items() if name not in names}

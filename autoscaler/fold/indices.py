"""Derived indices of the `World`: the replicas of each Model and slice, and the demand of each Model.

The fold updates these maps incrementally with the functions here; `rebuild_indices` computes all of them from scratch.
Both give the same result after any batch (checked by a property test). IDs in an index are sorted, so that it does not
depend on the order of observations.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from msgspec.structs import replace

from autoscaler.contract import (
    REPORT_EXPIRY_S,
    GatewayId,
    Level,
    ModelName,
    ReplicaId,
    ReplicaUse,
    Report,
    TenantName,
)
from autoscaler.state.world import NO_LOAD, Gateway, ModelLoad, SliceId, World


def with_id(ids: tuple[ReplicaId, ...], id: ReplicaId) -> tuple[ReplicaId, ...]:
    """Return `ids` with `id` inserted in sorted order, unless present."""
    if id in ids:
        return ids
    longer = list(ids)
    insort(longer, id)
    return tuple(longer)


def is_report_expired(gateway: Gateway, now_s: float) -> bool:
    """Whether the gateway's report is too old to count, which does not mean that the gateway is dead.

    Compares with the sum for which the plan wakes the loop: rounding could make the difference smaller at that time.
    """
    return now_s >= gateway.seen_s + REPORT_EXPIRY_S


def levels_of(gateway: Gateway, now_s: float) -> dict[ModelName, tuple[Level, ...]]:
    """The demand per Model in the last report; empty if the report has expired."""
    return {} if gateway.report is None or is_report_expired(gateway, now_s) else demand_in(gateway.report)


def demand_in(report: Report) -> dict[ModelName, tuple[Level, ...]]:
    """The demand per Model in a report. Levels without requests are left out."""
    levels: dict[ModelName, list[Level]] = {}
    for level in report.levels:
        if level.waiting or level.running:
            levels.setdefault(level.model, []).append(level)
    return {model: tuple(rows) for model, rows in levels.items()}


def uses_of(report: Report | None) -> dict[ReplicaId, ReplicaUse]:
    """The replica uses in a report, without ages, because an increased age alone is not a change."""
    uses = () if report is None else report.replicas
    return {u.replica: u if u.last_byte_age_s is None else replace(u, last_byte_age_s=None) for u in uses}


def load_of(gateways: Mapping[GatewayId, Gateway], model: ModelName) -> ModelLoad:
    """The demand of one Model, summed over all gateways whose report counts."""
    waiting = running = 0
    oldest_s: float | None = None
    tenants: set[TenantName] = set()
    waiting_at: set[GatewayId] = set()
    for gateway in gateways.values():
        for level in gateway.levels.get(model, ()):
            running += level.running
            tenants.add(level.tenant)
            if level.waiting:
                waiting += level.waiting
                waiting_at.add(gateway.id)
                since_s = gateway.seen_s - level.oldest_wait_s
                oldest_s = since_s if oldest_s is None else min(oldest_s, since_s)
    if not tenants:
        return NO_LOAD
    return ModelLoad(
        waiting=waiting,
        running=running,
        oldest_s=oldest_s,
        tenants=frozenset(tenants),
        waiting_at=frozenset(waiting_at),
    )


def rebuild_indices(world: World, now_s: float) -> World:
    """Return `world` with all indices computed from scratch; equal to `world` after any batch folded at `now_s`."""
    gateways = {id: replace(g, levels=levels_of(g, now_s), uses=uses_of(g.report)) for id, g in world.gateways.items()}
    by_model: dict[ModelName, tuple[ReplicaId, ...]] = {}
    by_slice: dict[SliceId, tuple[ReplicaId, ...]] = {}
    for replica in world.replicas.values():
        by_model[replica.model] = with_id(by_model.get(replica.model, ()), replica.id)
        for slice_ in replica.resources.slices:
            by_slice[slice_] = with_id(by_slice.get(slice_, ()), replica.id)
    models = {model for gateway in gateways.values() for model in gateway.levels}
    loads = {model: load_of(gateways, model) for model in models}
    return replace(world, gateways=gateways, by_model=by_model, by_slice=by_slice, loads=loads)

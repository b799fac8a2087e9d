"""The snapshot of catalogue and Routes on disk, so that a gateway can serve while no autoscaler responds.

One file with mode 0600, replaced atomically. It contains key hashes and engine addresses, never a key, prompt or
response. Holds are saved as 0: a process that loads the file has no allocation, and the stated bound for a silent
leader applies (interfaces, section 6).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from autoscaler.contract import CatalogueDelta, RoutesDelta, make_decoder


class GatewaySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Catalogue and Routes as full deltas."""

    catalogue: CatalogueDelta = CatalogueDelta(epoch=0, version=0, full=True)
    routes: RoutesDelta = RoutesDelta(epoch=0, version=0, full=True)


def with_catalogue(known: GatewaySnapshot, delta: CatalogueDelta) -> GatewaySnapshot:
    """Return `known` with a change of the catalogue applied; unchanged if the delta is older."""
    before = known.catalogue
    if (delta.epoch, delta.version) < (before.epoch, before.version):
        return known
    models = {} if delta.full else {entry.name: entry for entry in before.models}
    tenants = {} if delta.full else {entry.name: entry for entry in before.tenants}
    models.update((entry.name, entry) for entry in delta.models)
    tenants.update((entry.name, entry) for entry in delta.tenants)
    merged = CatalogueDelta(
        epoch=delta.epoch,
        version=delta.version,
        full=True,
        models=tuple(entry for name, entry in models.items() if name not in delta.models_gone),
        tenants=tuple(entry for name, entry in tenants.items() if name not in delta.tenants_gone),
        settings=delta.settings if delta.settings is not None else before.settings,
    )
    return GatewaySnapshot(catalogue=merged, routes=known.routes)


def with_routes(known: GatewaySnapshot, delta: RoutesDelta) -> GatewaySnapshot:
    """Return `known` with a change of Routes applied; unchanged if the delta is older."""
    before = known.routes
    if (delta.epoch, delta.version) < (before.epoch, before.version):
        return known
    routes = {} if delta.full else {route.replica: route for route in before.replicas}
    models = {} if delta.full else {model.model: model for model in before.models}
    routes.update((route.replica, msgspec.structs.replace(route, hold=0)) for route in delta.replicas)
    models.update((model.model, model) for model in delta.models)
    merged = RoutesDelta(
        epoch=delta.epoch,
        version=delta.version,
        full=True,
        gateways=delta.gateways,
        replicas=tuple(route for name, route in routes.items() if name not in delta.replicas_gone),
        models=tuple(model for name, model in models.items() if name not in delta.models_gone),
    )
    return GatewaySnapshot(catalogue=known.catalogue, routes=merged)


def save_snapshot(path: Path, known: GatewaySnapshot) -> None:
    """Replace the file. Raises OSError."""
    fresh = path.with_suffix(".tmp")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(known))
    fresh.replace(path)


def load_snapshot(path: Path) -> GatewaySnapshot | None:
    """Return the saved snapshot; None if there is none. Raises msgspec.DecodeError or OSError if it cannot be read."""
    try:
        return make_decoder(GatewaySnapshot)(path.read_bytes())
    except FileNotFoundError:
        return None

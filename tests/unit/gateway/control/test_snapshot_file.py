"""The snapshot that a gateway keeps on disk: deltas merged into one state, private, without slot allocations."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from autoscaler.contract import (
    CatalogueDelta,
    FrontSettings,
    KeyEntry,
    ModelEntry,
    ModelName,
    ModelRoute,
    ReplicaId,
    Route,
    RoutesDelta,
    TenantEntry,
    TenantName,
)
from gateway.control import snapshot_file
from gateway.control.snapshot_file import GatewaySnapshot, with_catalogue, with_routes

ACME = TenantEntry(name=TenantName("acme"), keys=(KeyEntry(sha256="5" * 64),))


def entry(name: str, slots: int = 1) -> ModelEntry:
    return ModelEntry(name=ModelName(name), served_name=name, slots=slots)


def route(name: str, hold: int = 3) -> Route:
    return Route(
        replica=ReplicaId(name), model=ModelName("a"), state="ready", address="127.0.0.1:1", slots=4, hold=hold
    )


def catalogue(version: int, **fields: object) -> CatalogueDelta:
    return msgspec.convert({"epoch": 1, "version": version, **fields}, CatalogueDelta)


def test_later_catalogue_deltas_add_replace_and_remove_models_in_snapshot() -> None:
    known = with_catalogue(GatewaySnapshot(), catalogue(1, full=True, models=(entry("a"), entry("b")), tenants=(ACME,)))
    known = with_catalogue(known, catalogue(2, models=(entry("b", 7), entry("c")), models_gone=("a",)))
    known = with_catalogue(known, catalogue(3, tenants_gone=("acme",), settings=FrontSettings(keys_needed=True)))
    known = with_catalogue(known, catalogue(4))
    assert [(model.name, model.slots) for model in known.catalogue.models] == [("b", 7), ("c", 1)]
    assert (known.catalogue.full, known.catalogue.version, known.catalogue.tenants) == (True, 4, ())
    assert known.catalogue.settings == FrontSettings(keys_needed=True)


def test_full_delta_replaces_the_earlier_snapshot_content() -> None:
    known = with_catalogue(GatewaySnapshot(), catalogue(1, models=(entry("a"),), tenants=(ACME,)))
    known = with_catalogue(known, catalogue(2, full=True, models=(entry("b"),)))
    assert ([model.name for model in known.catalogue.models], known.catalogue.tenants) == (["b"], ())
    known = with_routes(known, RoutesDelta(epoch=1, version=1, replicas=(route("r1"),)))
    known = with_routes(known, RoutesDelta(epoch=2, version=2, full=True, replicas=(route("r2"),)))
    assert ([one.replica for one in known.routes.replicas], known.routes.epoch) == (["r2"], 2)


def test_delta_of_an_older_leader_does_not_change_the_snapshot() -> None:
    known = with_catalogue(GatewaySnapshot(), catalogue(9, full=True, models=(entry("a"),)))
    known = with_routes(known, RoutesDelta(epoch=2, version=1, full=True, replicas=(route("r2"),)))
    late = with_catalogue(known, catalogue(8, full=True, models=(entry("b"),)))
    assert with_routes(late, RoutesDelta(epoch=1, version=99, full=True, replicas=(route("r1"),))) == known


def test_routes_in_the_snapshot_have_a_slot_allocation_of_zero() -> None:
    delta = RoutesDelta(
        epoch=1, version=1, replicas=(route("r1", 3), route("r2", 1)), models=(ModelRoute(model=ModelName("a")),)
    )
    known = with_routes(GatewaySnapshot(), delta)
    known = with_routes(known, RoutesDelta(epoch=1, version=2, gateways=2, replicas_gone=(ReplicaId("r1"),)))
    assert [(one.replica, one.hold) for one in known.routes.replicas] == [("r2", 0)]
    assert (known.routes.gateways, len(known.routes.models)) == (2, 1)


def test_saved_snapshot_loads_unchanged_from_a_file_of_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "g1.kept.json"
    known = with_routes(with_catalogue(GatewaySnapshot(), catalogue(1, models=(entry("a"),), tenants=(ACME,))),
                        RoutesDelta(epoch=1, version=1, replicas=(route("r1"),)))  # fmt: skip
    path.write_text("older and longer" * 1000)
    path.chmod(0o644)
    snapshot_file.save_snapshot(path, known)
    assert snapshot_file.load_snapshot(path) == known
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["g1.kept.json"]


def test_missing_snapshot_file_loads_as_none_and_corrupt_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "g1.kept.json"
    assert snapshot_file.load_snapshot(path) is None
    for broken in (b'{"catalogue": 3}', b'{"later":' + b"[" * 5000, b'{"catalogue":{"epoch":"\xff"}}'):
        path.write_bytes(broken)
        with pytest.raises(msgspec.DecodeError):
            snapshot_file.load_snapshot(path)

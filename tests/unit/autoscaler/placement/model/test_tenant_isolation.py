"""Tenant isolation: models of different tenants never share a device that is divided only by the cluster's software."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId, TenantName
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.request_builder import tenant_set_of
from autoscaler.placement.model.tenant_isolation import (
    NO_TENANT,
    Domain,
    DomainOccupancy,
    TenantSet,
    domain_of,
    has_tenant_conflict,
)
from autoscaler.placement.model.types import Bin, EvictionLevel, Occupant, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Model
from autoscaler.state.actions import StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import Isolation, ResourceAmount
from autoscaler.state.world import DeviceId, NodeId, Replica, Slice, SliceId, World
from tests.support.builders.placement_requests import placement_request
from tests.support.builders.worlds import GI, T0, drain, gateway, kinds, level, model, replica, world
from tests.support.example_budget import examples

ACME, BOLT = TenantName("acme"), TenantName("bolt")
TRUSTS: tuple[TenantSet, ...] = ((), (ACME,), (BOLT,), (ACME, BOLT), NO_TENANT)
APART = {"mps": Isolation.MEMORY, "hami": Isolation.MEMORY, "mig": Isolation.HARDWARE}
FOR_OTHERS = "a shared device of its node is in use for other tenants (a)"


def share(device: str, at: int, kind: str = "timeslice", *, shared: bool = False, node: str = "") -> Slice:
    """One share of a device, as a cluster publishes it; by default each device has its own node."""
    return Slice(
        id=SliceId(f"{device}/s{at}"), device=DeviceId(device), node=NodeId(node or f"n-{device}"), memory_bytes=8 * GI,
        isolation=APART.get(kind, Isolation.NONE), shared=shared, kind=kind, device_bytes=16 * GI,
    )  # fmt: skip


def own(name: str, *tenants: TenantName) -> Model:
    """A model for these tenants only; without any, for all tenants."""
    return model(name, 6, tenants=tenants or None)


A, B = own("a", ACME), own("b", BOLT)
TWO = (share("g0", 0), share("g0", 1))


def on(of: Model, at: Slice, *, busy: bool = False, **fields: Any) -> Replica:
    """A replica that has been resident for a long time, or, if busy, has just become ready."""
    since_s = T0 if busy else T0 - 10_000
    return replica(of, f"{of.name}-{at.id}", [at.id], **{"since_s": since_s, "ready_s": since_s, **fields})


def calls(models: Iterable[Model], slices: Iterable[Slice], replicas: Iterable[Replica], *names: str) -> World:
    """A `World` with a queued request for each of these models."""
    return world(models, slices, replicas, [gateway(levels=[level(name, 1, wait_s=60) for name in names])])


def unmet(made: World) -> list[str]:
    return [one.reason for one in plan(made, T0).unmet]


@pytest.mark.parametrize("kind", ["timeslice", "mps", "hami"])
def test_different_tenants_never_share_a_time_sliced_mps_or_hami_device(kind: str) -> None:
    slices = [share("g0", 0, kind), share("g0", 1, kind)]
    here = [on(A, slices[0], busy=True)]
    full = calls([A, B], slices, here, "b")
    assert kinds(plan(full, T0)) == []
    where = "its device" if kind == "hami" else "a shared device of its node"
    assert unmet(full) == [f"needs 6Gi on one device; {where} is in use for other tenants (a)"]
    other = share("g1", 0, kind)
    start = plan(calls([A, B], [*slices, other], here, "b"), T0)
    assert kinds(start) == ["start b"]
    assert [one.replica.resources.slices for one in start.actions if isinstance(one, StartReplica)] == [(other.id,)]


@pytest.mark.parametrize(("kind", "starts"), [("timeslice", []), ("mps", []), ("hami", ["start b"])])
def test_tenants_share_a_node_only_if_pods_can_select_a_device(kind: str, starts: list[str]) -> None:
    """With the device plugin's resource a pod may get any device of its node; HAMi accepts a selection."""
    slices = [share("g0", 0, kind, node="n"), share("g1", 0, kind, node="n")]
    assert kinds(plan(calls([A, B], slices, [on(A, slices[0], busy=True)], "b"), T0)) == starts
    assert kinds(plan(calls([A, B], slices, [], "a", "b"), T0)) == ["start a", *starts], "they come together"


@pytest.mark.parametrize("tenants", [(), (ACME,), (BOLT, ACME)])
def test_models_with_a_common_tenant_or_no_tenants_share_a_device(tenants: tuple[TenantName, ...]) -> None:
    b = own("b", *tenants)
    assert kinds(plan(calls([A, b], TWO, [on(A, TWO[0], busy=True)], "b"), T0)) == ["start b"]


@pytest.mark.parametrize("kind", ["mig", ""])
def test_different_tenants_share_a_gpu_with_mig_or_without_slicing_kind(kind: str) -> None:
    slices = [share("g0", 0, kind, shared=not kind), share("g0", 1, kind, shared=not kind)]
    assert not any(domain_of(one) for one in slices)
    assert kinds(plan(calls([A, B], slices, [on(A, slices[0], busy=True)], "b"), T0)) == ["start b"]


def test_replica_evicts_all_idle_replicas_of_another_tenant_on_its_device() -> None:
    """Although another share of the device is free."""
    answer = packed([FOR_BOLT], [taken(0), taken(1), shelf(share("g0", 2), [])])
    assert [one.replica for one in answer.victims] == ["r0", "r1"]
    assert [one.reason for one in answer.unmet] == ["waits on g0/s0 for the eviction of a"]


def test_nothing_is_evicted_if_one_replica_of_another_tenant_must_stay() -> None:
    answer = packed([FOR_BOLT], [taken(0), taken(1, evictable_s=T0 + 1), shelf(share("g0", 2), [])])
    assert answer.victims == ()
    assert [one.reason for one in answer.unmet] == [f"needs 6Gi on one device; {FOR_OTHERS}"]


def test_eviction_prefers_one_idle_replica_then_two_idle_then_a_busy_one() -> None:
    """One idle replica on another device instead of two here, although both devices have a free share."""
    here, there = [taken(0), taken(1), shelf(share("g0", 2), [])], [taken(3, "g1"), shelf(share("g1", 4), [])]
    assert [one.replica for one in packed([FOR_BOLT], [*here, *there]).victims] == ["r3"]
    dear = [taken(3, "g1", busy=True), there[1]]
    assert [one.replica for one in packed([FOR_BOLT], [*here, *dear]).victims] == ["r0", "r1"]


def test_other_tenants_wait_until_the_draining_replica_leaves_the_device() -> None:
    going = on(A, TWO[0], state=S.DRAINING, drain=drain())
    made = calls([A, B], TWO, [going], "b")
    assert kinds(plan(made, T0)) == []
    assert unmet(made) == ["waits on g0/s0 until a has stopped"]
    removed = replace(made, replicas={}, by_slice={}, by_model={})
    assert kinds(plan(removed, T0)) == ["start b"]


def test_draining_replica_of_a_deleted_model_blocks_models_with_tenants() -> None:
    going = on(A, TWO[0], state=S.DRAINING, drain=drain())
    assert kinds(plan(calls([B], TWO, [going], "b"), T0)) == []
    assert kinds(plan(calls([own("b")], TWO, [going], "b"), T0)) == ["start b"]
    assert tenant_set_of(None) == tenant_set_of(model("x", tenants=())) == NO_TENANT


def test_only_the_first_of_two_models_of_different_tenants_gets_the_device() -> None:
    made = calls([A, B], TWO, [], "a", "b")
    assert kinds(plan(made, T0)) == ["start a"]
    assert unmet(made) == [
        "needs 6Gi on one device; a shared device of its node is reserved for other tenants, whose Model waits longer"
    ]


def test_explain_names_the_model_that_serves_other_tenants() -> None:
    made = calls([A, B], TWO, [on(A, TWO[0], busy=True)], "b")
    found = explain_model(made, plan(made, T0), Log(), ModelName("b"), T0).candidates
    assert [one.ruled_out for one in found] == [FOR_OTHERS, FOR_OTHERS]


FOR_BOLT = placement_request("b", memory_bytes=6 * GI, force=EvictionLevel.BUSY, trust=(BOLT,))


def taken(at: int, device: str = "g0", *, busy: bool = False, evictable_s: float = 0.0) -> Bin:
    """A share with a replica of another tenant."""
    of = share(device, at)
    who = Occupant(
        ReplicaId(f"r{at}"), ModelName("a"), S.READY, ResourceAmount(of.memory_bytes, of.compute_percent), busy=busy,
        evictable_s=evictable_s, trust=(ACME,),
    )  # fmt: skip
    return shelf(of, [who])


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def benches(draw: st.DrawFn) -> list[Bin]:
    """Up to three devices of up to three shares, on two nodes, with random occupants that may share a device."""
    made: list[Bin] = []
    met: dict[Domain | None, list[TenantSet]] = {}
    for device in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["timeslice", "timeslice", "mps", "hami", "mig", ""]))
        node = draw(st.sampled_from(["n0", "n1"]))
        for at in range(draw(st.integers(1, 3))):
            of = share(f"g{device}", at, kind, shared=kind in {"hami", ""}, node=node)
            there = met.setdefault(domain_of(of), [])
            on_it: list[Occupant] = []
            for number in range(draw(st.integers(0, 2 if of.shared else 1))):
                trust = draw(st.sampled_from(TRUSTS))
                if domain_of(of) and any(has_tenant_conflict(trust, one) for one in there):
                    continue
                there.append(trust)
                on_it.append(draw(incumbents(f"{of.id}-{number}", of, trust)))
            made.append(shelf(of, on_it, locked=draw(st.integers(0, 5)) == 0))
    return made


@st.composite
def incumbents(draw: st.DrawFn, name: str, of: Slice, trust: TenantSet) -> Occupant:
    leaving = draw(st.booleans())
    return Occupant(
        replica=ReplicaId(name),
        model=ModelName(draw(st.sampled_from("xyz"))),
        state=S.READY,
        room=ResourceAmount(draw(st.integers(1, 4)) * GI, 0)
        if of.shared
        else ResourceAmount(of.memory_bytes, of.compute_percent),
        priority=draw(st.integers(0, 1)),
        busy=draw(st.booleans()),
        evictable_s=draw(st.sampled_from([0.0, T0 + 1])),
        leaving=leaving,
        stuck=leaving and draw(st.integers(0, 3)) == 0,
        trust=trust,
    )


def shelf(of: Slice, on_it: list[Occupant], *, locked: bool = False) -> Bin:
    free, coming = ResourceAmount(of.memory_bytes, of.compute_percent), ResourceAmount(0, 0)
    for one in on_it:
        free = free.less(one.room)
        coming = coming.plus(one.room) if one.leaving and not one.stuck else coming
    trusts = frozenset(one.trust for one in on_it if one.trust and domain_of(of))
    return Bin(
        slice=of, whole=False, incumbents=tuple(on_it), free=free, coming=coming, locked=locked, trusts=trusts
    )  # fmt: skip


@st.composite
def wanted(draw: st.DrawFn) -> list[PlacementRequest]:
    return [
        placement_request(
            ModelName(draw(st.sampled_from("abc"))), ordinal=ordinal, memory_bytes=draw(st.integers(1, 8)) * GI,
            priority=draw(st.integers(0, 1)), force=draw(st.sampled_from(list(EvictionLevel))),
            trust=draw(st.sampled_from(TRUSTS)),
        )
        for ordinal in range(draw(st.integers(1, 6)))
    ]  # fmt: skip


def packed(requests: list[PlacementRequest], shelves: list[Bin]) -> PackResult:
    return pack(requests, SliceIndex(shelves), frozenset(), RestartCosts(), T0)


MANY = settings(derandomize=True, deadline=None, max_examples=examples(400))


@MANY
@given(wanted(), benches())
def test_random_packing_never_mixes_conflicting_tenants_on_one_device(
    wants: list[PlacementRequest], shelves: list[Bin]
) -> None:
    domains = {one.slice.id: domain_of(one.slice) for one in shelves}
    there: dict[Domain | None, list[TenantSet]] = {}
    for one in shelves:
        there.setdefault(domain_of(one.slice), []).extend(i.trust for i in one.incumbents)
    answer = packed(wants, shelves)
    for placement in answer.placements:
        for id in placement.slices:
            there[domains[id]].append(placement.want.trust)
    for domain in there.keys() - {None}:
        assert not any(has_tenant_conflict(one, other) for one, other in combinations(there[domain], 2))
    assert len(answer.placements) + len(answer.unmet) == len(wants)


@MANY
@given(wanted(), benches())
def test_replica_fits_once_all_its_victims_left_but_not_if_any_one_stays(
    wants: list[PlacementRequest], shelves: list[Bin]
) -> None:
    for want in wants:
        victims = {one.replica for one in packed([want], shelves).victims}
        if not victims:
            continue
        leave = {i.replica for one in shelves for i in one.incumbents if i.leaving and not i.stuck}
        assert packed([want], _without(shelves, victims | leave)).placements
        for stays in victims:
            assert not packed([want], _without(shelves, (victims - {stays}) | leave)).placements, (
                "no replica is evicted without need"
            )


def _without(shelves: list[Bin], removed: set[ReplicaId]) -> list[Bin]:
    return [shelf(one.slice, [i for i in one.incumbents if i.replica not in removed]) for one in shelves]


@MANY
@given(wanted(), benches())
def test_model_without_tenants_ignores_tenants_of_other_replicas(
    wants: list[PlacementRequest], shelves: list[Bin]
) -> None:
    plain = [want._replace(trust=()) for want in wants]
    nobody_listed = [
        shelf(one.slice, [i._replace(trust=()) for i in one.incumbents], locked=one.locked) for one in shelves
    ]
    assert packed(plain, shelves) == packed(plain, nobody_listed)


@MANY
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["put", "expect", "forget"]), st.sampled_from(TRUSTS))))
def test_tenant_occupancy_after_random_updates_equals_a_rebuilt_one(events: list[tuple[int, str, TenantSet]]) -> None:
    lanes: dict[Domain, list[int]] = {
        (NodeId("n"), DeviceId(f"g{number}")): [2 * number, 2 * number + 1] for number in range(4)
    }
    kept, there, guests = DomainOccupancy(lanes, 8), dict[Domain, TenantSet](), list[tuple[Domain, TenantSet]]()
    for number, what, trust in events:
        domain = (NodeId("n"), DeviceId(f"g{number}"))
        if what == "put":
            there[domain] = trust
            kept.put(domain, [trust])
        elif what == "expect":
            guests.append((domain, trust))
            kept.expect(domain, trust)
        else:
            guests.clear()
            kept.forget()
        rebuilt = DomainOccupancy(lanes, 8)
        for one, is_there in there.items():
            rebuilt.put(one, [is_there])
        for one, comes in guests:
            rebuilt.expect(one, comes)
        for requested in TRUSTS:
            left, right = kept.free(requested), rebuilt.free(requested)
            everywhere = np.ones(8, bool)
            assert np.array_equal(everywhere if left is None else left, everywhere if right is None else right)

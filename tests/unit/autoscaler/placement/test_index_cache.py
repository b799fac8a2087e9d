"""Planner caches: the SliceIndex of a `World` and cached idle models equal what a fresh computation finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_
from random import Random
from typing import TypeVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId, TenantName
from autoscaler.fold.indices import rebuild_indices
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index.residual_waste_tables import BINS, LEVELS
from autoscaler.placement.index_cache import IndexCache
from autoscaler.placement.learning.expected_demand import build_restart_costs
from autoscaler.placement.learning.training import decode_placement_values
from autoscaler.placement.model.bin_builder import build_bins, build_hosts
from autoscaler.placement.model.topology import CLIQUE
from autoscaler.placement.model.types import EvictionLevel, PlacementRequest, RequiredArtifacts, RestartCosts, Spread
from autoscaler.placement.packer import pack
from autoscaler.planner.plan import Planner, plan
from autoscaler.spec.settings import Price
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.resources import HostAmount, HostResources, Link
from autoscaler.state.world import (
    Copy,
    Cordon,
    CordonTarget,
    DeviceId,
    History,
    ModelLoad,
    NodeId,
    PlacementValues,
    Replica,
    Slice,
    SliceId,
    World,
)
from tests.support.builders.placement_requests import change_request, placement_request
from tests.support.builders.placement_values import cluster, exercise_of, lesson
from tests.support.builders.worlds import GI, T0, device, gateway, model, replace_fields, replica, use, world
from tests.support.example_budget import examples

K = TypeVar("K")
V = TypeVar("V")
NAMES = tuple(ModelName(name) for name in "abcdef")
SPREADS = (None, Spread("zone", "", (NodeId("n1"),)), Spread("", "zone", (NodeId("n2"), NodeId("n3"))))
TRUSTS: Sequence[tuple[TenantName, ...] | None] = (None, (TenantName("acme"),), (TenantName("bolt"),))
MODELS = [model(name, 4 + 3 * at, high=3, tenants=TRUSTS[at % 3]) for at, name in enumerate(NAMES)]
ROOTS = ("r0", "", "r1", "r1", "r0", "r2")
WHOLE = [device(f"g{at}", (24, 24, 80)[at % 3], f"n{at % 4}", link=ROOTS[at]) for at in range(6)]
SHARES = [
    replace(device(f"t{at // 2}/s{at % 2}", 24, f"n{at // 2}", kind="timeslice"), device=DeviceId(f"t{at // 2}"))
    for at in range(4)
]
SLICES = [*WHOLE, *SHARES]


def turned(one: World, rng: Random, now_s: float) -> World:
    """The `World` with one random change."""
    ids, replicas = sorted(one.replicas), dict(one.replicas)
    one = replace(one, gateways={id: replace(each, seen_s=now_s) for id, each in one.gateways.items()})
    match rng.randrange(21):
        case 0 | 1:
            made = [_replica(rng, now_s) for _ in range(3)]
            one = replace(one, replicas=replicas | {each.id: each for each in made})
        case 2 if ids:
            del replicas[rng.choice(ids)]
            one = replace(one, replicas=replicas)
        case 3 | 4 if ids:
            old = replicas[rng.choice(ids)]
            states = (S.STARTING, S.READY, S.READY, S.STOPPING, S.FAILED, S.SCRUBBING)
            replicas[old.id] = replace(
                old, state=rng.choice(states), since_s=now_s, times=replace(old.times, ready_s=now_s)
            )
            one = replace(one, replicas=replicas)
        case 5:
            at = rng.choice(sorted(one.nodes.slices))
            slices = {**one.nodes.slices, at: replace(one.nodes.slices[at], healthy=rng.random() < 0.7)}
            back = {each.id: each for each in SLICES if each.id not in slices}
            one = replace_fields(one, slices=_without(slices, at) if rng.random() < 0.4 else slices | back)
        case 6:
            name = rng.choice(NAMES)
            load = ModelLoad(waiting=rng.randrange(3), running=rng.randrange(2), oldest_s=now_s - 1)
            return replace(one, loads={**one.loads, name: load})
        case 7:
            known = History(starts_s=(rng.random() * 9,), last_activity_s=now_s - rng.randrange(200))
            return replace_fields(one, histories={**one.learned.histories, rng.choice(NAMES): known})
        case 8:
            name = rng.choice(sorted(one.models))
            old_spec = one.models[name].spec
            spec = replace(old_spec, replicas=replace(old_spec.replicas, min=rng.randrange(3)))
            return replace(one, models={**one.models, name: replace(one.models[name], spec=spec)})
        case 10:
            return replace_fields(one, lesson=None if rng.random() < 0.3 else _lesson(rng))
        case 11:
            at = rng.choice(sorted(one.nodes.slices))
            return replace_fields(one, slices=_nodes_told(one.nodes.slices, one.nodes.slices[at].node, rng))
        case 9 | 12 | 15 | 17 | 18 | 19 | 20 as which:
            return CHANGES[which](one, rng)
        case 16 if ids:
            one = replace(one, replicas=_misplaced(replicas, rng))
        case 13:
            return replace_fields(one, others={NodeId(f"n{rng.randrange(4)}"): rng.randrange(3)})
        case _:
            place = CordonTarget("node", f"n{rng.randrange(4)}")
            cordons = (
                {place: Cordon(place=place, node=place.name, since_s=now_s, drain=rng.random() < 0.5)}
                if rng.random() < 0.5
                else {}
            )
            names = [one for one in MODELS if rng.random() < 0.9]
            one = replace_fields(one, cordons=cordons, models={each.name: each for each in names})
    made_anew = rebuild_indices(one, now_s)
    return replace(
        one, by_model=kept(one.by_model, made_anew.by_model), by_slice=kept(one.by_slice, made_anew.by_slice)
    )


def kept(old: Mapping[K, V], new: Mapping[K, V]) -> dict[K, V]:
    """Reuse equal objects, as the fold does."""
    return {key: old[key] if old.get(key) == value else value for key, value in new.items()}


def _beside_told(one: World, rng: Random) -> World:
    """Change a replica's or other pods' usage of a node, or add, remove or resize a node, or forget all of them."""
    if one.replicas and rng.random() < 0.4:
        old = one.replicas[rng.choice(sorted(one.replicas))]
        beside = HostAmount(rng.randrange(5) * 1000, rng.randrange(3) * GI)
        return replace(
            one, replicas={**one.replicas, old.id: replace(old, resources=replace(old.resources, host_request=beside))}
        )
    node, size = NodeId(f"n{rng.randrange(5)}"), HostAmount(rng.choice((8000, 8000, 8000, 16_000)), 32 * GI)
    if rng.random() < 0.3:
        return replace_fields(
            one, hosts={name: host for name, host in one.nodes.hosts.items() if name not in {node, "n4"}}
        )
    taken = HostAmount(rng.randrange(10) * 1000, rng.randrange(9) * GI)
    changed = HostResources(*size, *size).without(taken)
    return replace_fields(one, hosts={} if rng.random() < 0.1 else {**one.nodes.hosts, node: changed})


def _replica(rng: Random, now_s: float) -> Replica:
    of, at = rng.choice(MODELS), rng.choice(SLICES)
    made = replica(of, f"{of.name}-{rng.randrange(1 << 30)}", state=rng.choice((S.STARTING, S.READY)))
    beside = HostAmount(rng.randrange(5) * 1000, rng.randrange(3) * GI)
    made = replace(made, resources=replace(made.resources, host_request=beside))
    return replace(
        made,
        since_s=now_s,
        resources=replace(made.resources, slices=(at.id,)),
        times=replace(made.times, ready_s=None if made.state is S.STARTING else now_s),
    )


def _lesson(rng: Random) -> PlacementValues:
    """Random learned values, for the nodes of the `World` or for others."""
    of = exercise_of(cluster(2))
    drawn = np.array([rng.randrange(64_000) for _ in range(2 * LEVELS)], np.dtype("<i4")).reshape(2, 1, LEVELS)
    values = np.zeros((2, BINS, LEVELS + 1), np.dtype("<i4"))
    values[:, :, :LEVELS] = drawn
    return replace(lesson(of, 1), values=values.tobytes())


def _sizes_told(one: World, rng: Random) -> World:
    """Change a Slice's size and product, the prices, or both."""
    at, both = rng.choice(sorted(one.nodes.slices)), rng.random()
    size, product = rng.choice((24, 80)) * GI, rng.choice(("", "H100", "L4", "NVIDIA H200"))
    many = replace(one.nodes.slices[at], memory_bytes=size, product=product)
    prices = rng.choice(((), (Price(device="H100", per_hour=9.0),), (Price(device="L4", per_hour=1.0),)))
    changed = replace(one.settings, prices=prices)
    return replace_fields(
        one,
        slices={**one.nodes.slices, at: many} if both < 0.6 else one.nodes.slices,
        settings=changed if both > 0.4 else one.settings,
    )


def _nodes_told(slices: dict[SliceId, Slice], node: NodeId, rng: Random) -> dict[SliceId, Slice]:
    """Change the labels and taints of one node."""
    labels, known = {"zone": rng.choice(("z1", "z2")), CLIQUE: rng.choice(("", "f.1"))}, rng.random() < 0.7
    taints = (Taint("lab", "", "NoSchedule"),) if rng.random() < 0.3 else ()
    return {
        id: replace(one, labels=labels, labels_known=known, taints=taints) if one.node == node else one
        for id, one in slices.items()
    }


def _trust_told(one: World, rng: Random) -> World:
    """Change the tenants of a model."""
    name = rng.choice(sorted(one.models))
    spec = replace(one.models[name].spec, tenants=TRUSTS[rng.randrange(3)])
    return replace(one, models={**one.models, name: replace(one.models[name], spec=spec)})


def _misplaced(replicas: dict[ReplicaId, Replica], rng: Random) -> dict[ReplicaId, Replica]:
    """Move a replica to another Slice, as an external scheduler would."""
    old = replicas[rng.choice(sorted(replicas))]
    return {
        **replicas,
        old.id: replace(
            old, resources=replace(old.resources, slices=(rng.choice(SLICES).id,), chosen=old.resources.slices)
        ),
    }


def _others_come(one: World, rng: Random) -> World:
    """Change the pod limit of a Slice and the number of foreign pods on it."""
    at, many = rng.choice(sorted(one.nodes.slices)), rng.randrange(4)
    changed = replace(one.nodes.slices[at], holders_max=many, theirs=rng.randrange(many + 1))
    return replace_fields(one, slices={**one.nodes.slices, at: changed})


def _calls_told(one: World, rng: Random) -> World:
    """Change which replicas have requests, or make this unknown."""
    uses = [use(id, 1) for id in one.replicas if rng.random() < 0.5]
    heard = {each.replica: each for each in uses}
    silent = rng.random() < 0.3
    changed = {id: replace(each, uses=heard, in_epoch=not silent) for id, each in one.gateways.items()}
    return replace(one, gateways=changed)


def _without(slices: dict[SliceId, Slice], removed: SliceId) -> dict[SliceId, Slice]:
    return {id: one for id, one in slices.items() if id != removed or len(slices) < 5}


CHANGES = {
    9: _trust_told, 12: _sizes_told, 15: _others_come, 17: _beside_told, 18: _beside_told, 19: _calls_told,
    20: _calls_told,
}  # fmt: skip
"""Additional changes of `turned`."""


def wants(rng: Random) -> list[PlacementRequest]:
    sizes = (2, 5, 9, 20, 60)
    return [
        placement_request(
            rng.choice([*NAMES, "new"]), ordinal, memory_bytes=rng.choice(sizes) * GI, devices=rng.choice((1, 1, 1, 2)),
            force=rng.choice(list(EvictionLevel)), artifact=rng.choice(("", "oci://r.io/a")),
            selector=rng.choice(((), (), (("zone", "z1"),))), products=rng.choice(((), (), ("*h100*", "*"))),
            trust=TRUSTS[rng.randrange(3)] or (), cpu_milli=rng.choice((0, 100, 4000)),
            host_bytes=rng.choice((0, 0, 8)) * GI, link=rng.choice(list(Link)), spread=rng.choice(SPREADS),
        )
        for ordinal in range(rng.randrange(1, 5))
    ]  # fmt: skip


def some(rng: Random, ids: Sequence[ReplicaId]) -> set[ReplicaId]:
    return {id for id in ids if rng.random() < 0.2}


def _there(yard: SliceIndex) -> list[int]:
    """Nodes that exist; a removed node stays in the index for a while."""
    return [at for at, node in enumerate(yard.nodes) if yard.slices_of(node) or node in yard.hosts]


def state(yard: SliceIndex) -> list[object]:
    """Everything that a placement decision depends on."""
    stock, shelves = yard.arrays, (replace_(shelf, incumbents=()) for shelf in yard.shelves.values())
    there = _there(yard)
    of_nodes = (stock.classes, stock.cpu, stock.host_bytes, stock.cpu_size, stock.host_size)
    arrays = (
        stock.left_bytes,
        stock.left_percent,
        stock.milli,
        stock.shut,
        stock.held,
        *(one[there] for one in of_nodes),
    )
    left = [*sorted(yard.hosts.items()), *sorted(yard.emptying)]
    free = [yard.occupancy.free(trust or ()) for trust in TRUSTS]
    return [
        *shelves,
        *left,
        *(array.tolist() for array in arrays),
        *(None if one is None else one.tolist() for one in free),
    ]


def grades(yard: SliceIndex, expected: RestartCosts, asked: Sequence[PlacementRequest], now_s: float) -> list[object]:
    """Eviction candidates, their costs, and the time of the next change."""
    yard.look(expected)
    found = [
        yard.eviction_costs.grade(change_request(one, priority=priority), now_s) for one in asked for priority in (0, 1)
    ]
    return [
        *([part.tolist() for part in one] for one in found),
        *(
            part.tolist()
            for part in (
                yard.eviction_costs.soon,
                yard.eviction_costs.few,
                yard.short(HostAmount(2000, GI))[_there(yard)],
            )
        ),
        yard.eviction_costs.next_s(now_s),
    ]


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.integers(0, 1 << 30))
def test_slice_index_after_random_updates_packs_like_a_rebuilt_one(seed: int) -> None:
    rng, now_s, survey = Random(seed), T0, IndexCache()
    copies = frozenset({Copy(artifact="oci://r.io/a", node=NodeId("n1"))})
    one = world(MODELS, SLICES, gateways=[gateway("g")])
    for _ in range(25):
        now_s += rng.choice((0.0, 0.5, 30.0, 90.0))
        one = turned(one, rng, now_s)
        leaving, staying = some(rng, sorted(one.replicas)), some(rng, sorted(one.replicas))
        yard = survey.update(one, now_s, leaving, staying)
        known = None if one.learned.lesson is None else decode_placement_values(one.learned.lesson)
        rebuilt = SliceIndex(build_bins(one, now_s, leaving, staying), build_hosts(one, now_s, leaving, staying), known)
        asked = wants(rng)
        assert state(yard) == state(rebuilt)
        assert grades(yard, survey.restart_costs, asked, now_s) == grades(
            rebuilt, build_restart_costs(one), asked, now_s
        )
        assert pack(asked, yard, copies, RestartCosts(), now_s) == pack(asked, rebuilt, copies, RestartCosts(), now_s)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.integers(0, 1 << 30))
def test_planner_reused_after_random_changes_plans_like_a_new_one(seed: int) -> None:
    rng, now_s, planner = Random(seed), T0, Planner()
    one = world(MODELS, SLICES, gateways=[gateway("g")])
    for _ in range(40):
        now_s += rng.choice((0.0, 0.5, 30.0, 900.0))
        one = turned(one, rng, now_s)
        expected = plan(one, now_s)
        assert planner.plan(one, now_s) == expected
        assert planner.plan(one, now_s) == expected, "nor does it depend on having been asked"


def test_slice_index_is_reused_when_a_cpu_only_node_leaves_and_returns() -> None:
    size, survey = HostAmount(8000, 32 * GI), IndexCache()
    small, large = (HostResources(cpu, 32 * GI, cpu, 32 * GI) for cpu in (size.cpu_milli, 64_000))
    full, cpu_only = (
        HostResources(8000, 32 * GI, 0, 0),
        placement_request("c", devices=0, cpu_milli=1000, selector=()),
    )
    at_n = [device(f"g{at}", 24, "n0") for at in range(2)]
    one = world(MODELS, at_n, hosts={NodeId("n0"): full, NodeId("n4"): small, NodeId("n5"): small})
    removed = replace_fields(one, hosts={NodeId("n0"): full, NodeId("n5"): small})
    copies = frozenset({Copy(artifact="oci://r.io/a", node=NodeId("n4"))})
    yard = survey.update(one, T0)
    yard.locality.set_copies(copies)
    assert yard.locality.known(RequiredArtifacts("oci://r.io/a")).artifact
    for at, nodes in ((removed, {"n5"}), (one, {"n4", "n5"}), (removed, {"n5"})):
        assert survey.update(at, T0) is yard
        yard.locality.set_copies(copies)
        assert bool(yard.locality.known(RequiredArtifacts("oci://r.io/a")).artifact) == ("n4" in nodes)
        packed = pack([cpu_only], yard, copies, RestartCosts(), T0)
        assert packed == pack(
            [cpu_only], SliceIndex(build_bins(at, T0), build_hosts(at, T0)), copies, RestartCosts(), T0
        )
    assert survey.update(replace_fields(one, hosts={**one.nodes.hosts, NodeId("n4"): large}), T0) is not yard, (
        "it has another size"
    )
    assert survey.update(replace_fields(one, hosts={NodeId("n4"): small}), T0) is not yard, (
        "the capacity of n0 is unknown"
    )


def test_drain_of_a_node_is_planned_once_its_slice_is_reported_again() -> None:
    """The model was idle while its device was unknown."""
    a, place = MODELS[0], CordonTarget("node", "n0")
    there, other = device("gpu0", 24, "n0"), device("g1", 24, "n1")
    running = replica(a, "r")
    cordons = {place: Cordon(place=place, node="n0", since_s=T0, drain=True)}
    known = History(last_activity_s=T0)
    removed = replace_fields(
        world([a], [other], [running], gateways=[gateway("g")], histories={"a": known}), cordons=cordons
    )
    back = replace_fields(removed, slices={one.id: one for one in (there, other)})
    planner = Planner()
    assert not planner.plan(removed, T0).actions
    assert planner.plan(back, T0).actions
    assert planner.plan(back, T0) == plan(back, T0)

"""Overcommitted Slices: usage counts where pods really run, nothing starts there, and the youngest replica leaves."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.fold.fold import Observation, fold
from autoscaler.kubernetes.resources.events import ModelEvent, derive_step_events
from autoscaler.planner.plan import plan
from autoscaler.queries import unschedulable_replicas
from autoscaler.queries.overcommitted_slices import list_crowded_slices, list_excess_replicas
from autoscaler.slicing import device_usage, slicers
from autoscaler.slicing.actual_slices import resolve_actual_slices
from autoscaler.slicing.dra import Got
from autoscaler.slicing.hami import HamiAllocation
from autoscaler.state.actions import DrainReplica, StartReplica, StopReplica
from autoscaler.state.events import Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Gateway, Replica, Slice, SliceId, World
from tests.support.builders.fold import after
from tests.support.builders.resource_slices import DRIVER
from tests.support.builders.slices import GIB, NODE, card, hami_node, npu_node
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replace_fields, replica, world
from tests.support.example_budget import examples
from tests.support.harness.driver_events import seen_of

A, B = model("a", 50), model("b", 50)
BIG = (device("n/x", 80), device("n/y", 80))


def both(*on: tuple[str, tuple[str, ...]], slices: tuple[Slice, ...] = BIG) -> World:
    """`a`, which is older, and `b`: the actual and the chosen Slices of each."""
    known = [
        replica(of, of.name, [at], chosen=tuple(SliceId(one) for one in chosen), created_s=T0 - age_s)
        for (of, age_s), (at, chosen) in zip(((A, 200.0), (B, 150.0)), on, strict=True)
    ]
    demand = [gateway(levels=[level("a", running=1), level("b", running=1)])]
    return world((A, B), slices, known, gateways=demand)


def goes(there: World) -> dict[str, str]:
    """The replicas that are drained or stopped, and why."""
    found = [one for one in plan(there, T0).actions if isinstance(one, DrainReplica | StopReplica)]
    return {str(one.replica): one.reason for one in found}


def _asked(there: World, requested: Gateway) -> World:
    """The `World` with another gateway report."""
    return world(
        there.models.values(), there.nodes.slices.values(), there.replicas.values(), gateways=[requested],
        backoffs=there.nodes.backoffs,
    )  # fmt: skip


def held_by(name: str, where: tuple[str, ...] = (), state: Seen = Seen.READY) -> Observation:
    """The driver's observation of `b`: n/x was chosen, `where` is actual."""
    return replace(
        seen_of(replica(B, name, ["n/x"]), state), actual=tuple(SliceId(one) for one in where)
    )  # fmt: skip


# --- actual placement ------------------------------------------------------------------------------------------------


def test_misplaced_replica_counts_as_usage_of_its_actual_slice() -> None:
    at = world((A, B), BIG, [replica(B, "b", ["n/x"])], gateways=[gateway(levels=[level("a", 1), level("b", 0, 1)])])
    now, moves = after(at, held_by("b", ("n/y",)))
    assert (now.replicas[ReplicaId("b")].resources.slices, now.replicas[ReplicaId("b")].resources.chosen) == (
        ("n/y",),
        ("n/x",),
    )
    assert dict(now.by_slice) == {"n/y": ("b",)}
    assert [move.verb for move in moves] == ["misplaced"]
    assert [one.replica.resources.slices for one in plan(now, T0).actions if isinstance(one, StartReplica)] == [
        ("n/x",)
    ]
    again, more = after(now, held_by("b", ("n/y",)))
    assert not more, "it is reported once"
    assert again.replicas == now.replicas


def test_misplacement_is_reported_by_one_event_and_by_explain() -> None:
    at = world((A, B), BIG, [replica(B, "b", ["n/x"])])
    now, moves = fold(at, [held_by("b", ("n/y",))], T0)
    why = "it was allocated n/y instead of n/x"
    assert list(derive_step_events(moves, (), at, now)) == [ModelEvent(B.name, "Misplaced", f"b: {why}", "Warning")]
    explanation = explain_model(now, plan(now, T0), Log(), B.name, T0)
    assert f"on n/y ({why})" in " ".join(explanation.sentences)


def test_another_slice_of_the_chosen_device_is_not_a_misplacement() -> None:
    parts = tuple(replace(device(f"n/x-{at}", 20, "n"), device=BIG[0].device, shared=False) for at in range(2))
    one = replica(B, "b", ["n/x-0"], memory_bytes=GI)
    at = world((B,), parts, [one])
    now, moves = after(at, replace(seen_of(one, Seen.READY), actual=(parts[1].id,)))
    assert now.replicas[one.id].resources.slices == (parts[1].id,)
    assert not moves


@pytest.mark.parametrize(
    ("part_of", "is_misplaced"),
    [({"kind": "dra", "device_bytes": 80 * GI}, False), ({}, True)],
    ids=["a part", "another"],
)
def test_replica_is_misplaced_only_if_it_is_on_no_part_of_the_chosen_gpu(
    part_of: dict[str, Any], is_misplaced: bool
) -> None:
    part = device("n/x-0", 20, "n", shared=False, **part_of)
    one = replica(B, "b", ["n/x"], memory_bytes=GI)
    now, moves = after(world((B,), [part], [one]), replace(seen_of(one, Seen.READY), actual=(part.id,)))
    assert now.replicas[one.id].resources.slices == (part.id,)
    assert [move.verb for move in moves] == (["misplaced"] if is_misplaced else [])


def test_discovered_replica_is_recorded_on_its_actual_slice() -> None:
    now, _ = after(world((B,), BIG), held_by("b", ("n/y",)))
    assert (now.replicas[ReplicaId("b")].resources.slices, now.replicas[ReplicaId("b")].resources.chosen) == (
        ("n/y",),
        ("n/x",),
    )


# --- eviction --------------------------------------------------------------------------------------------------------


@pytest.mark.case("23")
def test_younger_replica_of_an_overcommitted_slice_restarts_elsewhere() -> None:
    there = both(("n/x", ()), ("n/x", ("n/y",)))
    assert goes(there) == {"b": "it was allocated n/x instead of n/y; n/x has no room for it: a is there"}
    assert list_crowded_slices(there) == {"n/x": "it is overcommitted: a, b are on it, placed by another scheduler"}
    now, _ = after(there, *plan(there, T0).actions)
    assert not goes(now), "once"
    demand = gateway(levels=[level("a", running=1), level("b", waiting=1)])
    starts = [one.replica for one in plan(_asked(now, demand), T0).actions if isinstance(one, StartReplica)]
    assert [(one.model, one.resources.slices) for one in starts] == [("b", ("n/y",))]


def test_no_second_replica_leaves_an_overcommitted_slice_if_one_is_leaving() -> None:
    there = both(("n/x", ()), ("n/x", ("n/y",)))
    assert list(list_excess_replicas(there)) == ["b"]
    assert list_excess_replicas(there, {ReplicaId("a")}) == {}


@pytest.mark.case("23")
def test_younger_replica_is_evicted_even_if_the_older_one_is_misplaced() -> None:
    there = both(("n/x", ("n/y",)), ("n/x", ()))
    assert goes(there) == {"b": "n/x has no room for it: a is there"}
    now, moves = after(there, *plan(there, T0).actions)
    events = list(derive_step_events(moves, (), there, now))
    assert [(one.model, one.reason) for one in events] == [("b", "Evicted")]


def test_misplaced_replica_is_not_evicted_if_its_actual_slice_fits_it() -> None:
    small = replace(B, memory_bytes=20 * GI)
    there = both(("n/x", ()), ("n/x", ("n/y",)))
    moved = replace(
        there.replicas[ReplicaId("b")],
        resources=replace(there.replicas[ReplicaId("b")].resources, memory_bytes=small.memory_bytes),
    )
    there = world((A, small), BIG, [there.replicas[ReplicaId("a")], moved], gateways=there.gateways.values())
    assert not goes(there)
    assert not list_crowded_slices(there)


def test_no_replica_starts_on_a_slice_while_it_is_overcommitted() -> None:
    c = model("c", 5)
    there = both(("n/x", ()), ("n/x", ("n/y",)), slices=BIG[:1])
    demand = [gateway(levels=[level("a", running=1), level("b", running=1), level("c", waiting=1)])]
    there = world((A, B, c), BIG[:1], there.replicas.values(), gateways=demand)
    (unmet,) = plan(there, T0).unmet
    assert unmet.reason == "needs 5Gi on one device; it is overcommitted: a, b are on it, placed by another scheduler"
    removed = world((A, B, c), BIG[:1], [there.replicas[ReplicaId("a")]], gateways=demand)
    assert [one.replica.model for one in plan(removed, T0).actions if isinstance(one, StartReplica)] == ["c"]


def test_node_is_avoided_only_after_a_second_overcommit_eviction() -> None:
    there = both(("n/x", ()), ("n/x", ("n/y",)))
    now, _ = after(there, *plan(there, T0).actions)
    assert not [one for one in plan(now, T0).actions if not isinstance(one, StartReplica)], "nor revived"
    assert not unschedulable_replicas.list_avoided_nodes(now, B.name, T0)
    again = replica(B, "b2", ["n/x"], chosen=(SliceId("n/y"),), created_s=T0)
    later = replace(now, replicas={ReplicaId("a"): there.replicas[ReplicaId("a")], again.id: again})
    later = world((A, B), BIG, later.replicas.values(), gateways=there.gateways.values(), backoffs=now.nodes.backoffs)
    later, _ = after(later, *plan(later, T0).actions)
    assert unschedulable_replicas.list_avoided_nodes(later, B.name, T0) == ("n0",)


# --- foreign pods ----------------------------------------------------------------------------------------------------


def hami(*held: HamiAllocation, count: int = 10) -> tuple[Slice, ...]:
    """Two cards of 80Gi, in part allocated to foreign pods."""
    there = slicers.list_slices(hami_node(card(count=count), card("GPU-bbbb")))
    return device_usage.subtract_usage(there, device_usage.list_card_usage(NODE, held))[0]


@pytest.mark.case("23")
def test_replica_is_evicted_if_foreign_pods_overcommit_its_gpu() -> None:
    slices = hami(HamiAllocation(0, "GPU-aaaa", 40 * GIB, 0))
    assert [(one.theirs, one.memory_bytes) for one in slices] == [(1, 40 * GIB), (0, 80 * GIB)]
    one = replica(A, "a", [slices[0].id])
    there = world((A,), slices, [one], gateways=[gateway(levels=[level("a", running=1)])])
    assert goes(there) == {
        "a": f"{slices[0].id} has no room for it: pods that this installation does not manage are there"
    }
    now, _ = after(there, *plan(there, T0).actions)
    now = _asked(now, gateway(levels=[level("a", waiting=1)]))
    starts = [one.replica.resources.slices for one in plan(now, T0).actions if isinstance(one, StartReplica)]
    assert starts == [(slices[1].id,)]
    few = hami(HamiAllocation(0, "GPU-aaaa", 20 * GIB, 0))
    assert not goes(replace_fields(there, slices={one.id: one for one in few})), "there is room for both"


def test_our_own_claim_of_unknown_size_is_not_foreign_usage() -> None:
    slices = hami()
    counted = slices[0].counted
    for own, many in ((True, 0), (False, 1)):
        left, _ = device_usage.subtract_usage(slices, [(counted, device_usage.DeviceUsage(None, ours=own))])
        assert left[0].theirs == many


# --- pod limit of a card ---------------------------------------------------------------------------------------------


def test_hami_card_pod_limit_includes_foreign_pods() -> None:
    of = [model(f"m{number}", 2, residency_seconds=1000.0) for number in range(3)]
    slices = hami(HamiAllocation(0, "GPU-aaaa", GIB, 0), count=3)[:1]
    assert (slices[0].holders_max, slices[0].theirs) == (3, 1)
    known = [replica(one, one.name, [slices[0].id], created_s=T0 - 50) for one in of[:2]]
    demand = gateway(levels=[level("m0", running=1), level("m1", running=1), level("m2", waiting=1)])
    there = world(of, slices, known, gateways=[demand])
    answer = plan(there, T0)
    assert not [one for one in answer.actions if isinstance(one, StartReplica)]
    (unmet,) = answer.unmet
    assert "the largest has 75Gi free of 79Gi, held by m0 (" in unmet.reason
    assert unmet.reason.endswith(", pods that this installation does not manage (1); at most 3 pods share it")
    fewer = world(of, slices, known[:1], gateways=[gateway(levels=[level("m0", running=1), level("m2", waiting=1)])])
    assert [one.replica.model for one in plan(fewer, T0).actions if isinstance(one, StartReplica)] == ["m2"]


def test_idle_replica_is_evicted_if_only_the_pod_limit_is_reached() -> None:
    idle, small = model("a", 10, idle_seconds=1000), model("b", 10)
    waits = [gateway(levels=[level("b", waiting=1)])]
    full, free = ((replace(device("n/x", 80), holders_max=most),) for most in (1, 2))
    there = world((idle, small), full, [replica(idle, "a", ["n/x"])], waits)
    assert goes(there) == {"a": "make room for b: a was resident 100 s, 1 waiting, tenant acme"}
    assert not goes(world((idle, small), free, [replica(idle, "a", ["n/x"])], waits))
    removed = world((idle, small), full, gateways=waits)
    assert [one.replica.model for one in plan(removed, T0).actions if isinstance(one, StartReplica)] == ["b"]


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(0, 1 << 30))
def test_random_plans_never_exceed_the_device_pod_limit(seed: int) -> None:
    rng = Random(seed)
    models = [model(f"m{number}", rng.choice((0.5, 1, 3)), high=rng.randrange(1, 4), slots=1) for number in range(8)]
    slices = [
        replace(device(f"n{at}/x", 24, f"n{at}"), holders_max=(most := rng.randrange(1, 5)), theirs=rng.randrange(most))
        for at in range(2)
    ]
    there, now_s = world(models, slices, gateways=[]), T0
    for step in range(30):
        now_s += rng.choice((0.1, 5.0, 150.0))
        demand = [level(one.name, rng.randrange(4), rng.randrange(2)) for one in models if rng.random() < 0.7]
        there = world(
            models, slices, there.replicas.values(), gateways=[gateway(levels=demand, seen_s=now_s)], version=step + 1
        )
        there, _ = fold(there, [], now_s)
        there = _acted(there, now_s)
        for one in slices:
            assert len(there.by_slice.get(one.id, ())) + one.theirs <= one.holders_max


def _acted(there: World, now_s: float) -> World:
    """The `World` after the plan's actions; drained and stopped replicas are removed."""
    known: dict[ReplicaId, Replica] = dict(there.replicas)
    for action in plan(there, now_s).actions:
        if isinstance(action, StartReplica):
            ready = replace(
                action.replica,
                state=S.READY,
                since_s=now_s,
                times=replace(action.replica.times, ready_s=now_s, created_s=now_s),
            )
            known[ready.id] = ready
        elif isinstance(action, DrainReplica | StopReplica):
            known.pop(action.replica, None)
    return world(there.models.values(), there.nodes.slices.values(), known.values(), gateways=there.gateways.values())


# --- actual allocation of a pod --------------------------------------------------------------------------------------

HAMI = {one.id: one for one in slicers.list_slices(hami_node(card(), card("GPU-bbbb")))}
NPU = {one.id: one for one in slicers.list_slices(npu_node("NPU-1", "NPU-2"))}
WHOLE = {
    SliceId(f"{node}/gpu{at}"): replace(device(f"{node}/gpu{at}", 80, node), handle="nvidia.com/gpu", shared=False)
    for node in ("n1", "n2")
    for at in range(2)
}  # fmt: skip


@pytest.mark.parametrize(
    ("known", "chosen", "node", "seen", "there"),
    [
        (HAMI, "node-1/GPU-aaaa", "node-1", {"cards": ["GPU-aaaa"]}, ()),
        (HAMI, "node-1/GPU-aaaa", "node-1", {"cards": ["GPU-bbbb"]}, ("node-1/GPU-bbbb",)),
        (HAMI, "node-1/GPU-aaaa", "node-1", {"cards": ["GPU-zzzz"]}, ("node-1/GPU-zzzz",)),
        (HAMI, "node-1/GPU-aaaa", "node-1", {}, ()),
        (HAMI, "node-1/GPU-aaaa", "", {"cards": ["GPU-bbbb"]}, ()),
        (NPU, "node-1/NPU-1-0", "node-1", {"cards": ["NPU-1"]}, ()),
        (NPU, "node-1/NPU-1-0", "node-1", {"cards": ["NPU-2"]}, ("node-1/NPU-2-0",)),
        ({}, "n1/gpu-0", "n1", {"got": [f"{DRIVER}/n1/gpu-0"]}, ()),
        ({}, "n1/gpu-0", "n1", {"got": [f"{DRIVER}/n1/gpu-3"]}, ("n1/gpu-3",)),
        ({}, "n1/a/b/gpu-0", "n1", {"got": [f"{DRIVER}/a/b/gpu-0"]}, ()),
        (WHOLE, "n1/gpu0", "n1", {}, ()),
        (WHOLE, "n1/gpu0", "n2", {}, ("n2/gpu0",)),
        (WHOLE, "n1/gpu0", "n2", {"held": ["n2/gpu0"]}, ("n2/gpu1",)),
        (WHOLE, "n1/gpu0", "n3", {}, ("n3/gpu0",)),
    ],
)
def test_actual_slices_are_reported_only_if_they_differ_from_chosen_slices(
    known: dict[SliceId, Slice], chosen: str, node: str, seen: dict[str, list[str]], there: tuple[str, ...]
) -> None:
    cards = [HamiAllocation(0, uuid, GIB, 0) for uuid in seen.get("cards", ())]
    got = [Got("gpu", entry, None) for entry in seen.get("got", ())]
    held = [SliceId(one) for one in seen.get("held", ())]
    assert resolve_actual_slices([SliceId(chosen)], node, known, lambda: held, cards=cards, got=got) == there

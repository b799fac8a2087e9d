"""Replicas on paid capacity move to owned devices if no model lacks room, and idle ones end if they cost too much."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand.desired_replicas import compute_desired_replicas
from autoscaler.fold.indices import rebuild_indices
from autoscaler.planner.plan import plan
from autoscaler.rearrange.consolidation import LEADING_S, LEASES_MAX
from autoscaler.rearrange.paid_capacity import KEPT_S, compute_paid_capacity
from autoscaler.spec.capacity import Cro, ProviderSettings
from autoscaler.spec.model import Auto, Gpu, Model, ReplicaRange, Rollout
from autoscaler.spec.settings import Settings
from autoscaler.state.actions import AcquireLease, Acted, DrainReplica, StartReplica
from autoscaler.state.capacity import AcquireOrder, LeaseId
from autoscaler.state.events import CordonsSeen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Cordon, CordonTarget, History, Move, PaidCapacity, Replica, Slice, SliceId, World
from tests.support.builders.capacity import A, acted, arrived, cloud, observe, offer, offered, releases
from tests.support.builders.worlds import (
    T0,
    Scene,
    device,
    folded,
    gateway,
    kinds,
    level,
    model,
    replace_fields,
    replica,
    use,
    world,
)

B, C = model("b", 16, slots=1), model("c", 16, slots=1)
STARTED = {name: History(starts_s=(10.0,), last_activity_s=T0 - 1) for name in "abc"}
HOSTS = "kubernetes.io/hostname"
CALLS = [gateway(levels=[level("a", 0, 1)], uses=[use("a1", 1)])]


def home(name: str = "own0", memory_gi: float = 16, **fields: Any) -> Slice:
    """An owned device."""
    return device(name, memory_gi, "w2", **{"product": "A100", "shared": True, **fields})


def rents(
    *own: Slice,
    guests: tuple[Replica, ...] = (replica(A, "a1", on=["new0"]),),
    others: tuple[Replica, ...] = (),
    of: Any = None,
    devices: int = 1,
    models: tuple[Model, ...] = (A, B, C),
    **fields: Any,
) -> World:
    """An order with the devices `new0` ... and these replicas on it, and owned devices."""
    observed_fields = {"gateways": CALLS, "histories": STARTED, "leading_since_s": T0 - 5000, **fields}
    begin = offered(world(models, own, others, **observed_fields), of or offer())
    order = AcquireOrder(
        id=LeaseId((of or offer()).provider, "l"), offer=of or offer(), devices=devices, owner=A.name, epoch=1,
        due_s=T0 + 100,
    )  # fmt: skip
    ordered = observe(begin, Acted(action=AcquireLease(order=order, reason="")))
    here = arrived(ordered, T0, (of or offer()).provider, devices=devices)
    there = {**here.replicas, **{one.id: one for one in guests}}
    return known(replace(here, replicas=there))


def move_of(name: str) -> Move:
    """The move of this replica to an owned device."""
    return Move(replica=ReplicaId(name))


def known(of: World) -> World:
    """The `World` with all derived fields."""
    after = rebuild_indices(of, T0)
    return replace(after, rented=compute_paid_capacity(after))


def moves(of: World, now_s: float = T0) -> list[tuple[str, Move | None]]:
    """(Slice, moved replica) of each start."""
    return [
        (one.replica.resources.slices[0], one.replica.move)
        for one in plan(of, now_s).actions
        if isinstance(one, StartReplica)
    ]


@pytest.mark.parametrize("calls", [True, False])
def test_replica_on_paid_capacity_gets_a_successor_on_owned_devices(calls: bool) -> None:
    begin = rents(home(), gateways=CALLS if calls else [gateway()])
    assert begin.rented == PaidCapacity(frozenset({ReplicaId("a1")}), frozenset({ModelName("a")}))
    (start,) = [one for one in plan(begin, T0).actions if isinstance(one, StartReplica)]
    assert (start.replica.resources.slices, start.replica.move) == (("own0",), move_of("a1"))
    assert start.reason == "move a from paid capacity of rack to devices without extra cost"


def test_order_is_released_after_its_replica_moves_to_an_owned_device() -> None:
    def demand(now_s: float, scene: Scene) -> list[tuple[str, int, int]]:
        del now_s
        return [("a", 0, 1)]

    scene = Scene(rents(home()), demand)
    scene.run(30)
    (left,) = [one for _, one in scene.verbs("drain") if isinstance(one, DrainReplica)]
    assert left.reason == "replaced by another replica on owned devices"
    assert [one.resources.slices for one in scene.world.replicas.values()] == [("own0",)]
    assert not scene.world.rented.guests
    scene.run(300)
    assert {one.order.id.name for one in releases(one for _, one in scene.actions)} == {"l"}
    assert not [one for _, one in scene.verbs("start")][1:], "no replica moves back and forth"


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(rents(), id="there is no room at home"),
        pytest.param(rents(home("own0", memory_gi=1)), id="none that is large enough"),
        pytest.param(rents(home(), of=offer(price_per_hour=0.0)), id="it costs nothing"),
        pytest.param(
            rents(home(), devices=2, guests=(replica(A, "a1", on=["new0"]), replica(B, "b1", on=["new1"]))),
            id="not for all who are on it",
        ),
        pytest.param(
            rents(home(), models=(replace(A, spec=replace(A.spec, rollout=Rollout(surge=0))), B, C)),
            id="no second one may be on its node",
        ),
        pytest.param(
            rents(home(), guests=(replica(A, "a1", on=["new0"], ready_s=T0 - 5, since_s=T0 - 5),)),
            id="it has just come",
        ),
        pytest.param(rents(home(), undisturbed={"a1": "pdb"}), id="a PodDisruptionBudget forbids it"),
        pytest.param(
            rents(
                home(),
                others=(replica(B, "b1", on=["x"], state=S.STARTING, move=move_of("c1")), replica(C, "c1", on=["y"])),
            ),
            id="another moves",
        ),
        pytest.param(rents(home(), gateways=[*CALLS, gateway("g2", seen_s=T0 - 100)]), id="a gateway is silent"),
        pytest.param(
            rents(home(product="T4"), models=(replace(A, spec=replace(A.spec, gpu=Gpu(models=("A100", "T4")))), B, C)),
            id="its Model likes that product less",
        ),
        pytest.param(
            rents(home(), gateways=[gateway(levels=[level("a", 0, 1), level("b", 1)], uses=[use("a1", 1)])]),
            id="another Model takes that room",
        ),
    ],
)
def test_replica_stays_if_moving_it_is_impossible_forbidden_or_useless(begin: World) -> None:
    assert not [move for _, move in moves(begin) if move is not None]


@pytest.mark.parametrize(("kept_s", "goes"), [("auto", True), (KEPT_S, True), (KEPT_S + 1, False)])
def test_keep_seconds_prevents_consolidation_only_above_a_limit(kept_s: float | Auto, goes: bool) -> None:
    named = ProviderSettings(name="rack", cro=Cro(model="A100"), keep_seconds=kept_s)
    at = known(replace(rents(home()), settings=Settings(capacity=(named,))))
    assert bool(moves(at)) is bool(at.rented.idlers) is goes


def test_replica_stays_if_its_move_would_not_release_the_order() -> None:
    begin = rents(home())
    foreign = replace_fields(begin, others={begin.nodes.slices[SliceId("new0")].counted: 1})
    (lease,) = begin.capacity.leases.values()
    assert lease.listed is not None
    alone = replace(lease, listed=replace(lease.listed, alone=True))
    only = replace(begin, capacity=replace(begin.capacity, leases={lease.id: alone}))
    on = {**only.nodes.slices, SliceId("w1-0"): device("w1-0", 16, "w1")}
    shared_node = known(
        replace_fields(only, slices=on, replicas={**only.replicas, ReplicaId("b1"): replica(B, "b1", on=["w1-0"])})
    )
    assert [bool(moves(known(one))) for one in (begin, foreign, only, shared_node)] == [True, False, True, False]


def test_capacity_order_with_the_fewest_replicas_is_vacated_first() -> None:
    two = (replica(A, "a1", on=["new0"]), replica(B, "b1", on=["new1"]))
    begin = rents(home(), home("own1"), devices=2, guests=two)
    (lease,) = begin.capacity.leases.values()
    assert lease.listed is not None
    whole = replace(lease.listed, name="m", node="n9", device_ids=(), offer=cloud())
    added = replace(lease, id=LeaseId("cloud", "m"), offer=cloud(), listed=whole)
    leases = {**begin.capacity.leases, added.id: added}
    there = device("far0", 16, "n9", product="A100", shared=True)
    alone = replica(C, "c1", on=["far0"])
    both = replace_fields(
        begin, capacity=replace(begin.capacity, leases=leases), slices={**begin.nodes.slices, there.id: there}
    )
    both = known(replace(both, replicas={**both.replicas, alone.id: alone}))
    assert both.rented.guests == {"a1", "b1", "c1"}
    assert moves(both) == [("own0", move_of("c1"))]


def test_idle_timeout_is_shortened_if_a_replica_could_leave_paid_capacity() -> None:
    idle = {**STARTED, "b": History(starts_s=(10.0,), last_activity_s=T0 - 55)}
    begin = rents(home(), others=(replica(B, "b1", on=["own0"]),), histories=idle)
    assert begin.rented.idlers == {"a", "b"}
    assert not plan(begin, T0 - 6).actions
    assert kinds(plan(begin, T0)) == ["drain b1"]
    assert (
        compute_desired_replicas(begin, B, T0 - 6).reason
        == "last used 49 s ago, idle timeout 50 s (shortened because it uses paid capacity)"
    )
    owned = rents(home(), others=(replica(B, "b1", on=["own0"]),), histories=idle, of=offer(price_per_hour=0.0))
    assert not plan(owned, T0).actions, "else its idle timeout is longer"


@pytest.mark.parametrize(
    ("of", "on"),
    [
        pytest.param(replace(B, spec=replace(B.spec, idle_seconds=300.0)), home(), id="its document sets the duration"),
        pytest.param(B, home(memory_gi=1), id="no replica could run there"),
        pytest.param(B, home(product="T4"), id="it is of another product"),
    ],
)
def test_idle_timeout_is_unchanged_if_explicit_or_device_is_unsuitable(of: Model, on: Slice) -> None:
    idle = {**STARTED, "b": History(starts_s=(10.0,), last_activity_s=T0 - 55)}
    likes = replace(A, spec=replace(A.spec, gpu=Gpu(models=("A100",))))
    guest = replica(likes, "a1", on=["new0"])
    begin = rents(on, guests=(guest,), others=(replica(of, "b1", on=["own0"]),), histories=idle, models=(likes, of, C))
    assert not plan(begin, T0).actions


def test_scale_down_prefers_the_replica_on_paid_capacity() -> None:
    both = (replica(A, "a1", on=["new0"], created_s=T0 - 3000),)
    begin = rents(
        home(), guests=both, others=(replica(A, "a2", on=["own0"], created_s=T0 - 2000),),
        gateways=[gateway(levels=[level("a", 0, 1)], uses=[use("a1", 1)])],
    )  # fmt: skip
    assert kinds(plan(begin, T0)) == ["drain a1"], "though the other is younger and has no Calls"


def idle(*since_s: float, starts_s: float = 10.0) -> dict[str, History]:
    """Histories of the models `b` and `c`, last requested this long ago."""
    histories = {
        name: History(starts_s=(starts_s,), last_activity_s=T0 - s) for name, s in zip("bc", since_s, strict=False)
    }
    return {**STARTED, **histories}


def test_consolidation_drains_only_the_longest_idle_of_two_idle_replicas() -> None:
    there = (replica(B, "b1", on=["own0"]), replica(C, "c1", on=["own1"]))
    both = rents(home(), home("own1"), others=there, histories=idle(60, 70))
    assert both.rented.idlers == {"a", "c"}
    assert kinds(plan(both, T0)) == ["drain c1"]
    assert rents(home(), home("own1"), home("own2"), others=there, histories=idle(60, 70)).rented.idlers == {"a"}


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(
            rents(home(), others=(replica(B, "b1", on=["own0"]),), histories=idle(60), undisturbed={"a1": "pdb"}),
            id="the guest does not move",
        ),
        pytest.param(
            rents(
                home(product="T4"), others=(replica(B, "b1", on=["own0"]),), histories=idle(60),
                models=(replace(A, spec=replace(A.spec, gpu=Gpu(models=("A100", "T4")))), B, C),
            ),
            id="the guest likes that less",
        ),
    ],
)  # fmt: skip
def test_idle_timeout_is_unchanged_if_no_replica_can_leave_paid_capacity(begin: World) -> None:
    assert begin.rented.idlers == {"a"}


def test_consolidation_ignores_a_device_of_unknown_memory() -> None:
    begin = rents(home(), devices=2)
    unknown = replace(begin.nodes.slices[SliceId("new1")], memory_bytes=0)
    assert moves(known(replace_fields(begin, slices={**begin.nodes.slices, unknown.id: unknown}))) == [
        ("own0", move_of("a1"))
    ]


def test_orders_whose_replicas_cannot_move_do_not_block_other_moves() -> None:
    stuck = [model(f"s{number}", 16, slots=1, rollout=Rollout(surge=0)) for number in range(LEASES_MAX + 2)]
    begin = rents(home(), models=(A, *stuck))
    (lease,) = begin.capacity.leases.values()
    assert lease.listed is not None
    leases, slices, replicas = dict(begin.capacity.leases), dict(begin.nodes.slices), dict(begin.replicas)
    for number, one in enumerate(stuck):
        of = cloud(f"o{number}", price_per_hour=9.0)
        whole = replace(lease.listed, name=f"s{number}", node=f"n{number}", device_ids=(), offer=of)
        made = replace(lease, id=LeaseId("cloud", f"s{number}"), offer=of, listed=whole)
        leases[made.id] = made
        there = device(f"far{number}", 16, f"n{number}", product="A100", shared=True)
        on = replica(one, f"r{number}", on=[there.id])
        slices[there.id], replicas[on.id] = there, on
    many = replace_fields(begin, capacity=replace(begin.capacity, leases=leases), slices=slices, replicas=replicas)
    assert moves(known(many)) == [("own0", move_of("a1"))]


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(
            rents(home(), gateways=[gateway()], histories={"a": History(starts_s=(10.0,), last_activity_s=T0 - 45)}),
            id="its idle timeout ends before a successor is ready",
        ),
        pytest.param(
            rents(home(), home("own1"), others=(replica(A, "a2", on=["own0"], created_s=T0 - 150, ready_s=T0 - 140),)),
            id="another serves the only Call",
        ),
        pytest.param(rents(home(), leading_since_s=T0 - LEADING_S + 1), id="who leads has only begun"),
        pytest.param(
            rents(
                home(), home("own1"), others=(replica(A, "a2", on=["own0"]),),
                models=(replace(A, spec=replace(A.spec, spread=HOSTS, replicas=ReplicaRange(min=2, max=4))),),
            ),
            id="its Model spreads its replicas",
        ),
    ],
)  # fmt: skip
def test_replica_that_stops_soon_or_may_not_move_gets_no_successor(begin: World) -> None:
    assert not [move for _, move in moves(begin) if move is not None]


def test_shortened_idle_timeout_is_not_recorded_as_premature_stop() -> None:
    begin = rents(home(), others=(replica(B, "b1", on=["own0"]),), histories=idle(60))
    assert kinds(plan(begin, T0)) == ["drain b1"]
    after, _ = acted(observe(begin, *(Acted(action=one) for one in plan(begin, T0).actions)), T0 + 1)
    assert after.learned.histories[B.name].stopped_idle_s is None


def test_draining_a_paid_node_restores_idle_timeouts_on_owned_devices() -> None:
    begin = rents(home(), others=(replica(B, "b1", on=["own0"]),), histories=idle(60))
    place = CordonTarget("node", "w1")
    drain = Cordon(place=place, node="w1", since_s=T0, drain=True)
    after = observe(begin, CordonsSeen(cordons=(drain,)))
    assert after.rented.idlers == {"a"}, "a replica that must leave anyway blocks no other"
    assert observe(after, CordonsSeen(cordons=())).rented.idlers == {"a", "b"}


def test_consolidation_move_does_not_delay_defragmentation_moves() -> None:
    begin = rents(home())
    after = folded(begin, plan(begin, T0).actions)
    assert after.moved_s is None

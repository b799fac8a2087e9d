"""Slot allocation with the real fold, shares and publish code, several gateways and faults, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
from msgspec.structs import replace

from autoscaler.contract import GatewayId, Level, ReplicaId, ReplicaUse, Report, TenantName
from autoscaler.fold.fold import fold
from autoscaler.routing import routes, slots
from autoscaler.routing import slots as shares
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.events import DocumentsSeen, GatewayGone, GatewaySeen, ReplicaSeen, Reported, Seen, Synced, Tick
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import Gateway, SliceId, World
from tests.support.builders.worlds import T0, device, level, model, replica, use, world
from tests.support.builders.worlds import gateway as known_gateway
from tests.support.example_budget import examples
from tests.support.harness.gateway.fleet import Fleet, Service
from tests.support.harness.gateway.hold_gateway import MODEL, HoldGateway

KINDS: Mapping[str, tuple[Service, float]] = {
    "exponential": (lambda r: r.expovariate(2.0), 0.5),
    "fixed": (lambda _: 0.05, 0.05),
    "lognormal": (lambda r: min(20.0, r.lognormvariate(1.0, 0.9)), 4.0),
}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def saturated(fleet: Fleet, mean_s: float, seconds: float, load: float = 1.2) -> Fleet:
    """More requests than slots, most of them through the first gateway, from Tenants A and B equally."""
    at_s = 0.5
    weights = [2.0**-k for k in range(len(fleet.gateways))]
    while at_s < seconds:
        at_s += fleet.random.expovariate(load * fleet.slots * len(fleet.replicas) / mean_s)
        gateway, tenant = fleet.random.choices(fleet.gateways, weights)[0], fleet.random.choice("AB")
        fleet.at(at_s, partial(fleet.arrive, gateway, tenant))
    fleet.run(seconds)
    return fleet


def chaos(gateways: int, slots: int, replicas: int, seed: int, seconds: float = 30.0) -> Fleet:
    """Crashes, restarts and leader changes under load, with a tenth of the reports lost; then a quiet period."""
    fleet = Fleet(gateways, slots, seed, lost=0.1, replicas=replicas)
    at_s = 0.0
    while at_s < seconds:
        at_s += fleet.random.expovariate(slots * replicas * 2.0)
        gateway, tenant = fleet.random.choice(fleet.gateways), fleet.random.choice("AB")
        fleet.at(at_s, partial(fleet.arrive, gateway, tenant))
    at_s = 4.0
    while at_s < seconds - 10.0:
        at_s += 3.0
        gateway, away_s = fleet.random.choice(fleet.gateways), fleet.random.choice([0.2, 3.0, 12.0])
        if fleet.random.random() < 0.5:
            fleet.at(at_s, partial(fleet.crash, gateway, away_s))
        else:
            fleet.at(at_s, partial(fleet.leader_dies, away_s / 2))
    fleet.run(seconds + 40.0)
    return fleet


@pytest.mark.parametrize(("gateways", "slots", "replicas"), [(2, 1, 1), (3, 4, 1), (3, 4, 2), (4, 16, 1)])
def test_slot_limit_holds_through_crashes_restarts_and_leader_changes(gateways: int, slots: int, replicas: int) -> None:
    """The fleet raises at the first request above the limit; in the end all queued requests were served."""
    for seed in range(examples(40 if slots * replicas < 8 else 8)):
        fleet = chaos(gateways, slots, replicas, seed)
        assert not any(gateway.waiting() for gateway in fleet.gateways), f"seed {seed}"
        assert fleet.done


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gateways", "slots", "replicas"), [(1, 4, 1), (2, 1, 1), (2, 4, 1), (4, 4, 1), (4, 4, 3)])
def test_free_slot_serves_queued_request_within_55_ms_if_reports_arrive(
    kind: str, gateways: int, slots: int, replicas: int
) -> None:
    """100 ms if a tenth of the reports is lost; longer if three in a row are lost, but in less than 1 % of cases."""
    service, mean_s = KINDS[kind]
    whole = saturated(Fleet(gateways, slots, 1, service=service, replicas=replicas), mean_s, 20.0)
    assert max(whole.gaps_s, default=0.0) <= 0.055
    lossy = saturated(Fleet(gateways, slots, 1, service=service, replicas=replicas, lost=0.1), mean_s, 20.0)
    assert percentile(lossy.gaps_s, 0.98) <= 0.110
    assert max(lossy.gaps_s, default=0.0) <= 0.250


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("gateways", [2, 4])
def test_single_request_gets_the_next_slot_despite_500_of_another_tenant(gateways: int, slots: int) -> None:
    """500 requests of A are queued at the first gateway when one of B arrives at the last."""
    for seed in range(examples(20)):
        fleet = Fleet(gateways, slots, seed)
        for call in range(500):
            fleet.at(0.1 + call * 1e-4, partial(fleet.arrive, fleet.gateways[0], "A"))
        fleet.at(3.0, partial(fleet.arrive, fleet.gateways[-1], "B"))
        fleet.run(20.0)
        release_s = min(at_s for at_s in fleet.releases_s if at_s > 3.05)
        assert fleet.granted_s["B"] <= release_s + 0.055, f"seed {seed}"


@pytest.mark.parametrize(("gateways", "slots"), [(1, 4), (2, 1), (2, 4), (4, 64)])
def test_tenants_of_equal_weight_get_equal_shares_on_one_or_more_gateways(gateways: int, slots: int) -> None:
    """B sends as much as A, but all through the last gateway: their totals differ by at most 2 %."""
    fleet = Fleet(gateways, slots, 7, service=lambda r: r.uniform(0.04, 0.06))
    backlog(fleet, {"A": fleet.gateways[0], "B": fleet.gateways[-1]}, 30.0)
    assert abs(fleet.done["A"] / fleet.done["B"] - 1.0) <= 0.02


def test_tenant_with_triple_weight_is_served_three_times_as_often() -> None:
    fleet = Fleet(2, 1, 3, service=lambda r: r.uniform(0.04, 0.06), weights={"A": 3.0, "B": 1.0})
    backlog(fleet, {"A": fleet.gateways[0], "B": fleet.gateways[1]}, 60.0)
    assert abs(fleet.done["A"] / fleet.done["B"] / 3.0 - 1.0) <= 0.03


def backlog(fleet: Fleet, senders: Mapping[str, HoldGateway], seconds: float) -> None:
    """Keep a few hundred requests of each Tenant queued at its gateway."""

    def refill() -> None:
        for tenant, gateway in senders.items():
            missing = 300 - len(gateway.queues.get(TenantName(tenant), ()))
            for _ in range(missing):
                fleet.arrive(gateway, tenant)
        if fleet.now_s < seconds:
            fleet.at(0.1, refill)

    fleet.at(0.5, refill)
    fleet.run(seconds)


def test_requests_of_one_tenant_do_not_starve_on_any_gateway() -> None:
    """One slot, one Tenant on all gateways, always more requests than it can serve: all gateways serve."""
    fleet = Fleet(3, 1, 5, service=lambda _: 0.05)
    served: dict[str, int] = {}

    def arrive(gateway: HoldGateway) -> None:
        fleet.arrive(gateway, "A")
        if fleet.now_s < 20.0:
            fleet.at(0.06, lambda: arrive(gateway))

    for gateway in fleet.gateways:
        fleet.at(0.5, partial(arrive, gateway))
    for tenth in range(200):
        fleet.at(tenth / 10, lambda: served.update({g.id: served.get(g.id, 0) + len(g.calls) for g in fleet.gateways}))
    fleet.run(20.0)
    assert min(served.values()) > 0.15 * sum(served.values())


# --- single steps ---------------------------------------------------------------------------------------------------

R, R0, G1, G2 = ReplicaId("r"), ReplicaId("r0"), GatewayId("g1"), GatewayId("g2")


def seen(state: Seen, slots: int = 4, id: ReplicaId = R) -> ReplicaSeen:
    return ReplicaSeen(
        id=id, model=MODEL, spec_hash="h", intent="i", slices=(SliceId("s"),), memory_bytes=0, slots=slots, seen=state,
        address="127.0.0.1:1",
    )  # fmt: skip


def lead(*gateways: GatewayId, slots: int = 4) -> World:
    """The state of a new leader with one ready replica and these known gateways, whose processes are watched."""
    model = Model(name=MODEL, spec=ModelSpec(engine="command"), slots=slots)
    known = [GatewaySeen(gateway=id, watched=True) for id in gateways]
    return fold(World(epoch=2), [DocumentsSeen(models=(model,)), *known, seen(Seen.READY, slots), Synced()], 100.0)[0]


def report(world: World, id: GatewayId, sequence: int, *, hold: int = 0, use: int = 0, waiting: int = 0) -> Reported:
    """A report of `id` that acknowledges the current version of `world`."""
    return Reported(
        report=Report(
            gateway=id,
            boot="b",
            sequence=sequence,
            epoch=world.epoch,
            version=world.version,
            levels=(Level(model=MODEL, tenant=TenantName("A"), waiting=waiting, running=use),)
            if waiting or use
            else (),
            replicas=(ReplicaUse(replica=R, hold=hold, in_use=use),) if hold or use else (),
        )
    )


def divided(world: World, now_s: float = 100.0) -> tuple[World, dict[GatewayId, int]]:
    """The state after a slot division, and the changed allocations by gateway."""
    moved = shares.divide_slots(world, now_s)
    if moved is None:
        return world, {}
    return fold(world, (moved,), now_s)[0], {gateway: hold for gateway, _, hold in moved.holds}


def test_new_leader_divides_no_slots_until_all_gateways_report_or_die() -> None:
    """A silent gateway is not dead: its slots stay reserved even after 20 s, until its process is gone."""
    world = lead(G1, G2)
    world, _ = fold(world, [report(world, G1, 1, hold=1, waiting=3)], 100.0)
    assert shares.divide_slots(world, 100.0) is None
    world, _ = fold(world, [report(world, G1, 2, hold=1, waiting=3)], 120.0)
    assert shares.divide_slots(world, 120.0) is None
    world, _ = fold(world, [GatewayGone(gateway=G2)], 120.0)
    assert divided(world, 120.0)[1] == {G1: 4}


def test_report_of_an_older_epoch_adds_demand_but_allows_no_slot_division() -> None:
    """It still applies the routes of another leader."""
    world = lead(G1)
    old = report(world, G1, 1, hold=4, use=1).report
    world, _ = fold(
        world, [Reported(report=Report(**{f: getattr(old, f) for f in old.__struct_fields__} | {"epoch": 1}))], 100.0
    )
    assert not world.gateways[G1].in_epoch
    assert world.loads[MODEL].running == 1
    assert shares.divide_slots(world, 100.0) is None


def test_new_leader_keeps_the_slots_that_gateways_report() -> None:
    """Slots held before: 3 in use at the first, 1 unused at the second, which has no requests."""
    world = lead(G1, G2)
    batch = [report(world, G1, 1, hold=3, use=3), report(world, G2, 1, hold=1)]
    world, _ = fold(world, batch, 100.0)
    assert divided(world)[1] == {}


def test_slot_moves_to_another_gateway_only_after_it_is_returned() -> None:
    """It is lowered, acknowledged, and only then raised elsewhere."""
    world = lead(G1, G2)
    world, _ = fold(world, [report(world, G1, 1), report(world, G2, 1)], 100.0)
    world, moved = divided(world)
    assert moved == {G1: 2, G2: 2}
    unacknowledged = world
    world, _ = fold(world, [report(world, G2, 2, hold=2, use=2, waiting=5)], 100.1)
    world, moved = divided(world, 100.1)
    assert moved == {G1: 0}
    world, _ = fold(world, [report(unacknowledged, G1, 2, hold=2)], 100.2)
    assert divided(world, 100.2)[1] == {}
    world, _ = fold(world, [report(world, G1, 3)], 100.3)
    assert divided(world, 100.3)[1] == {G2: 4}


def test_requests_above_a_reduced_allocation_keep_their_slots_to_the_end() -> None:
    """No request is cut off: their slots are reallocated when they end."""
    world = lead(G1, G2)
    world, _ = fold(world, [report(world, G1, 1), report(world, G2, 1)], 100.0)
    world, _ = divided(world)
    world, _ = fold(world, [report(world, G1, 2, hold=2, use=2), report(world, G2, 2, hold=2, use=2, waiting=9)], 100.1)
    world, moved = divided(world, 100.1)
    assert moved == {G1: 1}
    world, _ = fold(world, [report(world, G1, 3, hold=1, use=2)], 100.2)
    world, moved = divided(world, 100.2)
    assert G2 not in moved
    world, _ = fold(world, [report(world, G1, 4, hold=0, use=1)], 100.3)
    assert divided(world, 100.3)[1] == {G2: 3}


def test_slots_of_an_unready_replica_are_withdrawn_until_ready_again() -> None:
    """The version that reports it lowers each allocation; when it is ready again, they are raised again."""
    world = lead(G1)
    world, _ = fold(world, [report(world, G1, 1)], 100.0)
    world, moved = divided(world)
    assert moved == {G1: 4}
    world, _ = fold(world, [seen(Seen.UNREADY)], 100.1)
    assert shares.read_latest_hold(world.gateways[G1], R) == 0
    assert shares.compute_claimed_slots(world.gateways[G1], R) == 4
    assert divided(world, 100.1)[1] == {}
    world, _ = fold(world, [seen(Seen.READY)], 100.2)
    assert divided(world, 100.2)[1] == {G1: 4}


def test_gateway_restart_frees_its_slots_and_ignores_its_older_reports() -> None:
    world = lead(G1, G2)
    world, _ = fold(world, [report(world, G1, 1, hold=4, use=4), report(world, G2, 1, waiting=4)], 100.0)
    world, _ = divided(world)
    late = report(world, G1, 9, hold=4, use=4)
    reborn = Report(gateway=G1, boot="b2", sequence=1, epoch=world.epoch, version=world.version)
    world, _ = fold(world, [Reported(report=reborn), late], 100.1)
    assert world.gateways[G1].boot == "b2"
    assert divided(world, 100.1)[1] == {G2: 4}


def test_silent_gateway_keeps_its_claimed_slots_until_confirmed_gone() -> None:
    """An expired report is no proof of death: slots that it may be using are not reallocated."""
    world = lead(G1, G2)
    world, _ = fold(world, [report(world, G1, 1, hold=2, use=2), report(world, G2, 1, hold=2, use=2)], 100.0)
    world, _ = fold(world, [report(world, G2, 2, hold=2, use=2, waiting=5), Tick()], 111.0)
    assert world.loads[MODEL].running == 2
    world, moved = divided(world, 111.0)
    assert moved == {G1: 0}
    world, _ = fold(world, [GatewayGone(gateway=G1)], 112.0)
    assert divided(world, 112.0)[1] == {G2: 4}


def test_unwatched_gateway_loses_its_slots_when_its_report_expires() -> None:
    """Nothing else would ever free them: the gateway is known only from its reports."""
    stranger = GatewayId("stranger")
    world = lead(G1)
    world, _ = fold(world, [report(world, G1, 1), report(world, stranger, 1)], 100.0)
    world, moved = divided(world)
    assert moved == {G1: 2, stranger: 2}
    world, _ = fold(world, [report(world, G1, 2, hold=2, use=2, waiting=5), report(world, stranger, 2, hold=2)], 101.0)
    world, moved = divided(world, 101.0)
    assert moved == {stranger: 0}, "it gives its slots back when it acts on this"
    world, _ = fold(world, [report(world, G1, 3, hold=2, use=2, waiting=5), Tick()], 110.5)
    assert divided(world, 110.5)[1] == {}
    world, _ = fold(world, [report(world, G1, 4, hold=2, use=2, waiting=5), Tick()], 111.0)
    world, moved = divided(world, 111.0)
    assert moved == {G1: 4}
    assert not world.gateways[stranger].gone, "a drain still waits for it"


def test_used_slots_of_an_expired_gateway_count_again_after_a_new_report() -> None:
    """Its process is alive and uses its slots."""
    stranger = GatewayId("stranger")
    world = lead(G1)
    world, _ = fold(world, [report(world, G1, 1), report(world, stranger, 1)], 100.0)
    world, _ = divided(world)
    world, _ = fold(world, [report(world, G1, 2, hold=2, waiting=9), Tick()], 111.0)
    world, moved = divided(world, 111.0)
    assert moved == {G1: 4}
    world, _ = fold(world, [report(world, stranger, 2, hold=2, use=2)], 112.0)
    found = world.gateways[stranger]
    assert (found.lapsed, found.gone, shares.compute_claimed_slots(found, R)) == (False, False, 2)


def test_higher_priority_gets_all_slots_before_fair_sharing() -> None:
    world = lead(G1, G2)

    def wanting(id: GatewayId, priority: int) -> Reported:
        level = Level(model=MODEL, tenant=TenantName("A"), priority=priority, waiting=9)
        return Reported(
            report=Report(gateway=id, boot="b", sequence=1, epoch=world.epoch, version=world.version, levels=(level,))
        )

    world, _ = fold(world, [wanting(G1, 0), wanting(G2, 5)], 100.0)
    assert divided(world)[1] == {G2: 4}


def test_gateway_heartbeat_without_changes_divides_no_slots() -> None:
    """The heartbeat changes no level, so no Model is marked for division."""
    world = lead(G1)
    world, _ = fold(world, [report(world, G1, 1)], 100.0)
    world, _ = divided(world)
    world, _ = fold(world, [report(world, G1, 2, hold=4)], 100.5)
    world, _ = divided(world, 100.5)
    assert world.undivided == frozenset()
    world, _ = fold(world, [report(world, G1, 3, hold=4)], 101.0)
    assert shares.divide_slots(world, 101.0) is None


def test_fleet_harness_detects_a_gateway_that_uses_unallocated_slots() -> None:
    """All other tests rely on this check."""
    fleet = Fleet(2, 2, 1, service=lambda _: 5.0)
    fleet.run(2.0)
    thief = fleet.gateways[0]
    thief.held[R0].hold = 2
    for gateway in fleet.gateways:
        fleet.arrive(gateway, "A")
    fleet.arrive(thief, "A")
    with pytest.raises(AssertionError, match="Calls on 2 Slots"):
        fleet.run(2.1)


def test_restarted_gateway_does_not_inherit_its_former_slots() -> None:
    """It reads its routes before the leader has received its new boot ID."""
    fleet = Fleet(2, 4, 1)
    fleet.run(2.0)
    gateway = fleet.gateways[0]
    assert gateway.held[R0].hold == 2
    gateway.crash()
    gateway.restart()
    full = routes.routes_full(fleet.world, gateway.id, 2.0, boot=gateway.boot_name())
    assert [route.hold for route in full.replicas] == [0]


# --- while another replica drains -----------------------------------------------------------------------------------


M = model("m", 4, slots=2, high=2)


def draining_world(*gateways: Gateway) -> World:
    """One replica drains, one with two slots is ready, and no slots are allocated."""
    old, new = replica(M, "old", state=ReplicaState.DRAINING), replica(M, "new", created_s=T0)
    made = world([M], [device()], [old, new], gateways, handed_over=True)
    return replace(made, undivided=frozenset({M.name}))


def given(made: World) -> dict[str, int]:
    answer = slots.divide_slots(made, T0)
    assert answer is not None
    assert all(on == "new" for _, on, _ in answer.holds)
    return {id: hold for id, _, hold in answer.holds}


def test_request_on_a_draining_replica_needs_no_slot_on_another_replica() -> None:
    """`lab` is due one of two slots, but its request is on the old replica: it would return the slot repeatedly."""
    made = draining_world(
        known_gateway("g1", [level("m", 0, 1, tenant="lab")], [use("old", 1)]),
        known_gateway("g2", [level("m", 1, wait_s=2.0)]),
        known_gateway("g3", [level("m", 1, 1, wait_s=1.0)], [replace(use("new", 1), hold=0)]),
    )
    assert given(made) == {"g2": 1, "g3": 1}


@pytest.mark.parametrize(("waiting", "holds"), [(0, {"g2": 2}), (1, {"g1": 1, "g2": 1})])
def test_queued_requests_get_slots_despite_a_request_on_a_draining_replica(waiting: int, holds: dict[str, int]) -> None:
    one = known_gateway("g1", [level("m", waiting, 1, wait_s=9.0, tenant="lab")], [use("old", 1)])
    assert given(draining_world(one, known_gateway("g2", [level("m", 5, wait_s=2.0)]))) == holds


def test_lowest_priority_request_is_assumed_on_the_draining_replica() -> None:
    levels = [replace(level("m", 0, 1), priority=5), level("m", 2, 1)]
    made = draining_world(known_gateway("g1", levels, [use("old", 1), use("new", 1)]))
    left = slots._on_ready(made.gateways[GatewayId("g1")], M.name, [made.replicas[ReplicaId("new")]])
    assert {(each.priority, each.waiting, each.running) for each in left} == {(5, 0, 1), (0, 2, 0)}

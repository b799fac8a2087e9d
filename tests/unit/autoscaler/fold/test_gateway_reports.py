"""Gateway reports: demand that expires, service totals, gateway restarts and deaths, and acknowledged allocations."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from autoscaler.contract import ReplicaUse, TenantName
from autoscaler.fold.draft import with_grant
from autoscaler.fold.fold import fold
from autoscaler.fold.gateway_reports import is_redundant_report, reconcile_grants
from autoscaler.queries.gateway_reports import next_change_s
from autoscaler.spec.tenant import Tenant, TenantSpec
from autoscaler.state.actions import DrainReplica
from autoscaler.state.events import DocumentsSeen, GatewayGone, GatewaySeen, Tick
from autoscaler.state.world import Grant
from tests.support.builders.fold import DOC, G1, M, R, after, reported, total
from tests.support.builders.worlds import T0, device, level, replace_fields, replica, world


def test_demand_is_summed_over_gateways_with_the_oldest_wait() -> None:
    at, _ = after(
        world([DOC], gateways=[]),
        reported(1, levels=[level("m", waiting=3, running=2, wait_s=4.0)]),
        reported(1, levels=[level("m", waiting=1, wait_s=1.0, tenant="lab")], name="g2"),
    )
    load = at.loads[M]
    assert (load.waiting, load.running, load.oldest_s) == (4, 2, T0 - 4.0)
    assert load.tenants == {"acme", "lab"}
    assert load.waiting_at == {"g1", "g2"}


def test_late_and_duplicate_gateway_reports_are_ignored() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(5, levels=[level("m", waiting=3)]))
    same, _ = after(at, reported(5, levels=[level("m", waiting=3)]), reported(4), now_s=T0 + 1.0)
    assert same is at


def test_demand_of_a_silent_gateway_expires_after_ten_seconds() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, levels=[level("m", running=3)]))
    at, _ = after(at, Tick(), now_s=T0 + 9.9)
    assert at.loads[M].running == 3
    at, _ = after(at, Tick(), now_s=T0 + 10.0)
    assert at.loads == {}
    assert at.learned.histories[M].last_activity_s == T0
    assert not at.gateways[G1].gone


def test_used_slot_time_restarts_at_zero_when_a_model_is_removed() -> None:
    """Its replica drains, and its service is still reported."""
    acme = TenantName("acme")
    at, _ = after(world([DOC], gateways=[]), reported(1, totals=(total(busy_slot_us=2_000_000),)))
    at, _ = after(at, DocumentsSeen(), reported(2, totals=(total(busy_slot_us=5_000_000),)))
    assert at.learned.attained == {M: {acme: 3.0}}


@pytest.mark.parametrize("seen_s", [T0 + math.pi * number for number in range(20)])
def test_demand_expires_exactly_at_the_scheduled_recheck_time(seen_s: float) -> None:
    """Not with the next Tick, up to a second later, because of a rounding error."""
    at, _ = after(world([DOC], gateways=[]), reported(1, levels=[level("m", running=3)]), now_s=seen_s)
    due_s = next_change_s(at, seen_s + 9.0)
    assert due_s is not None
    at, _ = after(at, Tick(), now_s=due_s)
    assert at.loads == {}


def test_larger_last_byte_age_does_not_trigger_a_new_slot_allocation() -> None:
    """Otherwise every report of a busy gateway would cause a new division for all of its Models."""
    held = ReplicaUse(replica=R, hold=1, in_use=1, last_byte_age_s=2.0)
    at, _ = after(world([DOC], [device()], [replica(DOC, "r")], gateways=[]), reported(1, uses=(held,)))
    at = replace(at, undivided=frozenset())
    at, _ = after(at, reported(2, uses=(replace(held, last_byte_age_s=3.0),)), now_s=T0 + 1.0)
    assert at.undivided == frozenset()
    report = at.gateways[G1].report
    assert report is not None
    assert report.replicas[0].last_byte_age_s == 3.0
    at, _ = after(at, reported(3, uses=(replace(held, in_use=0),)), now_s=T0 + 2.0)
    assert at.undivided == {M}


HELD = ReplicaUse(replica=R, hold=1, in_use=1, last_byte_age_s=2.0)
OLDER = reported(
    2, levels=[level("m", waiting=3, wait_s=1.5)], uses=(replace(HELD, last_byte_age_s=0.5),),
    totals=(total(admitted=3, waiting_call_us=99, tokens_out=7),),
).report  # fmt: skip


@pytest.mark.parametrize(
    ("change", "same"),
    [
        *((report, True) for report in ({}, {"levels": (level("m", waiting=3), level("other"))}, {"totals": ()})),
        ({"levels": (level("m", waiting=4),)}, False),
        *((report, False) for report in ({"levels": (level("m", waiting=3, tenant="lab"),)}, {"levels": ()})),
        ({"totals": (total(admitted=4),)}, False),
        ({"totals": (total(admitted=3, finished=1),)}, False),
        ({"totals": (replace(total(), tenant=TenantName("lab")),)}, False),
        *((report, False) for report in ({"replicas": (replace(HELD, in_use=0),)}, {"replicas": ()}, {"boot": "b2"})),
        ({"epoch": 2}, False),
    ],
)
def test_gateway_report_is_redundant_only_if_nothing_but_time_changed(change: dict[str, object], same: bool) -> None:
    first = reported(1, levels=[level("m", waiting=3, wait_s=1.0)], uses=(HELD,), totals=(total(admitted=3),))
    at, _ = after(world([DOC], [device()], [replica(DOC, "r")], gateways=[]), first)
    assert is_redundant_report(at, replace(OLDER, **change)) is same
    silent, _ = after(at, Tick(), now_s=T0 + 10.0)
    assert not is_redundant_report(silent, OLDER), "its demand had expired"
    removed, _ = after(at, GatewayGone(gateway=G1, boot="b"))
    assert not is_redundant_report(removed, OLDER), "the gateway is alive again"


def test_report_that_adds_only_slot_time_is_redundant_if_no_request_waits() -> None:
    """If a request waits, the total matters: it decides which Tenant is next, before the slot is free."""
    served = (total(admitted=3, busy_slot_us=50_000),)
    for waiting, same in ((1, False), (0, True)):
        levels = [level("m", waiting=waiting, running=1)]
        first = reported(1, levels=levels, uses=(HELD,), totals=(total(admitted=3),))
        at, _ = after(world([DOC], [device()], [replica(DOC, "r")], gateways=[]), first)
        assert is_redundant_report(at, reported(2, levels=levels, uses=(HELD,), totals=served).report) is same


def test_report_of_a_newer_version_is_redundant_unless_a_change_is_pending() -> None:
    first = reported(1, levels=[level("m", waiting=3, wait_s=1.0)], uses=(HELD,), totals=(total(admitted=3),))
    later = replace(OLDER, version=2)
    at, _ = after(world([DOC], [device()], [replica(DOC, "r")], gateways=[]), first)
    assert is_redundant_report(at, later)
    known = at.gateways[G1]
    asked = replace(known, grants={R: (*known.grants[R], Grant(version=2, hold=0))})
    assert not is_redundant_report(replace(at, gateways={G1: asked}), later)
    drains, _ = after(at, DrainReplica(replica=R, reason="test"))
    assert not is_redundant_report(drains, replace(later, version=drains.version))


def test_queued_requests_in_a_report_are_dated_by_its_arrival_time() -> None:
    one = replace(reported(1, levels=[level("m", waiting=3, wait_s=4.0)], totals=(total(idle_s=2.0),)), came_s=T0)
    at, _ = after(world([DOC], gateways=[]), one, now_s=T0 + 0.9)
    assert (at.gateways[G1].seen_s, at.loads[M].oldest_s) == (T0, T0 - 4.0)


def test_used_slot_time_is_the_counter_growth_within_one_gateway_boot() -> None:
    acme = TenantName("acme")
    at, _ = after(world([DOC], gateways=[]), reported(1, totals=(total(busy_slot_us=2_000_000),)))
    at, _ = after(at, reported(2, totals=(total(busy_slot_us=5_000_000),)))
    assert at.learned.attained[M] == {acme: 5.0}
    at, _ = after(at, reported(1, boot="b2", totals=(total(busy_slot_us=1_000_000),)))
    assert at.learned.attained[M] == {acme: 6.0}
    heavy = Tenant(name=acme, spec=TenantSpec(weight=2.0))
    at, _ = after(replace(at, tenants={acme: heavy}), reported(2, boot="b2", totals=(total(busy_slot_us=5_000_000),)))
    assert at.learned.attained[M] == {acme: 8.0}, "4 s at twice the weight"


@pytest.mark.parametrize(("had_s", "starts_s"), [(None, 100.0), (1.0, 100.0), (99.0, 100.0), (101.0, 101.0)])
def test_returning_tenant_gets_at_least_the_service_of_the_least_served(had_s: float | None, starts_s: float) -> None:
    """For a new or a returning Tenant, time without requests earns no credit, and a higher total is kept."""
    attained = {TenantName("busy"): 100.0} | ({TenantName("acme"): had_s} if had_s is not None else {})
    at, _ = after(world([DOC], gateways=[]), reported(1, levels=[level("m", running=1, tenant="busy")]))
    levels = [level("m", running=1, tenant="busy"), level("m", waiting=1, tenant="acme")]
    at, _ = after(replace_fields(at, attained={M: attained}), reported(2, levels=levels))
    assert at.learned.attained[M][TenantName("acme")] == starts_s


def test_tenants_that_return_to_an_idle_model_get_equal_service_totals() -> None:
    """It holds in either order of their return."""
    busy, acme = TenantName("busy"), TenantName("acme")
    idle = replace_fields(world([DOC], gateways=[]), attained={M: {busy: 100.0, acme: 1.0}})
    for first, then in ((busy, acme), (acme, busy)):
        at, _ = after(idle, reported(2, levels=[level("m", waiting=1, tenant=first)]))
        both = [level("m", waiting=1, tenant=first), level("m", waiting=1, tenant=then)]
        at, _ = after(at, reported(3, levels=both))
        assert at.learned.attained[M] == {busy: 100.0, acme: 100.0}


def test_rejected_cold_request_is_demand_for_twice_its_retry_after_time() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, totals=(total(refused_cold=1, retry_after_s=30.0),)))
    history = at.learned.histories[M]
    assert (history.refused_cold_s, history.hold_until_s) == (T0, T0 + 60.0)
    again, _ = after(at, reported(2, totals=(total(refused_cold=1, retry_after_s=30.0, idle_s=5.0),)), now_s=T0 + 5.0)
    assert again.learned.histories[M] == history


def test_gateway_counter_that_decreases_is_counted_from_zero() -> None:
    """A Model was removed from the documents and added again: its first rejected cold request is demand as usual."""
    at, _ = after(
        world([DOC], gateways=[]), reported(1, totals=(total(admitted=9, refused_cold=5, busy_slot_us=3_000_000),))
    )
    again = total(refused_cold=1, retry_after_s=30.0, busy_slot_us=2_000_000)
    at, _ = after(at, reported(2, totals=(again,)), now_s=T0 + 100.0)
    assert at.learned.histories[M].refused_cold_s == T0 + 100.0
    assert at.learned.attained[M][TenantName("acme")] == 5.0


def test_idle_time_counts_from_the_last_finished_request_on_any_gateway() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, totals=(total(finished=1, idle_s=20.0),)))
    assert at.learned.histories[M].last_activity_s == T0 - 20.0
    at, _ = after(at, reported(1, name="g2", totals=(total(finished=1, idle_s=50.0),)))
    assert at.learned.histories[M].last_activity_s == T0 - 20.0


def test_late_report_of_a_dead_gateway_is_ignored() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, levels=[level("m", waiting=3)]))
    at, _ = after(at, GatewayGone(gateway=G1), reported(2, levels=[level("m", waiting=3)]), now_s=T0 + 1.0)
    assert at.gateways[G1].gone
    assert at.loads == {}
    at, _ = after(at, Tick(), now_s=T0 + 61.0)
    assert at.gateways == {}


def test_dead_gateway_is_alive_again_only_after_it_applies_newer_routes() -> None:
    """However late: otherwise it would stay known and silent, never be proven dead, and nothing would become idle."""
    at, _ = after(world([DOC], gateways=[]), reported(1, levels=[level("m", waiting=3)], version=1))
    dead, _ = after(at, GatewayGone(gateway=G1))
    assert fold(dead, [reported(2, levels=[level("m", waiting=3)], version=at.version)], T0 + 8.0)[0] is dead
    assert dead.version > at.version, "there are Routes that only the living can act on"
    alive, _ = after(dead, reported(2, levels=[level("m", waiting=3)], version=dead.version), now_s=T0 + 0.1)
    assert not alive.gateways[G1].gone
    assert alive.loads[M].waiting == 3


def test_report_or_death_of_a_former_boot_does_not_affect_the_current_boot() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, boot="b1"), reported(1, boot="b2"))
    assert fold(at, [GatewayGone(gateway=G1, boot="b1")], T0)[0] is at
    unknown, _ = after(world([DOC], gateways=[]), reported(1, boot="b2"))
    assert fold(unknown, [reported(99, boot="b1", epoch=0)], T0)[0] is unknown, "only its epoch shows that it is older"


def test_late_report_of_a_dead_boot_does_not_block_its_successor() -> None:
    """Both applied this leader's routes; the living one is the one that goes on to apply newer routes."""
    at, _ = after(world([DOC], gateways=[]), reported(1, boot="b2", version=3))
    assert fold(at, [reported(9, boot="b1", version=2)], T0)[0] is at, "an older version is an older boot's"
    before = at.version
    at, _ = after(at, reported(9, boot="b1", version=3))
    assert at.gateways[G1].boot == "b1", "level with the living one: it is unknown which one is current"
    assert at.version > before, "so there is a newer one to act on"
    at, _ = after(at, reported(2, boot="b2", version=4))
    assert (at.gateways[G1].boot, at.gateways[G1].boots_before) == ("b2", ("b1",))
    assert fold(at, [reported(10, boot="b1", version=3)], T0)[0] is at


def test_gateway_joins_a_leader_epoch_with_its_first_report_in_that_epoch() -> None:
    at, _ = after(world([DOC], gateways=[]), GatewaySeen(gateway=G1))
    assert not at.gateways[G1].in_epoch
    assert not at.leadership.handed_over
    at, _ = after(at, reported(1, epoch=0))
    assert not at.gateways[G1].in_epoch
    at, _ = after(at, reported(2))
    assert at.gateways[G1].in_epoch
    assert at.leadership.handed_over


# --- allocations ------------------------------------------------------------------------------------------------------


def grants(*pairs: tuple[int, int]) -> tuple[Grant, ...]:
    return tuple(Grant(version=version, hold=hold) for version, hold in pairs)


@pytest.mark.parametrize(
    ("version", "hold", "left"),
    [
        (3, 4, grants((2, 4), (5, 2), (8, 1))),
        (5, 2, grants((5, 2), (8, 1))),
        (7, 1, grants((5, 2), (8, 1))),
        (8, 1, grants((8, 1))),
        (9, 0, None),
        (1, 4, grants((2, 4), (5, 2), (8, 1))),
    ],
)
def test_report_drops_allocations_older_than_the_acknowledged_one(version: int, hold: int, left: object) -> None:
    use = ReplicaUse(replica=R, hold=hold)
    assert reconcile_grants({R: grants((2, 4), (5, 2), (8, 1))}, {R: use}, version).get(R) == left


def test_slots_allocated_by_a_former_leader_are_kept_as_reported() -> None:
    assert reconcile_grants({}, {R: ReplicaUse(replica=R, hold=3)}, 7) == {R: grants((0, 3))}
    assert reconcile_grants({R: grants((0, 3))}, {R: ReplicaUse(replica=R, hold=2)}, 7) == {R: grants((0, 2))}
    assert reconcile_grants({R: grants((0, 3))}, {}, 7) == {}


def test_new_allocation_replaces_older_allocations_that_are_not_larger() -> None:
    assert with_grant(grants((1, 4), (2, 2), (3, 1)), Grant(version=4, hold=2)) == grants((1, 4), (4, 2))

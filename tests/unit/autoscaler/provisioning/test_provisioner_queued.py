"""Orders that may be queued for days: one per model, kept while needed, and with no estimate beyond what is known."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from autoscaler.capacity.lead_times import DUE_S, estimate_lead_time
from autoscaler.contract import ModelName
from autoscaler.planner.plan import plan
from autoscaler.state.actions import AcquireLease, Acted, ReleaseLease
from autoscaler.state.capacity import LeadTimeStats, LearntSeen, LeasesSeen, Listed, Offer, OffersSeen, ProvidersSeen
from autoscaler.state.events import Reported
from autoscaler.state.world import World
from tests.support.builders.capacity import (
    A,
    acted,
    arrived,
    cloud,
    listed,
    observe,
    offer,
    offered,
    orders,
    quiet,
    releases,
    shown,
    surge,
    waits,
)
from tests.support.builders.worlds import GI, T0, device, gateway, level, world

DAYS_S = 3 * 86_400
WAITS_S = A.spec.queue.wait_seconds_max


def queue(**fields: object) -> Offer:
    return cloud("queue", price_per_hour=0.1, queued=True, **fields)


def learnt(of: Offer, took_s: float) -> LearntSeen:
    return LearntSeen(learnt={of.kind: LeadTimeStats(took_s=(took_s,) * 8, came=8)})


def later(at: World, now_s: float, **fields: object) -> World:
    """The queue reports the same state as before, and requests are still queued."""
    return shown(waits(at, now_s), now_s, "cloud", **fields)


@pytest.mark.parametrize(("expected_s", "took_s"), [(None, None), (300.0, None), (None, 4 * 3600.0), (300.0, 600.0)])
def test_queued_order_is_not_repeated_for_three_days_with_any_estimate(
    expected_s: float | None, took_s: float | None
) -> None:
    of = queue(expected_s=expected_s)
    begin = surge(of) if took_s is None else observe(surge(of), learnt(of, took_s))
    p95_s = estimate_lead_time(of, begin.capacity.learnt.get(of.kind, LeadTimeStats())).p95_s
    at, _ = acted(begin)
    for now_s in range(int(T0) + 600, int(T0) + DAYS_S, 600):
        at = later(observe(at, OffersSeen(provider="cloud", offers=(of,)), now_s=now_s), now_s)
        found = plan(at, now_s)
        assert not [one for one in found.actions if isinstance(one, (AcquireLease, ReleaseLease))]
        (unmet,) = found.unmet
        assert unmet.ready_s is not None
        assert unmet.lease is None or (now_s < T0 + p95_s and unmet.ready_s <= WAITS_S), "no Call is parked for longer"
    assert len(at.capacity.leases) == 1


def test_overdue_queued_order_is_kept_while_another_offer_is_ordered() -> None:
    of = queue(expected_s=60.0)
    at, _ = acted(surge(of))
    free = ProvidersSeen(providers=("cloud", "rack")), OffersSeen(provider="rack", offers=(offer(),))
    for now_s, wanted in ((T0 + 100, []), (T0 + 1000, [("rack", 1)])):
        seen = observe(later(at, now_s), *free, LeasesSeen(provider="rack", leases=(), began_s=now_s), now_s=now_s)
        assert orders(plan(seen, now_s).actions) == wanted


@pytest.mark.parametrize("memory_gi", [12, 16])
def test_each_model_gets_its_own_queued_capacity_order(memory_gi: int) -> None:
    """Otherwise the owner, whose order was attributed to the other model, ordered again, and one was released later."""
    calls = [level(name, 1, wait_s=60.0) for name in ("a", "z")]
    both = [replace(A, memory_bytes=memory_gi * GI), replace(A, name=ModelName("z"))]
    begin = world(both, [device("cpu", 1, "w1")], gateways=[gateway(levels=calls[1:])], leading_since_s=T0 - 500)
    at, done = acted(offered(begin, queue(expected_s=None, many=4)))
    more = gateway(levels=calls).report
    assert more is not None
    then = observe(at, Reported(report=replace(more, sequence=2)))
    assert [one.order.owner for one in [*done, *acted(then)[1]] if isinstance(one, AcquireLease)] == ["z", "a"]


def test_requests_do_not_wait_for_a_queued_order_with_exhausted_quota() -> None:
    at, _ = acted(surge(queue(expected_s=300.0)))
    assert plan(later(at, T0 + 60), T0 + 60).unmet[0].lease is not None
    (unmet,) = plan(later(at, T0 + 61, dry=True, says="the quota of the cloud is used up"), T0 + 61).unmet
    assert (unmet.lease, unmet.ready_s) == (None, inf)
    assert "the quota of the cloud is used up" in unmet.reason


def test_new_leader_keeps_an_existing_queued_capacity_order() -> None:
    of = queue(expected_s=None)
    there = Listed(name="pilotlight-a-0123456789", offer=of, devices=1, owner=ModelName("a"), says="it is queued")
    at = observe(
        surge(), ProvidersSeen(providers=("cloud",)), LeasesSeen(provider="cloud", leases=(there,), began_s=T0)
    )
    for now_s in (T0, T0 + 1, T0 + DAYS_S):
        assert not plan(later(at, now_s), now_s).actions


def test_new_leader_keeps_an_order_within_its_learned_lead_time() -> None:
    of = offer(expected_s=60.0)
    there = Listed(name="pilotlight-a-0123456789", offer=of, devices=1, owner=ModelName("a"), committed=True)
    seen = LeasesSeen(provider="rack", leases=(there,), began_s=T0)
    at = observe(surge(), ProvidersSeen(providers=("rack",)), learnt(of, 600.0), seen)
    assert not releases(plan(waits(at, T0 + 1200), T0 + 1200).actions)


def test_order_that_usually_takes_two_hours_is_kept_for_two_hours() -> None:
    of = cloud(expected_s=None)
    at, _ = acted(observe(surge(of), learnt(of, 2 * 3600.0)))
    now_s = T0 + 7300
    assert not releases(plan(later(at, now_s), now_s).actions)


def test_overdue_order_reports_a_growing_remaining_time() -> None:
    at, _ = acted(surge(cloud(expected_s=120.0)))
    left_s = [plan(later(at, T0 + past_s), T0 + past_s).unmet[0].ready_s or 0.0 for past_s in (0.0, 60.0, 121.0, 900.0)]
    assert left_s[1] < left_s[0], "it comes nearer"
    assert 60.0 < left_s[2] < left_s[3], "who is late is later than was thought"


def test_delivery_of_a_queued_order_starts_a_replica() -> None:
    at, _ = acted(surge(queue(expected_s=None)))
    here = arrived(waits(at, T0 + DAYS_S), T0 + DAYS_S, "cloud", node="n9")
    _, done = acted(here, T0 + DAYS_S)
    assert [type(one).__name__ for one in done] == ["StartReplica"]


def test_queued_order_is_kept_while_requests_wait_for_another_order() -> None:
    """Its remaining time falls below the waiting limit of the requests, and rises again."""
    of, node = queue(expected_s=700.0), offer(expected_s=600.0)
    at, done = acted(offered(surge(of), of, node))
    assert sorted(orders(done)) == [("cloud", 1), ("rack", 1)]
    for now_s in range(int(T0) + 60, int(T0) + 1740, 120):
        at = later(observe(at, OffersSeen(provider="cloud", offers=(of,)), now_s=now_s), now_s)
        at = shown(observe(at, OffersSeen(provider="rack", offers=()), now_s=now_s), now_s, "rack")
        assert not plan(at, now_s).actions


def test_other_offer_is_used_if_a_queued_order_exceeds_the_wait_limit() -> None:
    """It once took 8 hours: a request that can wait for 20 minutes is not made to wait for the queue for 20 hours."""
    of = queue(expected_s=None)
    at, done = acted(observe(surge(of), learnt(of, 8 * 3600.0)))
    assert orders(done) == [("cloud", 1)]
    (unmet,) = plan(later(at, T0 + 60), T0 + 60).unmet
    assert (unmet.lease, unmet.never) == (None, False)
    assert unmet.ready_s is not None
    assert 7 * 3600.0 < unmet.ready_s < 9 * 3600.0, "its requests fail with that reason at once"
    assert "ordered from cloud 60 s ago, expected in about" in unmet.reason
    free = ProvidersSeen(providers=("cloud", "rack")), OffersSeen(provider="rack", offers=(offer(),))
    seen = observe(later(at, T0 + 90), *free, LeasesSeen(provider="rack", leases=(), began_s=T0 + 90), now_s=T0 + 90)
    after, done = acted(seen, T0 + 90)
    assert (orders(done), releases(done)) == ([("rack", 1)], [])
    assert len(after.capacity.leases) == 2, "its place is kept"


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("leads_next", [False, True])
def test_committed_order_that_never_arrives_is_released_after_an_hour(waiting: int, leads_next: bool) -> None:
    of = queue(expected_s=None, lasts_s=7 * 86_400.0)
    at, _ = acted(surge(of))
    granted_s = T0 + DAYS_S
    for now_s in (granted_s - 600, granted_s, granted_s + DUE_S[1] - 1):
        at = waits(at, now_s, waiting) if waiting else quiet(at, now_s)
        at = observe(at, OffersSeen(provider="cloud", offers=(of,)), now_s=now_s)
        if leads_next and now_s == granted_s:
            lists = LeasesSeen(provider="cloud", leases=listed(at, "cloud", committed=True), began_s=now_s)
            at = observe(replace(at, capacity=replace(at.capacity, leases={}, listed_s={})), lists, now_s=now_s)
        at = shown(at, now_s, "cloud", committed=now_s >= granted_s, says="it is granted")
        assert waiting or now_s >= granted_s or releases(plan(at, now_s).actions), "it is no longer needed"
        assert now_s < granted_s or not plan(at, now_s).actions
    over_s = granted_s + DUE_S[1]
    assert (plan(at, over_s - 1).next_s or inf) <= over_s
    at = shown(waits(at, over_s, waiting) if waiting else quiet(at, over_s), over_s, "cloud", committed=True)
    (removed,) = releases(plan(at, over_s).actions)
    assert not removed.order.uncommitted, "it goes though it is paid for"
    after = observe(at, Acted(action=removed), now_s=over_s)
    assert leads_next or after.capacity.learnt[of.kind].failed == 1


def test_queued_order_whose_commitment_is_revoked_is_kept() -> None:
    at, _ = acted(surge(queue(expected_s=None)))
    at = later(later(at, T0 + 60, committed=True), T0 + 120, committed=False)
    for now_s in (T0 + 120 + DUE_S[1], T0 + DAYS_S):
        at = later(at, now_s)
        assert not releases(plan(at, now_s).actions)
    at = later(at, T0 + DAYS_S + 1, committed=True)
    assert not releases(plan(at, T0 + DAYS_S + 1).actions)

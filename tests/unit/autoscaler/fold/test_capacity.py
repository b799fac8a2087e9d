"""The lifecycle of a capacity order, from ordered to deleted, and the learned delivery time."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from autoscaler.capacity.delivered_slices import list_withheld_slices
from autoscaler.fold.capacity import BARRED_S, KINDS_MAX
from autoscaler.fold.indices import rebuild_indices
from autoscaler.planner.plan import plan
from autoscaler.state.actions import AcquireLease, Acted, ReleaseLease, StartReplica
from autoscaler.state.capacity import (
    LeadTimeStats,
    LearntSeen,
    Lease,
    LeaseRefused,
    LeasesSeen,
    Listed,
    Marks,
    OfferKind,
    OffersSeen,
    ProvidersSeen,
    ProviderTroubled,
    ReleaseOrder,
)
from autoscaler.state.events import LeadingSeen, Seen, SlicesSeen, Synced, Tick
from autoscaler.state.world import World
from tests.support.builders.capacity import (
    A,
    acted,
    arrived,
    cloud,
    listed,
    observe,
    offer,
    orders,
    quiet,
    releases,
    shown,
    surge,
    waits,
)
from tests.support.builders.worlds import T0, device, model, replica
from tests.support.harness.driver_events import seen_of

KIND = offer().kind


def lease(of: World) -> Lease:
    (one,) = of.capacity.leases.values()
    return one


def ordered() -> World:
    return acted(surge(offer()))[0]


def release(of: World, now_s: float, *, uncommitted: bool = False) -> World:
    order = ReleaseOrder(id=lease(of).id, epoch=1, uncommitted=uncommitted)
    return observe(of, Acted(action=ReleaseLease(order=order, reason="a test")), now_s=now_s)


def none(of: World, began_s: float) -> World:
    return observe(of, LeasesSeen(provider="rack", leases=(), began_s=began_s), now_s=began_s)


def test_repeated_order_keeps_the_first_order_time_and_updates_sent_time() -> None:
    after = ordered()
    assert (lease(after).asked_s, lease(after).listed) == (T0, None)
    (action,) = [one for one in plan(surge(offer()), T0).actions if isinstance(one, AcquireLease)]
    again = observe(after, Acted(action=action), now_s=T0 + 20)
    assert (lease(again).asked_s, lease(again).sent_s) == (T0, T0 + 20)


def test_refused_capacity_order_puts_its_offer_in_exponential_backoff() -> None:
    at, now_s = ordered(), T0
    for times in range(1, 7):
        at = observe(at, LeaseRefused(id=lease(at).id, reason="no quota"), now_s=now_s)
        assert not at.capacity.leases
        (barred,) = at.capacity.barred.values()
        assert barred.until_s - now_s == min(BARRED_S[0] * 2 ** (times - 1), BARRED_S[1])
        assert at.capacity.learnt[KIND].failed == times
        (action,) = [one for one in plan(surge(offer()), T0).actions if isinstance(one, AcquireLease)]
        now_s = barred.until_s
        at = observe(at, Acted(action=action), now_s=now_s)


def test_refusal_of_an_order_already_listed_by_its_provider_is_ignored() -> None:
    seen = shown(ordered(), T0 + 1)
    assert observe(seen, LeaseRefused(id=lease(seen).id, reason="exists"), now_s=T0 + 2).capacity == seen.capacity


def test_capacity_order_is_delivered_when_its_slices_are_in_the_inventory() -> None:
    after = ordered()
    reported = shown(after, T0 + 20, phase="here", committed=True, node="w1", device_ids=("new0",))
    assert lease(reported).here_s is None, "a device in no inventory cannot serve requests"
    there = observe(arrived(after, T0 + 30), Tick(), now_s=T0 + 31)
    assert lease(there).here_s == T0 + 30
    assert there.capacity.learnt[KIND] == LeadTimeStats(took_s=(30.0,), came=1)


def test_reuse_of_ordered_capacity_records_its_idle_time() -> None:
    here = arrived(ordered(), T0 + 30)
    one = replica(A, "r1", ["new0"])
    for name, from_s, to_s in (("r1", T0 + 40, T0 + 50), ("r2", T0 + 75, T0 + 80)):
        one = replica(A, name, ["new0"])
        here = observe(here, seen_of(one, Seen.READY, started_s=from_s), now_s=from_s)
        assert lease(here).in_use
        here = observe(here, seen_of(one, Seen.CLEAN, proof="exited"), now_s=to_s)
        assert lease(here).idle_since_s == to_s
    assert here.capacity.learnt[KIND].gaps_s == (25.0,)
    removed = release(here, T0 + 200)
    assert removed.capacity.learnt[KIND].gaps_s == (25.0, inf)
    removed = none(removed, T0 + 201)
    (action,) = [one for one in plan(surge(offer()), T0).actions if isinstance(one, AcquireLease)]
    again = observe(removed, Acted(action=action), now_s=T0 + 300)
    assert again.capacity.learnt[KIND].gaps_s == (25.0, 220.0), "it would have been used again then"


def test_released_order_is_removed_when_absent_from_a_later_list() -> None:
    going = release(arrived(ordered(), T0 + 30), T0 + 100)
    assert lease(none(going, T0 + 100)).leaving, "that list may have begun before"
    assert not none(going, T0 + 100.1).capacity.leases
    still = shown(going, T0 + 101, phase="here", committed=True, node="w1", device_ids=("new0",))
    assert lease(still).leaving


def test_withdrawal_of_an_undelivered_order_is_cancelled_on_delivery() -> None:
    going = release(shown(ordered(), T0 + 1), T0 + 12, uncommitted=True)
    assert not lease(going).coming(T0 + 12)
    came = arrived(going, T0 + 20)
    assert not lease(came).leaving
    assert lease(came).here_s == T0 + 20
    assert not came.capacity.barred, "to be taken back is no failure"


def test_order_is_lost_only_if_absent_from_two_lists_of_its_provider() -> None:
    here = arrived(ordered(), T0 + 30)
    once = none(here, T0 + 40)
    assert lease(once).missing == 1
    back = shown(once, T0 + 50, phase="here", committed=True, node="w1", device_ids=("new0",))
    assert lease(back).missing == 0
    assert not none(once, T0 + 50).capacity.leases


def test_order_withdrawn_by_its_provider_puts_the_offer_in_backoff() -> None:
    at = shown(ordered(), T0 + 20, committed=True)
    at = shown(at, T0 + 900, committed=True, phase="leaving")
    removed = none(none(at, T0 + 910), T0 + 920)
    assert not removed.capacity.leases
    assert removed.capacity.learnt[KIND].failed == 1
    assert not orders(plan(removed, T0 + 920).actions)
    (barred,) = removed.capacity.barred.values()
    assert (barred.until_s, barred.why) == (T0 + 980, "the ordered capacity was removed before it was delivered")


def test_capacity_order_list_older_than_the_last_one_is_ignored() -> None:
    seen = shown(ordered(), T0 + 20)
    assert observe(seen, LeasesSeen(provider="rack", leases=(), began_s=T0 + 10), now_s=T0 + 21) == seen


def test_order_listing_error_is_cleared_by_the_next_successful_list() -> None:
    at = observe(
        ordered(), ProviderTroubled(provider="rack", says="does not respond (TimeoutError)", listing=True), now_s=T0 + 1
    )
    assert at.capacity.trouble == {"rack": "does not respond (TimeoutError)"}
    assert not shown(at, T0 + 2).capacity.trouble


def test_order_not_yet_listed_by_its_provider_is_not_lost() -> None:
    assert lease(none(ordered(), T0 + 30)).listed is None


def test_unknown_listed_order_is_marked_as_stray_unless_the_leader_is_new() -> None:
    late = Listed(name="other", offer=offer(), devices=1)
    at = surge(offer())
    (stray,) = observe(
        at, LeasesSeen(provider="rack", leases=(late,), began_s=T0 + 5), now_s=T0 + 5
    ).capacity.leases.values()
    assert (stray.found, stray.stray) == (True, True)
    leads = observe(at, LeadingSeen(epoch=2), LeasesSeen(provider="rack", leases=(late,), began_s=T0 + 5), now_s=T0 + 5)
    assert (lease(leads).found, lease(leads).stray) == (True, False)
    going = replace(late, phase="leaving")
    assert lease(observe(at, LeasesSeen(provider="rack", leases=(going,), began_s=T0 + 5), now_s=T0 + 5)).leaving


def test_new_leader_keeps_only_orders_that_the_provider_has_listed() -> None:
    unseen = observe(ordered(), LeadingSeen(epoch=2), now_s=T0 + 1)
    assert not unseen.capacity.leases
    assert not unseen.capacity.listed_s
    seen = observe(shown(ordered(), T0 + 1), LeadingSeen(epoch=2), now_s=T0 + 2)
    assert lease(seen).listed is not None
    assert not orders(plan(seen, T0 + 2).actions)


def test_partially_delivered_order_shrinks_to_the_listed_devices() -> None:
    at = surge(offer(devices_min=2))
    after, _ = acted(at)
    assert lease(after).devices == 2
    (one,) = listed(after, phase="here", committed=True, node="w1", device_ids=("new0",))
    half = observe(after, LeasesSeen(provider="rack", leases=(one,), began_s=T0 + 9), now_s=T0 + 9)
    assert lease(half).devices == 1


def test_recorded_lead_times_are_merged_into_the_known_lead_times() -> None:
    at = arrived(ordered(), T0 + 30)
    other = OfferKind("cloud", "A100", "")
    assert at.capacity.learnt == {KIND: LeadTimeStats(took_s=(30.0,), came=1)}
    after = observe(at, LearntSeen(learnt={other: LeadTimeStats(took_s=(2.0,), idle_since_s=5.0)}), now_s=T0 + 31)
    assert after.capacity.learnt == {**at.capacity.learnt, other: LeadTimeStats(took_s=(2.0,))}, "clocks differ"
    newer = observe(after, LearntSeen(learnt={KIND: LeadTimeStats(took_s=(30.0, 1.0), came=2)}), now_s=T0 + 32)
    assert newer.capacity.learnt[KIND].came == 2


def test_number_of_learnt_lead_time_entries_is_bounded() -> None:
    many = {OfferKind("rack", "A100", f"n{number}"): LeadTimeStats() for number in range(KINDS_MAX)}
    at = observe(ordered(), LearntSeen(learnt=many))
    after = observe(at, LeaseRefused(id=lease(at).id, reason="no"))
    assert len(after.capacity.learnt) == KINDS_MAX
    assert KIND in after.capacity.learnt


def test_next_offer_is_ordered_if_an_order_is_lost_before_delivery() -> None:
    """Karpenter itself deletes a NodeClaim if the spot market has no capacity."""
    spot, sure = cloud("spot", price_per_hour=0.3, bought="spot"), cloud("sure", price_per_hour=1.0)
    at = shown(acted(surge(spot, sure))[0], T0 + 1, "cloud")
    for later_s in (2.0, 3.0):
        at = observe(at, LeasesSeen(provider="cloud", leases=(), began_s=T0 + later_s), now_s=T0 + later_s)
    assert at.capacity.barred.keys() == {spot.id}
    assert at.capacity.learnt == {spot.kind: LeadTimeStats(failed=1)}, "offers that are not spot are unaffected"
    (order,) = [one.order for one in plan(at, T0 + 3).actions if isinstance(one, AcquireLease)]
    assert order.offer.id == sure.id


def test_committed_capacity_order_that_disappears_is_reordered_at_once() -> None:
    """The provider had not yet reported the order as delivered."""
    at = shown(ordered(), T0 + 1, committed=True)
    at = none(none(at, T0 + 2), T0 + 3)
    assert not at.capacity.barred
    assert orders(plan(at, T0 + 3).actions) == [("rack", 1)]


def test_removed_provider_leaves_no_offers_lists_or_errors() -> None:
    at = observe(surge(offer(), cloud()), ProviderTroubled(provider="rack", says="does not respond", listing=True))
    at = observe(at, ProvidersSeen(providers=("cloud",)))
    assert at.capacity.offers.keys() == at.capacity.offered_s.keys() == at.capacity.listed_s.keys() == {"cloud"}
    assert not at.capacity.wrong()


@pytest.mark.parametrize("listing", [False, True])
def test_provider_error_is_reported_until_the_same_query_succeeds(listing: bool) -> None:
    """Its lists succeed every second and would otherwise hide that its offers fail."""
    message = "does not respond (TimeoutError)"
    at = observe(ordered(), ProviderTroubled(provider="rack", says=message, listing=listing))
    answers = LeasesSeen(provider="rack", leases=(), began_s=T0 + 1), OffersSeen(provider="rack", offers=(offer(),))
    first, second = reversed(answers) if listing else answers
    assert observe(at, first, now_s=T0 + 1).capacity.wrong() == (("rack", message),)
    assert not observe(at, second, now_s=T0 + 1).capacity.wrong()


@pytest.mark.parametrize("others", [(), ("g0",)])
def test_reserved_capacity_is_idle_until_its_replica_starts(others: tuple[str, ...]) -> None:
    of = cloud("place", room=True, queued=True, expected_s=60.0)
    begin = acted(surge(of))[0]
    slices = (*begin.nodes.slices.values(), *(device(name, 16, "n9", product="A100") for name in ("g0", "g1")))
    z = model("z", 16)
    on = [replica(z, "z-1", on=others)] if others else []
    begin = rebuild_indices(
        replace(begin, models={**begin.models, z.name: z}, replicas={one.id: one for one in on}), T0
    )
    at = observe(begin, SlicesSeen(slices=slices))
    kept = shown(at, T0 + 1, "cloud", phase="here", node="n9", marks=Marks(instead="pilotlight-a-1"))
    assert (lease(kept).in_use, lease(kept).idle_since_s) == (False, T0 + 1)
    taker = replica(A, "a-1", on=["g1"], marks=Marks(instead="pilotlight-a-1"))
    about = rebuild_indices(replace(kept, replicas={**kept.replicas, taker.id: taker}), T0 + 1)
    about = shown(about, T0 + 2, "cloud", phase="here", node="n9", marks=Marks(instead="pilotlight-a-1"))
    assert lease(about).in_use, "who is to take it has it before its provider shows that"
    taken = shown(kept, T0 + 2, "cloud", phase="here", node="n9")
    assert lease(taken).in_use == bool(others), "after another client took it, its user may be that client"
    assert not list_withheld_slices(release(kept, T0 + 3)), "nothing of the node goes with it"


def half(at: World, now_s: float) -> World:
    """The provider reports the node as failed because one of its devices is unhealthy."""
    (one,) = listed(at, "cloud", phase="failed", node="n9", says="its node n9 has 1 of 2 devices")
    return observe(at, LeasesSeen(provider="cloud", leases=(one,), began_s=now_s), now_s=now_s)


def test_new_leader_keeps_a_failed_order_in_use_by_a_replica() -> None:
    here, one = arrived(acted(surge(cloud()))[0], T0 + 100, "cloud", node="n9"), replica(A, "r1", ["new0"])
    (message,) = listed(
        here, "cloud", phase="failed", node="n9", ends_s=T0 + 900.0, says="its node n9 has 1 of 2 devices"
    )
    lists = LeasesSeen(provider="cloud", leases=(message,), began_s=T0 + 201)
    new = observe(surge(cloud()), SlicesSeen(slices=(*here.nodes.slices.values(),)), LeadingSeen(epoch=2))
    new = observe(new, seen_of(one, Seen.READY), Synced(), lists, now_s=T0 + 201)
    assert (lease(new).found, lease(new).failed, lease(new).in_use) == (True, True, True)
    assert not releases(plan(new, T0 + 201).actions)
    assert observe(new, Tick(), now_s=T0 + 800).nodes.cordons, "and it ends as any other"
    left = observe(new, seen_of(one, Seen.CLEAN, proof="exited"), now_s=T0 + 210)
    (removed,) = releases(plan(left, T0 + 210).actions)
    assert removed.reason == "it failed: its node n9 has 1 of 2 devices"
    assert not left.capacity.learnt, "the duration of the delivery is unknown here"


def test_failed_capacity_order_is_kept_while_a_replica_starts_on_it() -> None:
    here = half(waits(arrived(acted(surge(cloud()))[0], T0 + 100, "cloud", node="n9"), T0 + 101), T0 + 101)
    assert [type(one) for one in plan(here, T0 + 101).actions] == [StartReplica]
    idle = half(quiet(here, T0 + 102), T0 + 102)
    assert releases(plan(idle, T0 + 102).actions)

"""What is counted of orders for capacity."""

from __future__ import annotations

from autoscaler.actions import Acted, ReleaseLease
from autoscaler.leasecounts import Counted, counted
from autoscaler.leases import LeaseRefused, LeasesSeen, ReleaseOrder
from autoscaler.world import World
from tests.kit.offered import acted, arrived, offer, shown, surge, told
from tests.kit.worlds import T0


def told_of(before: World, after: World) -> list[Counted]:
    return [*counted(before.capacity, after.capacity)]


def test_an_order_is_counted_when_it_is_given_and_when_it_came_with_how_long_that_took() -> None:
    begin = surge(offer())
    after, _ = acted(begin)
    assert told_of(begin, after) == [Counted("rack", "ordered")]
    here = arrived(after, T0 + 30)
    assert told_of(after, here) == [Counted("rack", "came", 30.0)]
    assert not told_of(here, here)


def test_what_is_refused_failed() -> None:
    after, _ = acted(surge(offer()))
    (id,) = after.capacity.leases
    refused = told(after, LeaseRefused(id=id, reason="none left"), now_s=T0 + 1)
    assert told_of(after, refused) == [Counted("rack", "failed")]


def test_what_is_gone_was_returned_or_lost() -> None:
    after, _ = acted(surge(offer()))
    here = arrived(after, T0 + 30)
    (id,) = here.capacity.leases
    release = ReleaseLease(order=ReleaseOrder(id=id, epoch=1), reason="idle")
    leaving = told(here, Acted(action=release), now_s=T0 + 40)
    gone = told(leaving, LeasesSeen(provider="rack", leases=(), began_s=T0 + 50), now_s=T0 + 50)
    assert told_of(leaving, gone) == [Counted("rack", "returned")]
    once = told(here, LeasesSeen(provider="rack", leases=(), began_s=T0 + 50), now_s=T0 + 50)
    twice = told(once, LeasesSeen(provider="rack", leases=(), began_s=T0 + 60), now_s=T0 + 60)
    assert [*told_of(here, once), *told_of(once, twice)] == [Counted("rack", "lost")]


def test_what_another_leader_ordered_is_not_counted_again() -> None:
    after, _ = acted(surge(offer()))
    other = shown(after, T0 + 1)
    begin = surge(offer())
    leases = LeasesSeen(provider="rack", leases=tuple(
        one.listed for one in other.capacity.leases.values() if one.listed is not None
    ), began_s=T0 + 1)  # fmt: skip
    found = told(begin, leases, now_s=T0 + 1)
    assert found.capacity.leases
    assert not told_of(begin, found)

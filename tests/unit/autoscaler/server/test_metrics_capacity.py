"""Metrics of capacity orders."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from autoscaler.controller.loop import LoopStep
from autoscaler.fold.fold import Observation
from autoscaler.server.metrics import Counted, Metrics, count_capacity_events, state_of
from autoscaler.state.actions import Acted, Plan, ReleaseLease
from autoscaler.state.capacity_orders import LeaseRefused, LeasesSeen, ReleaseOrder
from autoscaler.state.events import SlicesSeen
from autoscaler.state.world import World
from tests.support.builders.capacity import acted, arrived, listed, offer, shown, surge, told
from tests.support.builders.worlds import T0, replace_fields


def counted_between(before: World, after: World) -> list[Counted]:
    return [*count_capacity_events(before.capacity, after.capacity)]


def test_capacity_order_is_counted_when_placed_and_when_delivered() -> None:
    begin = surge(offer())
    after, _ = acted(begin)
    assert counted_between(begin, after) == [Counted("rack", "ordered")]
    here = arrived(after, T0 + 30)
    assert counted_between(after, here) == [Counted("rack", "came", 30.0)]
    assert not counted_between(here, here)


def test_refused_order_is_counted_as_failed() -> None:
    after, _ = acted(surge(offer()))
    (id,) = after.capacity.leases
    refused = told(after, LeaseRefused(id=id, reason="none left"), now_s=T0 + 1)
    assert counted_between(after, refused) == [Counted("rack", "failed")]


def test_removed_order_counts_as_returned_if_released_and_else_as_lost() -> None:
    after, _ = acted(surge(offer()))
    here = arrived(after, T0 + 30)
    (id,) = here.capacity.leases
    release = ReleaseLease(order=ReleaseOrder(id=id, epoch=1), reason="idle")
    leaving = told(here, Acted(action=release), now_s=T0 + 40)
    gone = told(leaving, LeasesSeen(provider="rack", leases=(), began_s=T0 + 50), now_s=T0 + 50)
    assert counted_between(leaving, gone) == [Counted("rack", "returned")]
    once = told(here, LeasesSeen(provider="rack", leases=(), began_s=T0 + 50), now_s=T0 + 50)
    twice = told(once, LeasesSeen(provider="rack", leases=(), began_s=T0 + 60), now_s=T0 + 60)
    assert [*counted_between(here, once), *counted_between(once, twice)] == [Counted("rack", "lost")]


def test_order_of_another_leader_is_not_counted_again() -> None:
    after, _ = acted(surge(offer()))
    other = shown(after, T0 + 1)
    begin = surge(offer())
    leases = LeasesSeen(provider="rack", leases=tuple(
        one.listed for one in other.capacity.leases.values() if one.listed is not None
    ), began_s=T0 + 1)  # fmt: skip
    found = told(begin, leases, now_s=T0 + 1)
    assert found.capacity.leases
    assert not counted_between(begin, found)


def counts_of(*steps: tuple[World, World]) -> dict[tuple[str, str], float]:
    """The `pilotlight_offers_total` values after these steps, by provider and result."""
    metrics = Metrics(lambda: steps[-1][1])
    for before, after in steps:
        metrics.on_step(LoopStep(before, after, Plan(), (), (), T0, T0, T0))
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    found = [one for one in families["pilotlight_offers"].samples if one.name == "pilotlight_offers_total"]
    return {(one.labels["provider"], one.labels["result"]): one.value for one in found}


def test_follower_counts_no_capacity_orders() -> None:
    here = arrived(acted(surge(offer()))[0], T0 + 30)
    lists = [listed(here, phase="here", committed=True, node="w1", device_ids=("new0",))]
    lists += [listed(here, phase="leaving", committed=True, node="w1", device_ids=("new0",)), (), ()]

    def steps(begin: World) -> list[tuple[World, World]]:
        """The steps of a process that did not order it: delivered, leaving, gone, still gone."""
        found = []
        for number, leases in enumerate(lists):
            now_s = T0 + 31 + 30 * number
            seen: list[Observation] = [LeasesSeen(provider="rack", leases=leases, began_s=now_s)]
            seen += [SlicesSeen(slices=tuple(here.nodes.slices.values()))] if not number else []
            found.append((begin, told(begin, *seen, now_s=now_s)))
            begin = found[-1][1]
        return found

    followed = steps(replace_fields(surge(offer()), leads=False))
    (going,) = followed[1][1].capacity.leases.values()
    assert (going.leaving, state_of(going)) == (False, ("rack", "leaving"))
    assert not counts_of(*followed)
    assert counts_of(*steps(surge(offer()))) == {("rack", "returned"): 1.0}

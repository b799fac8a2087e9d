"""Two concurrent leaders, one of which was paused and does not know it yet, order each missing capacity only once."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.planner.plan import plan
from autoscaler.state.actions import AcquireLease, Acted, ReleaseLease
from autoscaler.state.capacity import LeasesSeen, OffersSeen, ProvidersSeen
from autoscaler.state.world import World
from tests.support.builders.capacity import observe, offer, surge
from tests.support.builders.worlds import T0
from tests.support.example_budget import examples
from tests.support.fakes.provider import FakeProvider, Fate

WAITING = 3
STEPS = st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from(["look", "act", "crash"])), max_size=30)


class Both:
    """Two Worlds with the same queued requests, and one fabric."""

    def __init__(self) -> None:
        could = (offer(devices_max=8), offer(name="w2", node="w2", devices_max=8))
        self.rack = FakeProvider("rack", lambda: T0, lambda _s, _what: None, could, 8, lambda _: Fate(after_s=1e6))
        begin = observe(surge(waiting=WAITING), ProvidersSeen(providers=("rack",)))
        self.worlds = [begin, replace(begin, epoch=2)]

    def look(self, of: World) -> World:
        """Report the offers, then the orders, as the shell does."""
        offered = observe(of, OffersSeen(provider="rack", offers=self.rack.offers_now()))
        return observe(offered, LeasesSeen(provider="rack", leases=self.rack.list_now(), began_s=T0))

    def act(self, of: World, *, crash: bool) -> World:
        """Execute all planned actions, or only the first one if the leader crashes."""
        for action in plan(of, T0).actions[: 1 if crash else None]:
            of = observe(of, Acted(action=action))
            if isinstance(action, AcquireLease):
                self.rack.acquire_now(action.order)
            elif isinstance(action, ReleaseLease):
                self.rack.release_now(action.order)
        return of


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(STEPS)
@example([(0, "look"), (1, "look"), (0, "act"), (1, "act")])
def test_two_leaders_in_any_interleaving_order_missing_capacity_once(steps: list[tuple[int, str]]) -> None:
    both = Both()
    for which, what in steps:
        world = both.worlds[which]
        both.worlds[which] = both.look(world) if what == "look" else both.act(world, crash=what == "crash")
        assert len(both.rack.alive) <= WAITING
    for which in (0, 1):
        both.worlds[which] = both.act(both.look(both.worlds[which]), crash=False)
    assert len(both.rack.alive) == WAITING, "and all of it"

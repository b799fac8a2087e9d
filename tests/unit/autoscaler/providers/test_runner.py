"""Timing of orders, listings and offers, and reports about a provider that does not respond."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine

from msgspec.structs import replace

from autoscaler.providers.provider import RefusedError
from autoscaler.providers.runner import CALL_S_MAX, LIST_S, OFFERS_S, Observation, ProviderRunner
from autoscaler.state.capacity import (
    AcquireOrder,
    LeaseId,
    LeaseRefused,
    LeasesSeen,
    Listed,
    Offer,
    OffersSeen,
    ProvidersSeen,
    ProviderTroubled,
    ReleaseOrder,
)
from tests.contracts.provider import order, release
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.capacity import offer
from tests.support.fakes.provider import FakeProvider, Fate
from tests.support.harness.async_tests import call_with


class Desk:
    """One provider, and all reports about it."""

    def __init__(self, kind: type[FakeProvider]) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.fake = kind("rack", loop.time, loop.call_later, (offer(),), fate=lambda _: Fate(after_s=1e6))
        self.seen: list[tuple[float, Observation]] = []
        self.supplying = ProviderRunner({"rack": self.fake}, self._take, loop.time, frozenset({"rack"}))

    def _take(self, observations: tuple[Observation, ...]) -> None:
        self.seen += [(self.now(), one) for one in observations]

    def lists(self) -> list[LeasesSeen]:
        return [one for _, one in self.seen if isinstance(one, LeasesSeen)]

    def refused(self) -> list[LeaseRefused]:
        return [one for _, one in self.seen if isinstance(one, LeaseRefused)]


def play(act: Callable[[Desk], Coroutine[object, object, None]], kind: type[FakeProvider] = FakeProvider) -> None:
    async def whole() -> None:
        desk = Desk(kind)
        task = asyncio.create_task(desk.supplying.run())
        await act(desk)
        task.cancel()

    run(whole())


@call_with(play)
async def test_started_runner_reports_providers_before_offers_and_orders(desk: Desk) -> None:
    await asyncio.sleep(0.1)
    first, *others = [one for _, one in desk.seen]
    assert first == ProvidersSeen(providers=("rack",), hedges=frozenset({"rack"}))
    assert [type(one) for one in others] == [OffersSeen, LeasesSeen], "what is offered is no newer than what is known"


@call_with(play)
async def test_provider_without_offers_is_polled_after_5_s_and_then_with_backoff(desk: Desk) -> None:
    """A node that was briefly not ready is not left out for a minute."""
    desk.fake.pool = 0
    await asyncio.sleep(200.0)
    looks = [at_s for at_s, one in desk.seen if isinstance(one, OffersSeen)]
    assert [round(b - a) for a, b in itertools.pairwise(looks)] == [5, 10, 20, 40, 60, 60]
    desk.fake.pool = 1
    await asyncio.sleep(65.0)
    desk.fake.pool = 0
    await asyncio.sleep(58.0)
    *_, some, none, again = [(at_s, one.offers) for at_s, one in desk.seen if isinstance(one, OffersSeen)]
    assert (bool(some[1]), bool(none[1])) == (True, False)
    assert round(again[0] - none[0]) == 5


@call_with(play)
async def test_order_is_sent_at_once_and_listed_soon_after(desk: Desk) -> None:
    await asyncio.sleep(30.3)
    desk.supplying.acquire(order(offer()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert desk.fake.orders == 1
    await asyncio.sleep(0.01)
    assert [one.name for one in desk.lists()[-1].leases] == [order(offer()).id.name]


@call_with(play)
async def test_listing_interval_without_orders_grows_up_to_its_maximum(desk: Desk) -> None:
    await asyncio.sleep(1000.0)
    at_s = [at_s for at_s, one in desk.seen if isinstance(one, LeasesSeen)]
    gaps = [b - a for a, b in itertools.pairwise(at_s)]
    assert gaps[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 28.5], "the last with the offers"
    assert max(gaps) == LIST_S[1]
    assert len(at_s) <= 40
    offers = [at_s for at_s, one in desk.seen if isinstance(one, OffersSeen)]
    assert max(b - a for a, b in itertools.pairwise(offers)) <= OFFERS_S + LIST_S[1]


@call_with(play)
async def test_only_an_explicit_rejection_is_reported_as_refused(desk: Desk) -> None:
    await asyncio.sleep(0.1)
    desk.fake.fate = lambda _: Fate(deaf=True)
    desk.supplying.acquire(order(offer()))
    await asyncio.sleep(1.0)
    assert not desk.refused(), "it is unknown whether the order exists"
    desk.fake.fate = lambda _: Fate(refused="no quota")
    desk.supplying.acquire(order(offer(), 1))
    await asyncio.sleep(1.0)
    assert [(one.id.name, one.reason) for one in desk.refused()] == [(order(offer(), 1).id.name, "no quota")]
    elsewhere = replace(order(offer()), id=LeaseId("nobody", "x"))
    desk.supplying.acquire(elsewhere)
    assert desk.refused()[-1].reason == "there is no provider nobody"


@call_with(play)
async def test_invalid_response_or_outage_reports_no_empty_list(desk: Desk) -> None:
    await asyncio.sleep(0.1)
    desk.supplying.acquire(order(offer()))
    await asyncio.sleep(1.0)
    many = len(desk.seen)
    desk.fake.garbage = True
    await asyncio.sleep(100.0)
    desk.fake.garbage, desk.fake.away = False, True
    await asyncio.sleep(100.0)
    received = [one for _, one in desk.seen[many:] if isinstance(one, LeasesSeen)]
    assert not received, "an empty list would say that all is lost"
    messages = [one.says for _, one in desk.seen if isinstance(one, ProviderTroubled)]
    assert set(messages) == {"does not respond (ValueError)", "does not respond (ConnectionError)"}
    desk.fake.away = False
    await asyncio.sleep(61.0)
    assert len(desk.lists()[-1].leases) == 1


def test_provider_without_offers_or_list_is_reported_with_its_reason() -> None:
    async def act(desk: Desk) -> None:
        desk.fake.closed = "NodePool g4 does not exist"
        await asyncio.sleep(0.1)
        assert [one for _, one in desk.seen if isinstance(one, OffersSeen)] == [
            OffersSeen(provider="rack", offers=(), closed="NodePool g4 does not exist")
        ]
        desk.fake.closed = ""
        await asyncio.sleep(10.0)
        (*_, last) = [one for _, one in desk.seen if isinstance(one, OffersSeen)]
        assert last.offers
        assert not last.closed

    async def listing(desk: Desk) -> None:
        desk.fake.mute = "Karpenter is not installed"
        await asyncio.sleep(0.1)
        (messages,) = {one.says for _, one in desk.seen if isinstance(one, ProviderTroubled)}
        assert messages == "cannot report its state: Karpenter is not installed"

    play(act)
    play(listing)


def test_partial_provider_problem_is_reported_with_its_offers() -> None:
    class Part(FakeProvider):
        lacks = "has no system for node w9 at 10.0.0.7"

    async def act(desk: Desk) -> None:
        await asyncio.sleep(100.0)
        messages = [one for _, one in desk.seen if isinstance(one, OffersSeen | ProviderTroubled)]
        part = ProviderTroubled(
            provider="rack", says="has no system for node w9 at (address)", listing=False
        )  # fmt: skip
        offers = OffersSeen(provider="rack", offers=(offer(),))
        assert messages == [offers, part, offers, part], "as long as it is so"

    play(act, Part)


@call_with(play)
async def test_released_capacity_is_offered_again_at_once(desk: Desk) -> None:
    """Otherwise models that need exactly this would see no offer for a minute."""
    desk.fake.pool = 1
    await asyncio.sleep(1.0)
    made = order(offer(devices_max=1))
    desk.supplying.acquire(made)
    await asyncio.sleep(300.0)
    many = len(desk.seen)
    desk.supplying.release(release(made))
    await asyncio.sleep(10.0)
    received = [(at_s, one) for at_s, one in desk.seen[many:]]
    gone_s = next(at_s for at_s, one in received if isinstance(one, LeasesSeen) and not one.leases)
    again_s = next(at_s for at_s, one in received if isinstance(one, OffersSeen) and one.offers)
    assert again_s - gone_s <= 1.0


def test_listing_that_overlaps_an_order_is_dated_before_the_order() -> None:
    class Slow(FakeProvider):
        async def acquire(self, order: AcquireOrder) -> None:
            await asyncio.sleep(10.0)
            await super().acquire(order)

        async def list(self) -> tuple[Listed, ...]:
            return self.list_now()

    async def whole() -> None:
        loop, seen = asyncio.get_running_loop(), list[Observation]()
        slow = Slow("rack", loop.time, loop.call_later, (offer(),))
        supplying = ProviderRunner({"rack": slow}, seen.extend, loop.time)
        task = asyncio.create_task(supplying.run())
        await asyncio.sleep(0.1)
        ordered_s = loop.time()
        supplying.acquire(order(offer()))
        supplying.release(release(order(offer())))
        await asyncio.sleep(9.0)
        assert all(one.began_s <= ordered_s for one in seen if isinstance(one, LeasesSeen))
        await asyncio.sleep(5.0)
        last = [one for one in seen if isinstance(one, LeasesSeen)][-1]
        assert last.began_s > ordered_s
        assert not last.leases, "in the order in which they were given"
        task.cancel()

    run(whole())


def test_addresses_in_messages_of_a_provider_are_redacted_in_reports() -> None:
    message = 'dial tcp 10.0.3.7:443: i/o timeout, Post "https://ec2.eu-west-1.amazonaws.com/"'
    redacted = 'dial tcp (address): i/o timeout, Post "(address)"'

    class Talks(FakeProvider):
        """A provider that passes on external texts: a condition, an event, a webhook response."""

        async def list(self) -> tuple[Listed, ...]:
            if self.away:
                raise RefusedError(message)
            return tuple([replace(one, says=message) for one in await super().list()])

    async def act(desk: Desk) -> None:
        await asyncio.sleep(0.1)
        desk.supplying.acquire(order(offer()))
        await asyncio.sleep(1.0)
        assert [one.says for one in desk.lists()[-1].leases] == [redacted]
        desk.fake.fate = lambda _: Fate(refused=message)
        desk.supplying.acquire(order(offer(), 1))
        desk.fake.closed = message
        await asyncio.sleep(OFFERS_S)
        assert [one.reason for one in desk.refused()] == [redacted]
        assert [one.closed for _, one in desk.seen if isinstance(one, OffersSeen)][-1] == redacted
        desk.fake.away = True
        await asyncio.sleep(OFFERS_S)
        messages = {one.says for _, one in desk.seen if isinstance(one, ProviderTroubled) and one.listing}
        assert messages == {f"cannot report its state: {redacted}"}

    play(act, Talks)


def test_hanging_provider_call_times_out_and_the_next_call_proceeds() -> None:
    class Hangs(FakeProvider):
        async def acquire(self, order: AcquireOrder) -> None:
            await asyncio.sleep(1e9)

        async def release(self, order: ReleaseOrder) -> None:
            self.disturbed.append(order.id.name)

        async def offers(self) -> tuple[Offer, ...]:
            await asyncio.sleep(1e9)
            return ()

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        hangs, seen = Hangs("rack", loop.time, loop.call_later, (offer(),)), list[Observation]()
        supplying = ProviderRunner({"rack": hangs}, seen.extend, loop.time)
        task = asyncio.create_task(supplying.run())
        supplying.acquire(order(offer()))
        supplying.release(release(order(offer())))
        await asyncio.sleep(CALL_S_MAX + 1.0)
        assert hangs.disturbed
        await asyncio.sleep(200.0)
        assert sum(isinstance(one, LeasesSeen) for one in seen) > 3, "its state is reported anyway"
        task.cancel()

    run(whole())

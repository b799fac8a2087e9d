"""The fake provider fulfils the contract of all providers, so that tests with it apply to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from autoscaler.providers.provider import Provider
from autoscaler.state.world import Slice
from tests.contracts.provider import ProviderContract, order
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.capacity import cloud, offer
from tests.support.fakes.provider import FakeProvider, Fate


class FakeRig:
    """Rig of the fake provider, in virtual time."""

    def __init__(self) -> None:
        self.fake: FakeProvider
        self.used: set[str] = set()

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        """See Rig."""

        async def whole() -> None:
            loop = asyncio.get_running_loop()
            could = (offer(), offer(name="w2", node="w2"))
            self.fake = FakeProvider("rack", loop.time, loop.call_later, could, in_use=self._in_use)
            await scenario

        run(whole())

    def provider(self) -> Provider:
        """See Rig."""
        return self.fake

    async def until_here(self, name: str) -> None:
        """See Rig."""
        while self.fake.held[name].phase != "here":
            await asyncio.sleep(1.0)

    async def until_gone(self, name: str) -> None:
        """See Rig."""
        assert name not in self.fake.held

    def use(self, name: str) -> None:
        """See Rig."""
        self.used |= {one.id for one in self.fake.held[name].slices}

    def leave_little(self) -> None:
        """See Rig."""
        self.fake.pool = 0

    def go_away(self) -> None:
        """See Rig."""
        self.fake.away = True

    def _in_use(self, slices: tuple[Slice, ...]) -> bool:
        return any(one.id in self.used for one in slices)


class TestFakeProvider(ProviderContract):
    """Runs ProviderContract on the fake provider."""

    @pytest.fixture
    def rig(self) -> FakeRig:
        """See ProviderContract."""
        return FakeRig()


def test_cancelled_order_delivered_late_is_listed_again_by_fake_provider() -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    fake = FakeProvider(
        "cloud", lambda: 0.0, lambda s, what: timers.append((s, what)), (cloud(),), fate=lambda _: Fate(late=True)
    )
    fake.acquire_now(order(cloud()))
    (held,) = fake.alive
    del fake.held[held.order.id.name]
    held.cancelled = True
    assert not fake.list_now()
    for _, what in timers:
        what()
    assert [one.phase for one in fake.list_now()] == ["here"]

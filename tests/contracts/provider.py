"""The contract of every Provider, as tests. A Provider's test file provides the `rig` fixture and inherits them all.

class TestMine(ProviderContract):
    @pytest.fixture
    def rig(self) -> Rig: ...
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.providers.provider import Provider, RefusedError
from autoscaler.spec.installation_ownership import Ownership, installation_id
from autoscaler.state.capacity import AcquireOrder, LeaseId, Listed, Offer, ReleaseOrder, lease_name
from autoscaler.state.world import World
from tests.support.builders.worlds import model, world
from tests.support.harness.scenarios import run_on_rig

OWNER = ModelName("llama-8b")


class Rig(Protocol):
    """The system behind a Provider, which outlives it."""

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        """Runs a scenario to its end, in real or virtual time."""

    def provider(self) -> Provider:
        """Returns a new Provider, which reads its state from the system behind it."""

    async def until_here(self, name: str) -> None:
        """Waits until that capacity order has been delivered."""

    async def until_gone(self, name: str) -> None:
        """Waits until that released capacity order is gone."""

    def use(self, name: str) -> None:
        """Marks the capacity of that order as in use from now on."""

    def leave_little(self) -> None:
        """From now on no capacity is free."""

    def go_away(self) -> None:
        """From now on requests get no response."""


class OwnedRig(Rig, Protocol):
    """A system whose orders have the label of an installation."""

    def belong_to(self, owner: Ownership) -> None:
        """From now on its Providers belong to this installation."""

    async def until_labelled(self) -> None:
        """Lists the orders until all have the label: a write fails if the object has changed meanwhile."""


def order(offer: Offer, number: int = 0, epoch: int = 1) -> AcquireOrder:
    """An order for the smallest number of devices that the Offer allows."""
    id = LeaseId(offer.provider, lease_name(offer.provider, OWNER, number))
    return AcquireOrder(id=id, offer=offer, devices=offer.devices_min, owner=OWNER, epoch=epoch, due_s=1e9)


def owned(**spec: Any) -> World:
    """A `World` with the Model that the orders are for."""
    return world([model(OWNER, **spec)])


def release(of: AcquireOrder, *, uncommitted: bool = False) -> ReleaseOrder:
    """A release of that order."""
    return ReleaseOrder(id=of.id, epoch=of.epoch, uncommitted=uncommitted)


async def one(provider: Provider) -> Listed:
    """Returns the only capacity order that the Provider lists."""
    (listed,) = await provider.list()
    return listed


class ProviderContract:
    """The contract of `autoscaler.providers.provider.Provider`."""

    @run_on_rig
    async def test_acquired_order_is_listed_with_name_owner_and_epoch(self, rig: Rig) -> None:
        provider = rig.provider()
        offer = (await provider.offers())[0]
        made = order(offer)
        await provider.acquire(made)
        listed = await one(rig.provider())
        assert (listed.name, listed.owner, listed.epoch) == (made.id.name, OWNER, 1)
        assert (listed.phase, listed.devices) == ("coming", made.devices)
        await rig.until_here(made.id.name)
        listed = await one(provider)
        assert (listed.phase, listed.committed) == ("here", True)
        assert listed.node

    @run_on_rig
    async def test_order_repeated_with_the_same_name_creates_no_second_order(self, rig: Rig) -> None:
        provider, other = rig.provider(), rig.provider()
        made = order((await provider.offers())[0])
        await provider.acquire(made)
        await provider.acquire(made)
        await other.acquire(replace(made, epoch=2))
        await one(provider)

    @run_on_rig
    async def test_orders_are_rejected_and_no_offer_is_made_without_free_capacity(self, rig: Rig) -> None:
        provider = rig.provider()
        offer = (await provider.offers())[0]
        rig.leave_little()
        with suppress(RefusedError):  # it may raise an error with the reason
            assert not await provider.offers()
        with pytest.raises(RefusedError):
            await provider.acquire(order(offer))
        assert not await provider.list()

    @run_on_rig
    async def test_release_removes_an_order_and_succeeds_for_an_absent_one(self, rig: Rig) -> None:
        provider = rig.provider()
        made = order((await provider.offers())[0])
        await provider.release(release(made))
        await provider.acquire(made)
        await provider.release(release(made, uncommitted=True))
        await rig.until_gone(made.id.name)
        assert not await provider.list()
        await provider.acquire(made)
        await rig.until_here(made.id.name)
        await provider.release(release(made))
        await provider.release(release(made))
        assert all(listed.phase == "leaving" for listed in await provider.list())
        await rig.until_gone(made.id.name)
        assert not await provider.list()

    @run_on_rig
    async def test_release_of_uncommitted_capacity_only_keeps_delivered_capacity(self, rig: Rig) -> None:
        provider = rig.provider()
        made = order((await provider.offers())[0])
        await provider.acquire(made)
        await rig.until_here(made.id.name)
        await provider.release(release(made, uncommitted=True))
        assert (await one(provider)).phase == "here"

    @run_on_rig
    async def test_released_order_keeps_capacity_that_a_replica_uses(self, rig: Rig) -> None:
        provider = rig.provider()
        made = order((await provider.offers())[0])
        await provider.acquire(made)
        await rig.until_here(made.id.name)
        rig.use(made.id.name)
        await provider.release(release(made))
        assert (await one(provider)).phase == "here"

    @run_on_rig
    async def test_call_to_an_unreachable_provider_raises_an_error_but_no_refusal(self, rig: Rig) -> None:
        provider = rig.provider()
        made = order((await provider.offers())[0])
        rig.go_away()
        for call in (provider.list(), provider.offers(), provider.acquire(made), provider.release(release(made))):
            with pytest.raises(Exception) as caught:
                await call
            assert not isinstance(caught.value, RefusedError)


class TakeoverContract:
    """The contract of Providers whose orders an earlier version may have created
    (`autoscaler.providers.unlabelled_orders`).
    """

    @run_on_rig
    async def test_unlabelled_order_belongs_to_the_first_installation_that_lists_it(self, rig: OwnedRig) -> None:
        provider = rig.provider()
        made = order((await provider.offers())[0])
        await provider.acquire(made)
        rig.belong_to(Ownership(installation_id("green", "pilotlight")))
        assert (await one(rig.provider())).name == made.id.name
        await rig.until_labelled()
        rig.belong_to(Ownership(installation_id("blue", "pilotlight")))
        assert await rig.provider().list() == ()

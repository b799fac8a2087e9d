"""How the Settings' `capacity` becomes what orders it: where each kind works, and anew when the Settings change."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack

import click
import pytest
from msgspec.structs import replace

from autoscaler.actions import Plan
from autoscaler.awaited import Awaited
from autoscaler.capacity.base import Provider
from autoscaler.capacity.supplying import CLOSING, Told
from autoscaler.leases import (
    AcquireOrder,
    Capacity,
    Lease,
    LeaseRefused,
    LeasesSeen,
    OffersSeen,
    ProvidersSeen,
    ReleaseOrder,
)
from autoscaler.loop import Step
from autoscaler.providers import KINDS, ClusterAutoscaler, Cro, Karpenter, ProviderSettings, Redfish
from autoscaler.settings import Settings
from autoscaler.world import World
from pilotlight import supplies
from pilotlight.supplies import Around, Kind, Mode, Supplies, check
from tests.contracts.provider import order
from tests.kit.fakeprovider import FakeProvider
from tests.kit.objects import PlayedServer
from tests.kit.offered import offer
from tests.sim.virtual import run

RACK = ProviderSettings(name="rack", cro=Cro(model="A100"))
NODES = ProviderSettings(name="g4", karpenter=Karpenter(node_pool="g4-nodepool"))
GROUP = ProviderSettings(name="t4", cluster_autoscaler=ClusterAutoscaler(node_labels={"pool": "t4"}))


def test_each_kind_that_is_in_force_can_be_made_and_no_other() -> None:
    assert supplies.KINDS.keys() == set(KINDS)


@pytest.mark.parametrize("entry", [RACK, NODES, GROUP], ids=["cro", "karpenter", "clusterAutoscaler"])
def test_a_kind_is_made_of_its_entry(entry: ProviderSettings) -> None:
    async def scenario() -> None:
        server = PlayedServer(lambda: 0.0)
        server.put("/apis/karpenter.sh", {"versions": [{"version": "v1"}]})
        around = Around(server, lambda: World(epoch=1), "engines", "home", AsyncExitStack())
        provider = supplies.KINDS[entry.kinds[0]].make(entry, around)
        assert await provider.list() == ()

    run(scenario())


@pytest.mark.parametrize(("mode", "fits"), [("machine", False), ("namespace", False), ("cluster", True)])
def test_a_provider_that_cannot_work_here_is_refused_with_where_it_can(mode: Mode, fits: bool) -> None:
    settings = Settings(capacity=(RACK,))
    if fits:
        check(settings, mode)
    else:
        said = re.escape("`cro` works in a cluster (the chart with scope `cluster`) only: leave this entry out")
        with pytest.raises(click.UsageError, match=rf"Settings: capacity\[0\]: {said}"):
            check(settings, mode)


class House:
    """Supplies whose Providers are played, and what they say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[FakeProvider] = []
        self.ended: list[str] = []
        self.seen: list[Told] = []
        self.world = World(epoch=1)
        monkeypatch.setattr(supplies, "KINDS", {"cro": Kind(self._make, frozenset({"cluster"}))})

    def _make(self, entry: ProviderSettings, around: Around) -> Provider:
        loop = asyncio.get_running_loop()
        self.made.append(FakeProvider(entry.name, loop.time, loop.call_later, (offer(entry.name),)))
        around.stack.callback(self.ended.append, entry.name)
        return self.made[-1]

    def supplies(self) -> Supplies:
        clock = asyncio.get_running_loop().time
        server = PlayedServer(clock)
        return Supplies(server, ("engines", "home", "pilotlight"), lambda: self.world, self.seen.extend, clock)

    def lent(self, provider: str) -> AcquireOrder:
        """Something of that provider is in the World, from now on; its order."""
        of = order(offer(provider))
        lease = Lease(id=of.id, offer=of.offer, devices=1, owner=of.owner, asked_s=0.0, sent_s=0.0, due_s=9.0)
        self.world = replace(self.world, capacity=Capacity(leases={of.id: lease}))
        return of

    def tell(self, of: Supplies, *entries: ProviderSettings) -> None:
        """The Settings say so now."""
        before, self.world = self.world, replace(self.world, settings=Settings(capacity=entries))
        of.on_step(Step(before, self.world, Plan(), (), (), 0.0, 0.0, 0.0))


def test_orders_go_to_the_provider_that_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        house = House(monkeypatch)
        one = house.supplies()
        task = asyncio.create_task(one.run())
        await asyncio.sleep(1.0)
        house.tell(one, replace(RACK, hedge=True))
        await asyncio.sleep(1.0)
        assert ProvidersSeen(providers=("rack",), hedges=frozenset({"rack"})) in house.seen
        one.acquire(order(offer()))
        await asyncio.sleep(2.0)
        shown = [seen for seen in house.seen if isinstance(seen, LeasesSeen)][-1]
        assert [listed.name for listed in shown.leases] == [order(offer()).id.name]
        one.acquire(order(offer("gone")))
        assert isinstance(house.seen[-1], LeaseRefused)
        task.cancel()

    run(scenario())


def test_what_came_of_an_entry_that_is_taken_out_is_listed_and_given_back_and_nothing_more_is_offered_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        house = House(monkeypatch)
        one = house.supplies()
        task = asyncio.create_task(one.run())
        await asyncio.sleep(1.0)
        house.tell(one, RACK)
        await asyncio.sleep(1.0)
        of = house.lent("rack")
        house.seen.clear()
        house.tell(one)
        await asyncio.sleep(1.0)
        assert [seen for seen in house.seen if isinstance(seen, OffersSeen)] == [
            OffersSeen(provider="rack", offers=(), closed=CLOSING)
        ]
        one.acquire(of)
        assert house.seen[-1:] == [LeaseRefused(id=of.id, reason=CLOSING)]
        house.seen.clear()
        one.release(ReleaseOrder(id=of.id, epoch=1))
        await asyncio.sleep(1.0)
        assert not [seen for seen in house.seen if isinstance(seen, LeaseRefused)], "there is who takes it back"
        assert [seen for seen in house.seen if isinstance(seen, LeasesSeen)][-1].leases == ()
        house.world = replace(house.world, capacity=Capacity())
        house.tell(one)
        await asyncio.sleep(1.0)
        assert house.seen[-1:] == [ProvidersSeen(providers=())]
        assert house.ended == ["rack", "rack"]
        task.cancel()

    run(scenario())


def test_an_entry_that_closes_offers_nothing_and_is_known_whoever_leads_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        house = House(monkeypatch)
        one = house.supplies()
        task = asyncio.create_task(one.run())
        house.tell(one, replace(RACK, closing=True))
        await asyncio.sleep(1.0)
        offers = [seen for seen in house.seen if isinstance(seen, OffersSeen)]
        assert offers == [OffersSeen(provider="rack", offers=(), closed=CLOSING)]
        assert [seen.provider for seen in house.seen if isinstance(seen, LeasesSeen)][:1] == ["rack"]
        task.cancel()

    run(scenario())


def test_who_is_named_for_a_redfish_service_takes_over_what_another_name_had_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        house = House(monkeypatch)
        monkeypatch.setattr(supplies, "KINDS", {"redfish": Kind(house._make, frozenset({"cluster"}))})
        one = house.supplies()
        task = asyncio.create_task(one.run())
        pod = Redfish(url="https://fabric.example:8443", systems={"w1": "1"}, secret_ref="fabric")
        await asyncio.sleep(1.0)
        house.tell(one, ProviderSettings(name="pod", redfish=pod))
        await asyncio.sleep(1.0)
        house.lent("pod")
        house.tell(one, ProviderSettings(name="pod2", redfish=pod))
        await asyncio.sleep(1.0)
        assert [seen for seen in house.seen if isinstance(seen, ProvidersSeen)][-1].providers == ("pod2",)
        task.cancel()

    run(scenario())


def test_claims_of_a_fabric_that_was_named_once_are_told_and_no_other_installations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        house = House(monkeypatch)
        monkeypatch.setattr(supplies, "KINDS", {"redfish": Kind(house._make, frozenset({"cluster"}))})
        one = house.supplies()
        pod = Redfish(url="https://fabric.example:8443", systems={"w1": "1"}, secret_ref="fabric", publish=True)
        house.world = replace(house.world, leads=True, leading_since_s=-500.0)
        task = asyncio.create_task(one.run())
        await asyncio.sleep(1.0)
        house.tell(one, ProviderSettings(name="pod", redfish=pod))
        await asyncio.sleep(1.0)
        waits = [Awaited("n", name, name, name, "w1", "kind", ("gpu-kind-0",)) for name in ("pod", "pod2")]
        house.world = replace(house.world, capacity=Capacity(awaited=tuple(waits)))
        house.tell(one)
        found = one._published()
        assert found is not None
        assert [told.name for told in found.told] == ["pod"]
        task.cancel()

    run(scenario())


def test_other_settings_end_what_was_made_of_the_former(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        house = House(monkeypatch)
        one = house.supplies()
        task = asyncio.create_task(one.run())
        await asyncio.sleep(1.0)
        house.tell(one, RACK)
        await asyncio.sleep(1.0)
        house.tell(one, RACK)
        assert not house.ended, "nothing has changed"
        house.tell(one, replace(RACK, name="other"))
        await asyncio.sleep(1.0)
        assert house.ended == ["rack"]
        assert [made.name for made in house.made] == ["rack", "other"]
        house.seen.clear()
        await asyncio.sleep(120.0)
        assert {seen.provider for seen in house.seen if isinstance(seen, LeasesSeen)} == {"other"}
        task.cancel()
        await asyncio.wait([task])
        assert house.ended == ["rack", "other"]

    run(scenario())

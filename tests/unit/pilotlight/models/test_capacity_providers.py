"""Capacity providers from the Settings' `capacity`: where each kind works, and updates when Settings change."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack

import click
import pytest
from msgspec.structs import replace

from autoscaler.controller.loop import LoopStep
from autoscaler.providers.provider import Provider
from autoscaler.providers.runner import CLOSING, Observation
from autoscaler.spec.capacity import KINDS, ClusterAutoscaler, Cro, Karpenter, ProviderSettings, Redfish
from autoscaler.spec.settings import Settings
from autoscaler.state.actions import Plan
from autoscaler.state.capacity import (
    AcquireOrder,
    Capacity,
    Lease,
    LeaseRefused,
    LeasesSeen,
    Offer,
    OffersSeen,
    ProvidersSeen,
    ReleaseOrder,
)
from autoscaler.state.pending_claims import PendingDeviceClaim
from autoscaler.state.world import World
from pilotlight.models import capacity_providers as supplies
from pilotlight.models.capacity_providers import Around, Mode, Supplies, assign_fabric_systems, check_provider_modes
from tests.contracts.provider import order
from tests.simulation.environment.virtual_loop import in_virtual_time
from tests.support.builders.capacity import offer
from tests.support.builders.worlds import replace_fields
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.fakes.provider import FakeProvider
from tests.support.fakes.redfish import FakeFabric
from tests.support.harness.providers.redfish_rig import TURN_S, WAIT_S

RACK = ProviderSettings(name="rack", cro=Cro(model="A100"))
NODES = ProviderSettings(name="g4", karpenter=Karpenter(node_pool="g4-nodepool"))
GROUP = ProviderSettings(name="t4", cluster_autoscaler=ClusterAutoscaler(node_labels={"pool": "t4"}))


def test_every_supported_provider_kind_has_a_factory() -> None:
    assert supplies.KINDS.keys() == set(KINDS)


@pytest.mark.parametrize("entry", [RACK, NODES, GROUP], ids=["cro", "karpenter", "clusterAutoscaler"])
@in_virtual_time
async def test_cro_karpenter_or_autoscaler_entry_gives_a_provider_without_orders(entry: ProviderSettings) -> None:
    server = PlayedServer(lambda: 0.0)
    server.put("/apis/karpenter.sh", {"versions": [{"version": "v1"}]})
    around = Around(server, lambda: World(epoch=1), "engines", "home", AsyncExitStack())
    provider = supplies.KINDS[entry.kinds[0]](entry, around)
    assert await provider.list() == ()


@pytest.mark.parametrize(("mode", "fits"), [("machine", False), ("namespace", False), ("cluster", True)])
def test_cro_provider_is_rejected_outside_cluster_scope(mode: Mode, fits: bool) -> None:
    settings = Settings(capacity=(RACK,))
    if fits:
        check_provider_modes(settings, mode)
    else:
        message = re.escape("`cro` is supported only in a cluster (the chart with scope `cluster`): remove this entry")
        with pytest.raises(click.UsageError, match=rf"Settings: capacity\[0\]: {message}"):
            check_provider_modes(settings, mode)


class House:
    """Supplies with fake providers, and their observations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None) -> None:
        """With None, the providers are real."""
        self.made: list[FakeProvider] = []
        self.ended: list[str] = []
        self.seen: list[Observation] = []
        self.world = World(epoch=1)
        if monkeypatch is not None:
            monkeypatch.setattr(supplies, "KINDS", {"cro": self._make})

    def _make(self, entry: ProviderSettings, around: Around) -> Provider:
        loop = asyncio.get_running_loop()
        self.made.append(FakeProvider(entry.name, loop.time, loop.call_later, (offer(entry.name),)))
        around.stack.callback(self.ended.append, entry.name)
        return self.made[-1]

    def supplies(self, server: PlayedServer | None = None) -> Supplies:
        clock = asyncio.get_running_loop().time
        server = PlayedServer(clock) if server is None else server
        return Supplies(server, ("engines", "home", "pilotlight"), lambda: self.world, self.seen.extend, clock)

    def lent(self, provider: str, node: str = "w1") -> AcquireOrder:
        """Add an order of this provider to the `World` and return it."""
        of = order(offer(provider, node=node))
        self.lend(of)
        return of

    def lend(self, of: AcquireOrder) -> None:
        """Make this the only order in the `World`."""
        lease = Lease(id=of.id, offer=of.offer, devices=1, owner=of.owner, asked_s=0.0, sent_s=0.0, due_s=9.0)
        self.world = replace(self.world, capacity=Capacity(leases={of.id: lease}))

    def end(self) -> None:
        """Remove all orders from the `World`."""
        self.world = replace(self.world, capacity=Capacity())

    async def offered(self, provider: str) -> tuple[Offer, ...]:
        """The offers of this provider, once it reports them."""
        while not (seen := [one for one in self.seen if isinstance(one, OffersSeen) and one.provider == provider]):
            await asyncio.sleep(TURN_S)
        return seen[-1].offers

    async def listed(self, provider: str, *phases: str) -> None:
        """Wait until a new list of this provider has these phases."""
        self.seen.clear()
        while phases not in [
            tuple(lease.phase for lease in one.leases)
            for one in self.seen
            if isinstance(one, LeasesSeen) and one.provider == provider
        ]:
            await asyncio.sleep(TURN_S)

    def tell(self, of: Supplies, *entries: ProviderSettings) -> None:
        """Change the Settings to these entries."""
        before, self.world = self.world, replace(self.world, settings=Settings(capacity=entries))
        of.on_step(LoopStep(before, self.world, Plan(), (), (), 0.0, 0.0, 0.0))


@in_virtual_time
async def test_capacity_order_is_sent_to_the_provider_of_its_offer(monkeypatch: pytest.MonkeyPatch) -> None:
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


@in_virtual_time
async def test_removed_provider_refuses_orders_and_still_accepts_releases(monkeypatch: pytest.MonkeyPatch) -> None:
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


@in_virtual_time
async def test_provider_marked_as_closing_offers_nothing_and_lists_its_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch)
    one = house.supplies()
    task = asyncio.create_task(one.run())
    house.tell(one, replace(RACK, closing=True))
    await asyncio.sleep(1.0)
    offers = [seen for seen in house.seen if isinstance(seen, OffersSeen)]
    assert offers == [OffersSeen(provider="rack", offers=(), closed=CLOSING)]
    assert [seen.provider for seen in house.seen if isinstance(seen, LeasesSeen)][:1] == ["rack"]
    task.cancel()


def fabric_of(url: str, **systems: str) -> Redfish:
    return Redfish(url=url, systems={node: f"/redfish/v1/Systems/{one}" for node, one in systems.items()})


@pytest.mark.standard
def test_renamed_redfish_entry_keeps_its_nodes_until_release() -> None:
    """On a real service, only one provider writes the links of a system."""

    async def scenario() -> None:
        house, played = House(None), PlayedServer(asyncio.get_running_loop().time)
        for name in ("w1", "w2"):
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            played.objects[f"/api/v1/nodes/{name}"] = {"metadata": {"name": name}, "status": status}
        async with FakeFabric(login="none").serving() as fabric, asyncio.timeout(WAIT_S):
            one = house.supplies(played)
            task = asyncio.create_task(one.run())
            house.tell(one, ProviderSettings(name="pod", redfish=fabric_of(fabric.url, w1="1")))
            of = order((await house.offered("pod"))[0])
            one.acquire(of)
            await house.listed("pod", "here")
            house.lend(of)
            house.seen.clear()
            house.tell(one, ProviderSettings(name="pod2", redfish=fabric_of(f"{fabric.url}/", w1="1", w2="2")))
            assert {offer.node for offer in await house.offered("pod2")} == {"w2"}
            await house.listed("pod", "here")
            one.acquire(of)
            assert house.seen[-1:] == [LeaseRefused(id=of.id, reason=CLOSING)]
            one.release(ReleaseOrder(id=of.id, epoch=1))
            await house.listed("pod")
            assert not fabric.attached("1")
            house.seen.clear()
            house.end()
            house.tell(one, *house.world.settings.capacity)
            assert {offer.node for offer in await house.offered("pod2")} == {"w1", "w2"}
            assert [seen for seen in house.seen if isinstance(seen, ProvidersSeen)][-1].providers == ("pod2",)
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(scenario())


def test_closing_redfish_provider_loses_shared_systems_without_its_orders() -> None:
    house = House(None)
    east = ProviderSettings(name="east", redfish=fabric_of("https://fabric.example", w1="1", w2="2", w3="3"))
    west = ProviderSettings(name="west", redfish=fabric_of("https://fabric.example", w1="1", w2="2"))
    far = ProviderSettings(name="far", redfish=fabric_of("https://other.example", w1="1"))
    house.lent("east", "w1")

    def made(*entries: ProviderSettings) -> list[list[str]]:
        return [
            [*one.redfish.systems] for one in assign_fabric_systems(entries, house.world) if one.redfish is not None
        ]

    house.world = replace(house.world, settings=Settings(capacity=(west, far)))
    assert made(west, far, east) == [["w2"], ["w1"], ["w1", "w3"]], "w3 belongs to no other provider"
    both = house.world.capacity.leases
    house.lent("west", "w1")
    house.world = replace(house.world, capacity=Capacity(leases={**both, **house.world.capacity.leases}))
    assert made(west, far, east) == [["w1", "w2"], ["w1"], ["w1", "w3"]], "what it has itself it keeps"
    closes = replace(east, closing=True)
    house.world = replace(house.world, settings=Settings(capacity=(closes, west)), capacity=Capacity(leases=both))
    assert made(closes, west) == [["w1", "w3"], ["w2"]], "so it is where it closes and is named still"


@in_virtual_time
async def test_only_pending_claims_of_the_removed_provider_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch)
    monkeypatch.setattr(supplies, "KINDS", {"redfish": house._make})
    one = house.supplies()
    pod = Redfish(url="https://fabric.example:8443", systems={"w1": "1"}, secret_ref="fabric", publish=True)
    house.world = replace_fields(house.world, leads=True, leading_since_s=-500.0)
    task = asyncio.create_task(one.run())
    await asyncio.sleep(1.0)
    house.tell(one, ProviderSettings(name="pod", redfish=pod))
    await asyncio.sleep(1.0)
    waits = [PendingDeviceClaim("n", name, name, name, "w1", "kind", ("gpu-kind-0",)) for name in ("pod", "pod2")]
    house.world = replace(house.world, capacity=Capacity(awaited=tuple(waits)))
    house.tell(one)
    found = one._published()
    assert found is not None
    assert [status.name for status in found.statuses] == ["pod"]
    task.cancel()


@in_virtual_time
async def test_changed_settings_close_the_previous_provider(monkeypatch: pytest.MonkeyPatch) -> None:
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

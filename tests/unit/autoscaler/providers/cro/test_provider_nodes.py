"""How many devices a node can have from the operator's fabrics (CRO): where the limit is set, and what it limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from autoscaler.providers.cro.objects import REQUESTS, request_name
from autoscaler.providers.cro.provider import CroFabric, NodeLock
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.runner import Observation
from autoscaler.spec.capacity import Cro, ProviderSettings
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import LeaseRefused, LeasesSeen, OffersSeen
from autoscaler.state.world import DeviceId, SliceId
from pilotlight.models.capacity_providers import Supplies
from tests.contracts.provider import order, release
from tests.support.builders.worlds import replace_fields
from tests.support.harness.async_tests import run_in
from tests.support.harness.providers.cro_rig import MODEL, NODE, SETTINGS, Rack, world
from tests.unit.autoscaler.providers.cro.test_provider import old_at_hand

OTHER = "NVIDIA-H100-PCIE-80GB"
ENTRIES = tuple(ProviderSettings(name=name, cro=Cro(model=of)) for name, of in (("a100", MODEL), ("h100", OTHER)))
TWO = replace(SETTINGS, nodes=(replace(SETTINGS.nodes[0], devices_max=2),), capacity=ENTRIES)
"""A node with one device may get one more."""


@pytest.mark.parametrize(("selector", "most"), [({}, None), ({"fabric": "rack-2"}, 4)])
@run_in(Rack)
async def test_error_names_the_setting_if_no_node_has_a_device_maximum(
    rack: Rack, selector: Mapping[str, str], most: int | None
) -> None:
    rack.world = world(Settings(nodes=(replace(SETTINGS.nodes[0], selector=dict(selector), devices_max=most),)))
    with pytest.raises(RefusedError, match="set `devicesMax` in an entry of Settings `nodes` whose `selector`"):
        await rack.provider().offers()


@run_in(Rack)
async def test_orders_of_two_gpu_models_do_not_exceed_the_free_slots_of_a_node(rack: Rack) -> None:
    rack.world, rack.cro.pool[OTHER] = world(TWO), 3
    seen: list[Observation] = []
    clock = asyncio.get_running_loop().time
    both = Supplies(rack.server, ("engines", "home", "pilotlight"), lambda: rack.world, seen.extend, clock)
    task = asyncio.create_task(both.run())
    await asyncio.sleep(1.0)
    offered = [one for observation in seen if isinstance(observation, OffersSeen) for one in observation.offers]
    assert [(one.provider, one.devices_max) for one in offered] == [("a100", 1), ("h100", 1)]
    for one in offered:
        both.acquire(order(one))
    await asyncio.sleep(60.0)
    assert len(rack.cro.gave) == 1
    (refused,) = [one for one in seen if isinstance(one, LeaseRefused)]
    assert refused.reason == f"node {NODE} has no room for 1 more"
    listed = {one.provider: one.leases for one in seen if isinstance(one, LeasesSeen)}
    assert [len(listed[one.name]) for one in ENTRIES if one.name != refused.id.provider] == [1]
    task.cancel()


@run_in(Rack)
async def test_order_of_another_gpu_model_takes_a_slot_despite_a_stale_cache(
    rack: Rack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rack.world, turns = world(TWO), NodeLock()
    one, other = (
        CroFabric(name, of, rack.server, lambda: rack.world, turns=turns)
        for name, of in (("a100", MODEL), ("h100", OTHER))
    )
    made = [order((await each.offers())[0]) for each in (one, other)]
    old_at_hand(rack, monkeypatch)
    await one.acquire(made[0])
    with pytest.raises(RefusedError, match="no room for 1 more"):
        await other.acquire(made[1])
    assert len([path for path in rack.server.objects if path.startswith(REQUESTS)]) == 1


@pytest.mark.parametrize("takes_s", [1.0, 60.0])
@run_in(Rack)
async def test_order_waits_briefly_for_a_finished_request_to_be_deleted(rack: Rack, takes_s: float) -> None:
    provider = rack.provider()
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await rack.until_here(made.id.name)
    await provider.release(release(made))
    rack.cro.period_s = takes_s  # the operator's polling period from now on
    while not rack.server.objects[f"{REQUESTS}/{request_name(MODEL, NODE)}"]["metadata"].get("deletionTimestamp"):
        await provider.list()
        await asyncio.sleep(0.1)
    assert not await provider.list()
    if takes_s < 2.0:
        await provider.acquire(made)
        await rack.until_here(made.id.name)
    else:
        with pytest.raises(RefusedError, match="its request"):
            await provider.acquire(made)


@pytest.mark.parametrize("polls_first", [False, True])
@run_in(Rack)
async def test_device_seen_before_the_operator_reports_it_is_counted_once(rack: Rack, *, polls_first: bool) -> None:
    """The operator polls again 30 s later. Until then an order for the same node was rejected, and the node was then
    avoided for a minute, so that another pod's capacity was evicted.
    """
    rack.cro.visible = lambda node, uuid: False
    provider, attached = rack.provider(), list[str]()
    rack.cro.attached = lambda node, uuid: attached.append(uuid)
    (offer,) = await provider.offers()
    assert offer.devices_max == 3
    await provider.acquire(order(offer))
    while not attached:
        assert [one.devices_max for one in await provider.offers()] == [2], "it is on its way"
        await asyncio.sleep(0.5)
    await asyncio.sleep(rack.cro.period_s)
    assert [one["status"]["state"] for one in rack.resources()] == ["Attaching"]
    assert [one.devices_max for one in await provider.offers()] == [2], "its node does not show it"
    shown = world(devices=2)
    newest = shown.nodes.slices[SliceId(f"{NODE}/gpu1")]
    if polls_first:
        newest = replace(newest, id=SliceId(attached[0]), device=DeviceId(attached[0]))
    rack.world = replace_fields(world(), slices={**world().nodes.slices, newest.id: newest})
    assert [one.devices_max for one in await provider.offers()] == [2]
    await provider.acquire(replace(order(offer, 1), devices=2))

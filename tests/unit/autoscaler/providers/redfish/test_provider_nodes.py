"""A Redfish fabric with nodes that are removed or missing, and orders that are placed during a poll."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from autoscaler.providers.provider import RefusedError
from autoscaler.providers.redfish.provider import LATE_S, RedfishFabric
from tests.contracts.provider import order, release
from tests.support.fakes.redfish import FakeFabric
from tests.support.harness.async_tests import call_with, run_in
from tests.support.harness.providers.redfish_rig import TURN_S, FabricRig
from tests.unit.autoscaler.providers.redfish.test_provider_faults import nothing, ordered, phase, play, unmarked, until

pytestmark = pytest.mark.standard

TAKEN_OUT = "node w1 was removed from `systems`: restore it until this order is released"
NOT_THERE = "has no system for node w9: fix its path in `systems`"


@pytest.mark.parametrize("notes", [False, True], ids=["the service keeps names", "it keeps none"])
def test_order_on_a_node_removed_from_settings_fails_until_restored(*, notes: bool) -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        made = await ordered(provider)
        await until(provider, phase("here"))
        rig.end()
        both = rig.systems
        rig.systems = {"w2": both["w2"]}
        without = rig.provider()
        (lost,) = await without.list()
        (gpu,) = rig.fabric.attached("1")
        assert (lost.phase, lost.says) == ("failed", TAKEN_OUT)
        assert (lost.node, lost.device_ids, lost.committed) == ("w1", (f"w1/GPU-{gpu}",), True), "who uses it keeps it"
        for force in (False, True):
            with pytest.raises(RefusedError, match="removed from `systems`"):
                await without.release(replace(release(made), force=force))
        await asyncio.sleep(10 * TURN_S)
        assert await without.list() == (lost,)
        assert rig.fabric.attached("1") == [gpu]
        rig.systems = both
        again = rig.provider()
        await until(again, phase("here"))
        await again.release(release(made))
        await until(again, nothing)
        assert not rig.fabric.attached("1")
        assert unmarked(rig)

    play(act, FakeFabric(keeps=not notes), notes=notes)


@call_with(play, 2)
async def test_unattached_order_on_a_removed_node_can_be_released(rig: FabricRig, provider: RedfishFabric) -> None:
    rig.end()
    made = await rig.marked()
    rig.systems = {"w2": rig.systems["w2"]}
    without = rig.provider()
    (lost,) = await without.list()
    assert (lost.phase, lost.says, lost.node, lost.committed) == ("failed", TAKEN_OUT, "", False)
    await without.release(release(made))
    assert not await without.list()
    assert not unmarked(rig), "another client may have ordered it"
    rig.now_s += LATE_S
    while not unmarked(rig):
        await without.list()
        rig.now_s += LATE_S


@call_with(play, 2)
async def test_invalid_system_path_is_reported_and_hides_no_other_node(rig: FabricRig, provider: RedfishFabric) -> None:
    assert not provider.lacks
    rig.systems = {"w1": rig.systems["w1"], "w9": rig.fabric.path("9")}
    wrong = rig.provider()
    assert {one.node for one in await wrong.offers()} == {"w1"}
    assert wrong.lacks == NOT_THERE
    made = await ordered(wrong)
    await until(wrong, phase("here"))
    await wrong.release(release(made))
    await until(wrong, nothing)


@call_with(play, 2)
async def test_device_on_a_temporarily_missing_system_is_kept(rig: FabricRig, provider: RedfishFabric) -> None:
    made = await ordered(provider)
    (here,) = await until(provider, phase("here"))
    version = rig.fabric.versions.pop("1")
    (away,) = await provider.list()
    assert (away.phase, away.committed, away.node) == ("coming", True, "w1")
    assert away.device_ids == here.device_ids
    assert away.says == "the fabric has no system for node w1: fix its path in `systems`"
    with pytest.raises(RefusedError, match="has no system"):
        await provider.release(release(made))
    rig.fabric.versions["1"] = version
    assert await provider.list() == (here,)


@call_with(play, 2)
async def test_offers_fail_with_a_reason_if_settings_name_no_systems(rig: FabricRig, provider: RedfishFabric) -> None:
    del provider
    rig.systems = {}
    with pytest.raises(RefusedError, match="another entry of Settings `capacity` that is closing or was removed"):
        await rig.provider().offers()


@call_with(play, 2)
async def test_rejected_login_is_reported_in_the_listing_error(rig: FabricRig, provider: RedfishFabric) -> None:
    rig.password = "another"
    with pytest.raises(
        RefusedError, match=r"^the fabric returned status 401 \(its Secret's user and password were rejected"
    ):
        await rig.provider().list()


class Slow(FabricRig):
    """A rig whose usage check blocks until `go` is set; it sets `asked` when it starts to wait."""

    asked: asyncio.Event
    go: asyncio.Event
    waits = False

    async def in_use(self, node: str, uuids: tuple[str, ...]) -> str:
        if self.waits:
            self.asked.set()
            await self.go.wait()
        return await super().in_use(node, uuids)


@run_in(partial(Slow, FakeFabric(tasks=False)))
async def test_order_placed_while_a_poll_is_running_is_attached(rig: Slow) -> None:
    """The result of that poll does not contain the order's marks, and must not fail the order."""
    rig.asked, rig.go = asyncio.Event(), asyncio.Event()

    provider = rig.provider()
    offer = (await provider.offers())[0]
    await provider.acquire(order(offer))
    await until(provider, phase("here"))
    await provider.release(release(order(offer)))
    rig.waits = True
    await rig.asked.wait()
    other = next(one for one in await provider.offers() if one.product == offer.product and one.node == offer.node)
    await provider.acquire(order(other, 1))
    rig.waits = False
    rig.go.set()
    await until(provider, phase("here"))
    assert len(rig.fabric.attached("1")) == 1

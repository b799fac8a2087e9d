"""Late results of a Redfish fabric for released orders, and for the next leader: every device is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from autoscaler.providers.provider import RefusedError
from autoscaler.providers.redfish.provider import LATE_S, RedfishFabric
from autoscaler.providers.redfish.system_writer import NOTHING_S
from autoscaler.state.capacity_orders import AcquireOrder
from tests.contracts.provider import order, release
from tests.support.fakes.redfish import A100, SYSTEMS, FakeFabric
from tests.support.harness.async_tests import call_with
from tests.support.harness.providers.redfish_rig import TURN_S, FabricRig
from tests.unit.autoscaler.providers.redfish.test_provider_faults import nothing, ordered, phase, play, unmarked, until

pytestmark = pytest.mark.standard


async def when(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(TURN_S)


async def given_back(provider: RedfishFabric, made: AcquireOrder) -> None:
    """Release the order, and wait until nothing of it is listed."""
    await provider.release(release(made))
    await until(provider, nothing)


async def comes_late_and_goes(rig: FabricRig, provider: RedfishFabric, made: AcquireOrder) -> None:
    """A device attached after its release is listed as ours, and is detached like any other."""
    (late,) = await until(provider, phase("here"))
    assert (late.name, late.node) == (made.id.name, "w1")
    await given_back(provider, made)
    assert not rig.fabric.attached("1")
    await when(lambda: unmarked(rig))


def carry_out(rig: FabricRig) -> None:
    """Perform what the fabric accepted and did not execute."""
    for block in rig.fabric.blocks.values():
        if block.client and not block.system:
            block.system, block.state, block.version = "1", "Composed", block.version + 1
    rig.fabric.versions["1"] += 1


def silent(rig: FabricRig) -> None:
    """Stop reporting that blocks are being composed."""
    for block in rig.fabric.blocks.values():
        block.state = block.state.replace("Composing", "Unused")


# --- late results -----------------------------------------------------------------------------------------------------


@call_with(play, 2)
async def test_device_arriving_after_its_order_failed_is_listed_and_detached(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    rig.fabric.never = True
    made = await ordered(provider)
    await until(provider, phase("failed"))
    await given_back(provider, made)
    carry_out(rig)
    await comes_late_and_goes(rig, provider, made)


def test_order_does_not_time_out_while_its_attachment_is_in_progress() -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        await ordered(provider)
        while rig.now_s < 3 * NOTHING_S:
            await until(provider, phase("coming"))
            await asyncio.sleep(TURN_S)
        rig.fabric.finish()
        await until(provider, phase("here"))

    play(act, FakeFabric(hold=True, early=True))


def test_late_device_of_a_previous_leader_is_listed_and_detached() -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        made = await ordered(provider)
        await when(lambda: rig.fabric.going)
        rig.end()
        silent(rig)
        following = rig.provider()
        await following.acquire(made)
        (failed,) = await until(following, phase("failed"))
        assert failed.says == "the fabric returned status 409 (OperationInProgress)"
        await given_back(following, made)
        rig.fabric.finish()
        await comes_late_and_goes(rig, following, made)

    play(act, FakeFabric(hold=True, early=True))


def test_rejected_order_keeps_its_fabric_block_while_it_may_attach() -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        rig.fabric.never = True
        first = await ordered(provider)
        await until(provider, phase("failed"))
        await given_back(provider, first)
        rig.fabric.refuse = 400
        second = await ordered(provider)
        await until(provider, phase("failed"))
        await given_back(provider, second)
        rig.fabric.refuse = 0
        carry_out(rig)
        await comes_late_and_goes(rig, provider, second)

    play(act, FakeFabric(gpus=(A100,)))


@call_with(play, 2)
async def test_late_devices_of_a_partial_order_are_released_with_the_order(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    rig.fabric.half = True
    made = await ordered(provider, devices=2)
    await until(provider, phase("here"))
    carry_out(rig)
    await until(provider, lambda shown: [len(one.device_ids) for one in shown] == [2])
    await given_back(provider, made)
    await when(lambda: unmarked(rig))


@call_with(play, 2)
async def test_release_tags_all_blocks_as_released_after_a_failed_write(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    rig.fabric.never = True
    made = await ordered(provider, devices=2)
    await until(provider, phase("failed"))
    rig.fabric.sealed = {"Gpu-2"}
    await provider.release(release(made))
    tried = len(rig.fabric.patches())
    await when(lambda: len(rig.fabric.patches()) > tried + 3)
    rig.fabric.sealed = set()
    await until(provider, nothing)
    said = [str(rig.fabric.blocks[name].client).partition(" ")[0] for name in ("Gpu-1", "Gpu-2")]
    assert said == ["pilotlight-gone", "pilotlight-gone"]


@pytest.mark.parametrize("notes", [False, True], ids=["in Client", "in Notes"])
def test_owner_tag_of_a_block_that_was_never_attached_expires(*, notes: bool) -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        rig.fabric.never = True
        made = await ordered(provider)
        await until(provider, phase("failed"))
        await given_back(provider, made)
        rig.fabric.blocks["Gpu-1"].state = "Composing"
        rig.now_s += LATE_S
        await provider.list()
        assert not unmarked(rig), "it says that it is under way"
        rig.fabric.blocks["Gpu-1"].state = "Unused"
        for _ in range(2):
            assert not unmarked(rig)
            rig.now_s += LATE_S / 2
            await provider.list()
        assert unmarked(rig)

    play(act, FakeFabric(gpus=(A100,), keeps=not notes), notes=notes)


# --- next leader ------------------------------------------------------------------------------------------------------


@call_with(play, 2)
async def test_next_leader_attaches_an_order_that_its_predecessor_only_tagged(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    del provider
    made = await rig.marked()
    (here,) = await until(rig.provider(), phase("here"))
    assert here.name == made.id.name
    assert len(rig.fabric.attached("1")) == 1
    assert len(rig.fabric.patches(SYSTEMS)) == 1


@call_with(play, 2)
async def test_follower_attaches_nothing_until_it_becomes_leader(rig: FabricRig, provider: RedfishFabric) -> None:
    await rig.marked()
    asked = len(rig.fabric.patches())
    rig.leads = False
    for _ in range(20):
        await until(provider, phase("coming"))
    assert len(rig.fabric.patches()) == asked
    rig.leads = True
    await until(provider, phase("here"))


@call_with(play, 2)
async def test_former_leader_abandons_its_pending_detach(rig: FabricRig, provider: RedfishFabric) -> None:
    kept = await ordered(provider)
    await until(provider, phase("here"))
    rig.fabric.statuses["PATCH"] = [503] * 3
    await provider.release(release(kept))
    await when(lambda: not rig.fabric.statuses["PATCH"] or rig.fabric.statuses["PATCH"] == [503])
    rig.leads = False
    rig.fabric.statuses = {}
    for _ in range(20):
        await asyncio.sleep(TURN_S)
        await provider.list()
    rig.leads = True
    for _ in range(20):
        await asyncio.sleep(TURN_S)
        await until(provider, phase("here"))
    await given_back(provider, kept)


@pytest.mark.parametrize("sealed", ["Gpu-1", "Gpu-2"])
@call_with(play, 2)
async def test_rejected_order_attaches_none_of_its_blocks(rig: FabricRig, provider: RedfishFabric, sealed: str) -> None:
    rig.fabric.sealed = {sealed}
    with pytest.raises(RefusedError, match="rejected the mark"):
        await ordered(provider, devices=2)
    for _ in range(20):
        assert all(one.phase == "failed" for one in await provider.list())
        await asyncio.sleep(TURN_S)
    await given_back(provider, order((await provider.offers())[0]))
    assert unmarked(rig)
    assert not rig.fabric.patches(SYSTEMS)

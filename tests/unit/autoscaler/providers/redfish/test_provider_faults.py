"""Faults of a fabric composed by Redfish: nothing is attached twice, forgotten, or detached while in use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from autoscaler.providers.provider import RefusedError
from autoscaler.providers.redfish.client import NoAnswerError
from autoscaler.providers.redfish.provider import RedfishFabric
from autoscaler.providers.redfish.system_writer import GIVEN_UP_S, NOTHING_S
from autoscaler.state.capacity_orders import AcquireOrder, Listed
from tests.contracts.provider import order, release
from tests.support.fakes.redfish import A100, SYSTEMS, FakeFabric
from tests.support.harness.async_tests import call_with
from tests.support.harness.providers.redfish_rig import TURN_S, FabricRig

pytestmark = pytest.mark.standard

Act = Callable[[FabricRig, RedfishFabric], Awaitable[None]]


def play(act: Act, fabric: FakeFabric | None = None, *, notes: bool = False) -> FabricRig:
    rig = FabricRig(fabric or FakeFabric(), notes=notes)

    async def scenario() -> None:
        await act(rig, rig.provider())

    rig.run(scenario())
    return rig


async def ordered(provider: RedfishFabric, devices: int = 1, number: int = 0, node: str = "w1") -> AcquireOrder:
    offers = {(one.node, one.product): one for one in await provider.offers()}
    made = replace(order(offers[node, A100[0]], number), devices=devices)
    await provider.acquire(made)
    return made


async def until(provider: RedfishFabric, holds: Callable[[tuple[Listed, ...]], bool]) -> tuple[Listed, ...]:
    while not holds(shown := await provider.list()):
        await asyncio.sleep(TURN_S)
    return shown


def phase(wanted: str) -> Callable[[tuple[Listed, ...]], bool]:
    return lambda shown: [one.phase for one in shown] == [wanted]


def unmarked(rig: FabricRig) -> bool:
    kept = rig.notes.kept if rig.notes else {}
    return not kept and not any(one.client for one in rig.fabric.blocks.values())


def nothing(shown: tuple[Listed, ...]) -> bool:
    return not shown


@call_with(play, 2)
async def test_order_accepted_but_never_performed_fails_after_a_timeout(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    rig.fabric.never = True
    made = await ordered(provider)
    (failed,) = await until(provider, phase("failed"))
    assert "did not make it" in failed.says
    assert NOTHING_S <= rig.now_s < 3 * NOTHING_S
    await provider.release(release(made))
    await until(provider, nothing)
    assert not unmarked(rig), "it may come all the same"
    assert len(await provider.offers()) == 4


@call_with(play, 2)
async def test_rejected_attach_fails_at_once_with_the_reported_reason(rig: FabricRig, provider: RedfishFabric) -> None:
    rig.fabric.refuse = 400
    made = await ordered(provider)
    (failed,) = await until(provider, phase("failed"))
    assert failed.says == "the fabric returned status 400 (PropertyValueNotInList)"
    assert rig.now_s < 1.0
    await provider.release(release(made))
    await until(provider, nothing)
    assert unmarked(rig)
    assert len(await provider.offers()) == 4


@call_with(play, 2)
async def test_only_the_rejected_one_of_several_orders_fails(rig: FabricRig, provider: RedfishFabric) -> None:
    rig.fabric.hold = True
    first = await ordered(provider)
    (claimed,) = [name for name, one in rig.fabric.blocks.items() if one.client]
    rig.fabric.refused = {next(name for name in ("Gpu-1", "Gpu-2") if name != claimed)}
    while not rig.fabric.going:
        await asyncio.sleep(TURN_S)
    await ordered(provider, number=1)
    rig.fabric.finish()
    shown = await until(provider, lambda them: {one.phase for one in them} == {"here", "failed"})
    assert [one.name for one in shown if one.phase == "here"] == [first.id.name]


@call_with(play, 2)
async def test_partly_delivered_order_releases_its_undelivered_blocks(rig: FabricRig, provider: RedfishFabric) -> None:
    rig.fabric.half = True
    await ordered(provider, devices=2)
    (half,) = await until(provider, phase("here"))
    assert (half.devices, len(half.device_ids)) == (2, 1)
    (rest,) = [one for one in rig.fabric.blocks.values() if one.client and not one.system]
    assert (rest.client or "").startswith("pilotlight-gone "), "it may come all the same"
    assert [one.devices_max for one in await provider.offers() if one.product == A100[0]] == [1, 1]


@call_with(play, 2)
async def test_device_arriving_after_release_is_listed_and_detached(rig: FabricRig, provider: RedfishFabric) -> None:
    rig.fabric.hold = True
    made = await ordered(provider)
    while not rig.fabric.going:
        await asyncio.sleep(TURN_S)
    await provider.release(release(made, uncommitted=True))
    await until(provider, nothing)
    assert not unmarked(rig), "it may come all the same"
    rig.fabric.finish()
    (late,) = await until(rig.provider(), phase("here"))
    assert (late.name, late.node) == (made.id.name, "w1")
    await rig.provider().release(release(made))
    await until(provider, nothing)
    assert not rig.fabric.attached("1")
    while not unmarked(rig):  # the detach is visible before the provider has removed its mark
        await asyncio.sleep(TURN_S)


@call_with(play, 2)
async def test_device_attached_to_another_node_is_listed_and_detached_there(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    rig.fabric.elsewhere = "2"
    made = await ordered(provider)
    while not rig.changes:
        await asyncio.sleep(TURN_S)
    (there,) = await until(provider, phase("here"))
    assert there.node == "w2"
    await provider.release(release(made))
    await until(provider, nothing)
    assert not rig.fabric.attached("2")
    assert unmarked(rig)


@pytest.mark.parametrize("tasks", [True, False], ids=["tasks", "answers"])
@pytest.mark.parametrize("performed", [True, False], ids=["its answer", "itself"])
def test_lost_change_request_attaches_and_detaches_exactly_once(*, tasks: bool, performed: bool) -> None:
    async def lose(rig: FabricRig, many: int) -> None:
        rig.fabric.lose, rig.fabric.lose_before = (many, 0) if performed else (0, many)

    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        offer = (await provider.offers())[0]
        await lose(rig, 1)
        with pytest.raises(NoAnswerError):
            await provider.acquire(order(offer))
        await provider.acquire(order(offer))
        await until(provider, phase("here"))
        await lose(rig, 2)
        await provider.release(release(order(offer)))
        await until(provider, nothing)
        await lose(rig, 0)
        await provider.acquire(order(offer, 1))
        await lose(rig, 1)
        await until(provider, phase("here"))
        assert len(rig.fabric.attached("1")) == 1

    play(act, FakeFabric(tasks=tasks))


@call_with(play, 2)
async def test_order_is_attached_although_the_response_to_its_write_was_lost(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    offer = (await provider.offers())[0]
    rig.fabric.lose = 1
    with pytest.raises(NoAnswerError):
        await provider.acquire(order(offer))
    await until(provider, phase("here"))


@call_with(play, 2)
async def test_server_error_is_retried_but_a_malformed_response_is_an_error(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    offer = (await provider.offers())[0]
    await provider.acquire(order(offer))
    rig.fabric.statuses = {"PATCH": [500, 502, 503], "GET": [500, 500, 404, 500]}
    await asyncio.sleep(10 * TURN_S)
    rig.fabric.statuses = {}
    await until(provider, phase("here"))
    for raw in (b"<html>", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"Members": [{"@odata.id": "//evil.example/x"}]}'):
        rig.fabric.raw = raw
        with pytest.raises(RefusedError, match="expected"):
            await provider.list()
    rig.fabric.raw = b" " * (9 << 20)
    with pytest.raises(NoAnswerError, match="exceeds 8 MiB"):
        await provider.list()
    rig.fabric.raw = None
    await until(provider, phase("here"))


@call_with(play, 2)
async def test_order_survives_a_one_hour_outage(rig: FabricRig, provider: RedfishFabric) -> None:
    kept = await ordered(provider)
    await until(provider, lambda shown: phase("here")(shown) and rig.changes > 0)  # the bay has reported it
    rig.fabric.away = True
    rig.now_s += 3600.0
    for call in (provider.list(), provider.release(release(kept))):
        with pytest.raises(NoAnswerError):
            await call
    rig.fabric.away = False
    await until(provider, phase("here"))
    await provider.release(release(kept))
    await until(provider, nothing)


@call_with(play, 2)
async def test_order_not_attached_before_the_end_of_a_long_outage_fails(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    rig.fabric.hold = True
    made = await ordered(provider)
    rig.fabric.away = True
    rig.now_s += GIVEN_UP_S
    while not rig.changes:
        await asyncio.sleep(TURN_S)
    rig.fabric.away, rig.fabric.hold = False, False
    await until(provider, phase("failed"))
    await provider.release(release(made))
    await until(provider, nothing)
    assert not rig.fabric.attached("1")


@call_with(play, 2)
async def test_manually_detached_device_is_gone_and_its_block_is_free(rig: FabricRig, provider: RedfishFabric) -> None:
    await ordered(provider)
    await until(provider, phase("here"))
    (name,) = rig.fabric.attached("1")
    rig.fabric.blocks[name].system = ""
    await until(provider, nothing)
    while not unmarked(rig):
        await asyncio.sleep(TURN_S)
    assert not rig.fabric.attached("1"), "it is not attached again"
    assert len(await provider.offers()) == 4


@call_with(play, 2)
async def test_manually_attached_device_stays_attached_after_a_release(rig: FabricRig, provider: RedfishFabric) -> None:
    rig.fabric.blocks["Gpu-2"].system = "1"
    made = await ordered(provider)
    await until(provider, phase("here"))
    assert rig.fabric.attached("1") == ["Gpu-1", "Gpu-2"]
    await provider.release(release(made))
    await until(provider, nothing)
    assert rig.fabric.attached("1") == ["Gpu-2"]


@pytest.mark.parametrize("etags", [True, False], ids=["with ETags", "without"])
def test_concurrent_identical_orders_attach_one_device(*, etags: bool) -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        offer, other = (await provider.offers())[0], rig.provider()
        made = order(offer)
        await asyncio.gather(provider.acquire(made), other.acquire(replace(made, epoch=2)))
        await until(provider, phase("here"))
        await until(other, phase("here"))
        assert len(rig.fabric.attached("1")) == 1

    play(act, FakeFabric(etags=etags))


def test_device_is_attached_again_if_another_writer_removed_it() -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        rig.fabric.hold = True
        await ordered(provider)
        while not rig.fabric.going:
            await asyncio.sleep(TURN_S)
        own = [name for name, one in rig.fabric.blocks.items() if one.client]
        rig.fabric.lose_before, rig.fabric.going[0].well = 0, False
        rig.fabric.finish()  # it is finished, and a writer with an older read wrote after it
        await until(provider, phase("here"))
        assert rig.fabric.attached("1") == own

    play(act, FakeFabric(etags=False, tasks=False))


@call_with(play, 2)
async def test_concurrent_change_by_another_writer_is_kept_with_etags(rig: FabricRig, provider: RedfishFabric) -> None:
    def by_hand() -> None:
        rig.fabric.blocks["Gpu-3"].system = "1"
        rig.fabric.versions["1"] += 1

    rig.fabric.meanwhile = by_hand
    await ordered(provider)
    await until(provider, phase("here"))
    assert len(rig.fabric.attached("1")) == 2
    assert "Gpu-3" in rig.fabric.attached("1")


@call_with(play, 2)
async def test_fabric_order_fails_if_another_host_took_its_device_block(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    def taken() -> None:
        for block in rig.fabric.blocks.values():
            block.system = block.system or ("2" if block.client else "")

    rig.systems = {"w1": SYSTEMS + "/1"}
    provider = rig.provider()
    rig.fabric.meanwhile = taken
    made = await ordered(provider)
    (failed,) = await until(provider, phase("failed"))
    assert "other clients attached" in failed.says
    await provider.release(release(made))
    await until(provider, nothing)
    assert unmarked(rig)
    assert len(rig.fabric.attached("2")) == 1


def test_concurrent_orders_for_a_system_are_written_serially() -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        rig.fabric.takes_s = 5 * TURN_S
        await asyncio.gather(ordered(provider), ordered(provider, number=1))
        await until(provider, lambda shown: [one.phase for one in shown] == ["here", "here"])
        assert rig.fabric.attached("1") == ["Gpu-1", "Gpu-2"]
        assert rig.fabric.overlaps == 0

    play(act, FakeFabric(etags=False))


@call_with(play, 2)
async def test_device_used_during_a_release_is_not_detached(rig: FabricRig, provider: RedfishFabric) -> None:
    made = await ordered(provider)
    await until(provider, phase("here"))
    rig.fabric.statuses["PATCH"] = [503]
    await provider.release(release(made))
    rig.use(made.id.name)
    await until(provider, phase("here"))
    assert rig.fabric.attached("1")


@pytest.mark.parametrize("late", [False, True], ids=["used before", "used meanwhile"])
@call_with(play, 2)
async def test_device_in_use_is_detached_only_by_a_forced_release(
    rig: FabricRig, provider: RedfishFabric, *, late: bool
) -> None:
    made = await ordered(provider)
    await until(provider, phase("here"))
    (path,) = [one.path for one in rig.fabric.patches(rig.fabric.path("1"))]
    if late:
        rig.fabric.statuses["PATCH"] = [503]
        await provider.release(release(made))
    rig.use(made.id.name)
    await provider.release(release(made))
    await until(provider, phase("here"))
    assert rig.fabric.attached("1"), "whoever says it again forces nothing"
    await provider.release(replace(release(made), force=True))
    await until(provider, nothing)
    assert not rig.fabric.attached("1")
    assert {one.path for one in rig.fabric.patches(rig.fabric.path("1"))} == {path}, "its own system alone"
    assert unmarked(rig)
    again = await ordered(provider)
    await until(provider, phase("here"))
    rig.use(again.id.name)
    await provider.release(release(again))
    await until(provider, phase("here"))
    assert rig.fabric.attached("1"), "what came by the same name is not forced for that"

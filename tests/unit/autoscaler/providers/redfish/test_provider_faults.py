"""Faults and late results of a Redfish fabric: no device is attached twice, lost, or detached while in use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from autoscaler.providers.provider import RefusedError
from autoscaler.providers.redfish.attach_detach import GIVEN_UP_S, NOTHING_S
from autoscaler.providers.redfish.client import NoAnswerError
from autoscaler.providers.redfish.provider import LATE_S, RedfishFabric
from autoscaler.state.capacity import AcquireOrder, Listed
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
def test_order_and_release_complete_although_requests_or_answers_are_lost(*, tasks: bool, performed: bool) -> None:
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
async def test_delivered_order_is_still_listed_after_a_one_hour_outage(rig: FabricRig, provider: RedfishFabric) -> None:
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
    assert rig.fabric.attached("1"), "repeating the order forces nothing"
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


async def when(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(TURN_S)


async def given_back(provider: RedfishFabric, made: AcquireOrder) -> None:
    """Release the order, and wait until nothing of it is listed."""
    await provider.release(release(made))
    await until(provider, nothing)


async def comes_late_and_goes(rig: FabricRig, provider: RedfishFabric, made: AcquireOrder) -> None:
    """A device attached after its release is listed as ordered by Pilotlight, and is detached like any other."""
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


def test_block_of_a_rejected_order_stays_tagged_while_it_may_still_attach() -> None:
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
    reported = [str(rig.fabric.blocks[name].client).partition(" ")[0] for name in ("Gpu-1", "Gpu-2")]
    assert reported == ["pilotlight-gone", "pilotlight-gone"]


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
        assert not unmarked(rig), "it reports that the order is in progress"
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

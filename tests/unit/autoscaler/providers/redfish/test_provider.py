"""Requests to a Redfish service: sessions, paths, ETags, back-off, errors; a service that cannot store marks."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.redfish.attach_detach import NOTHING_S
from autoscaler.providers.redfish.client import POLL_S, NoAnswerError, StatusError
from autoscaler.providers.redfish.inventory import Reading
from autoscaler.providers.redfish.provider import LATE_S, RedfishFabric
from autoscaler.providers.redfish.schema import BlockMark
from tests.contracts.provider import order, release
from tests.support.builders.capacity import offer
from tests.support.fakes.redfish import A100, BLOCKS, PASSWORD, SYSTEMS, TOKEN, FakeFabric
from tests.support.harness.async_tests import call_with, run_in
from tests.support.harness.providers.redfish_rig import TURN_S, FabricRig
from tests.unit.autoscaler.providers.redfish.test_provider_faults import nothing, ordered, phase, play, unmarked, until

pytestmark = pytest.mark.standard


@call_with(play, 2)
async def test_follower_writes_nothing_to_the_fabric(rig: FabricRig, provider: RedfishFabric) -> None:
    offered = (await provider.offers())[0]
    rig.leads = False
    with pytest.raises(NoAnswerError, match="is not the leader"):
        await provider.acquire(order(offered))
    assert not await provider.list()
    assert not rig.fabric.patches()


@call_with(play, 2)
async def test_expired_session_is_reopened_and_closed_at_the_end(rig: FabricRig, provider: RedfishFabric) -> None:
    await provider.list()
    rig.fabric.sessions.clear()
    await provider.list()
    assert len(rig.fabric.sessions) == 1
    await provider.close()
    assert not rig.fabric.sessions


@call_with(play, 2)
async def test_repeated_401_responses_keep_only_one_session(rig: FabricRig, provider: RedfishFabric) -> None:
    offered = (await provider.offers())[0]
    rig.fabric.statuses = {"PATCH": [401] * 99}
    for number in range(5):
        with pytest.raises(RefusedError, match="401"):
            await provider.acquire(order(offered, number))
    assert len(rig.fabric.sessions) == 1
    await provider.close()
    assert not rig.fabric.sessions


@pytest.mark.parametrize("status", [404, 503])
@call_with(play, 2)
async def test_session_that_cannot_be_deleted_does_not_block_a_new_one(
    rig: FabricRig, provider: RedfishFabric, status: int
) -> None:
    await provider.list()
    rig.fabric.statuses = {"DELETE": [status], "PATCH": [401]}
    await ordered(provider)
    await until(provider, phase("here"))
    assert not rig.fabric.statuses["DELETE"]


@pytest.mark.parametrize(("retry_after", "pause_s"), [("0", POLL_S[0]), ("", POLL_S[0]), ("1", 1.0), ("99999", 5.0)])
def test_task_is_polled_no_sooner_than_its_bounded_retry_after_time(retry_after: str, pause_s: float) -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        def looks() -> int:
            return sum("/Tasks/" in one.path for one in rig.fabric.asked)

        await ordered(provider)
        while looks() < 5:
            await asyncio.sleep(TURN_S)
        assert rig.now_s >= 4 * pause_s

    play(act, FakeFabric(hold=True, retry_after=retry_after))


def test_errors_of_a_failing_fabric_contain_no_address_or_secret() -> None:
    messages: list[str] = []

    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        offered = (await provider.offers())[0]
        rig.fabric.refuse = 400
        await ordered(provider)
        messages.extend(one.says for one in await until(provider, phase("failed")))
        rig.password = "wr0ng-of-the-rack"
        for fault in (
            {"statuses": {"GET": [404] * 9}},
            {"statuses": {"GET": [500] * 9}},
            {"raw": b"10.0.0.7"},
            {"away": True},
        ):
            for name, value in fault.items():
                setattr(rig.fabric, name, value)
            for fresh in (provider, rig.provider()):
                for call in (fresh.list(), fresh.acquire(order(offered, 1))):
                    try:
                        await call
                    except Exception as error:  # noqa: BLE001  every error text is collected
                        messages.append(f"{error!r} {error.__cause__!r}")
            rig.fabric.statuses, rig.fabric.raw = {}, None
        messages.append(repr(await rig.logins()))

    rig = play(act)
    assert len(messages) > 8
    secrets = (PASSWORD, "wr0ng", TOKEN, "127.0.0.1", "10.0.0.7", rig.fabric.url, rig.fabric.url.rpartition(":")[2])
    for text in messages:
        assert not any(one in text for one in secrets), text


@pytest.mark.parametrize("status", [200, 404, 429], ids=["without its memory", "not there", "too busy"])
@call_with(play, 2)
async def test_gpu_with_incomplete_details_is_offered_once_they_are_known(
    rig: FabricRig, provider: RedfishFabric, status: int
) -> None:
    async def most() -> list[int]:
        return [one.devices_max for one in await provider.offers() if one.product == A100[0]]

    def asked() -> int:
        return sum(one.path.endswith("/Processors/Gpu-2") for one in rig.fabric.asked)

    rig.fabric.untold = {"Gpu-2": status}
    assert await most() == [1, 1]
    before = asked()
    await ordered(provider)
    await until(provider, phase("here"))
    looks = sum(one.path.endswith("/ResourceBlocks") for one in rig.fabric.asked)
    assert before < asked() < looks, "a change of links causes no new request"
    rig.fabric.untold = {}
    await most()
    requests = asked()
    assert await most() == [1, 1], "the other is attached"
    assert asked() == requests, "once"


def test_fabric_that_cannot_store_an_owner_offers_no_devices() -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        assert not await provider.offers()
        with pytest.raises(RefusedError, match="cannot store"):
            await provider.acquire(order(offer(product=A100[0])))
        assert not rig.fabric.patches(SYSTEMS)

    play(act, FakeFabric(keeps=False))


@pytest.mark.parametrize(
    ("status", "within_s", "message"),
    [
        (0, 3 * NOTHING_S, "the fabric returned status 409 (its task failed)"),
        (400, 2.0, "the fabric returned status 400 (InternalError)"),
    ],
)
@call_with(play, 2)
async def test_order_fails_when_its_accepted_task_fails(
    rig: FabricRig, provider: RedfishFabric, status: int, within_s: float, message: str
) -> None:
    """A task monitor returns a task, or the response of the operation itself, which then fails at once."""
    rig.fabric.takes_s, rig.fabric.task_fails, rig.fabric.task_status = 0.02, True, status
    made = await ordered(provider)
    (failed,) = await until(provider, phase("failed"))
    assert failed.says == message
    assert rig.now_s < within_s
    rig.fabric.task_fails = False
    await provider.release(release(made))
    await until(provider, nothing)
    assert not rig.fabric.attached("1")
    assert len(await provider.offers()) == 4


@call_with(play, 2)
async def test_two_clusters_sharing_a_fabric_do_not_release_each_others_gpus(
    rig: FabricRig, provider: RedfishFabric
) -> None:
    """Each cluster has one of the fabric's systems, and both request the same model."""
    both = rig.systems
    rig.systems = {"w1": both["w1"]}
    here = rig.provider()
    rig.name, rig.systems = "far", {"x1": both["w2"]}
    there = rig.provider()
    made = await ordered(here)
    await until(here, phase("here"))
    assert not await there.list()
    assert [one.devices_max for one in await there.offers() if one.product == A100[0]] == [1]
    other = replace(order((await there.offers())[0]), devices=1)
    assert other.id.name != made.id.name
    await there.acquire(other)
    await until(there, phase("here"))
    await there.release(release(made))
    assert [one.name for one in await here.list()] == [made.id.name]
    await there.release(release(other))
    await until(there, nothing)
    assert len(rig.fabric.attached("1")) == 1
    assert not rig.fabric.attached("2")


@pytest.mark.parametrize("etags", [True, False], ids=["with ETags", "without"])
def test_foreign_owner_tag_is_not_overwritten_if_members_lack_etags(*, etags: bool) -> None:
    """Another installation has marked the block since it was read."""

    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        del provider
        reading = Reading(rig.service(rig.logins), rig.systems, rig.name)
        first, second = (f"{BLOCKS}/Gpu-{one}" for one in (1, 2))
        blocks = (await reading.read()).blocks
        block, mark = rig.fabric.blocks["Gpu-1"], BlockMark("lease", ModelName("m"), 1, 1, "w1", rig.name)
        block.client, block.version = "somebody else's", block.version + 1
        try:
            with pytest.raises(StatusError, match="412"):
                await reading.keep(blocks[first], mark)
            await reading.keep(blocks[second], mark)
        finally:
            await reading.service.close()
        assert (block.client, rig.fabric.blocks["Gpu-2"].client) == ("somebody else's", mark.text())

    play(act, FakeFabric(members_tagged=False, etags=etags))


@pytest.mark.parametrize("members_tagged", [True, False], ids=["of members", "of documents alone"])
def test_block_is_read_for_its_etag_only_if_the_collection_has_none(*, members_tagged: bool) -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        made = await ordered(provider)
        await until(provider, phase("here"))
        looks = [one.path for one in rig.fabric.asked if one.method == "GET" and one.path.startswith(f"{BLOCKS}/")]
        assert len(looks) == (0 if members_tagged else 1)
        await provider.release(release(made))
        await until(provider, nothing)
        assert not rig.fabric.attached("1")

    play(act, FakeFabric(members_tagged=members_tagged, guarded=True))


@pytest.mark.parametrize("named", ["https://rack-1.internal:443", "https://[rack", "another that listens"])
def test_foreign_hosts_in_task_and_session_urls_are_never_contacted(named: str) -> None:
    other = FakeFabric()

    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        async with other.serving():
            rig.fabric.named = named if "/" in named else other.url
            await ordered(provider)
            while rig.now_s < 2.0:
                await asyncio.sleep(TURN_S)
            rig.fabric.finish()
            await until(provider, phase("here"))
            assert len(rig.fabric.patches(SYSTEMS)) == 1, "its task was followed"
            await provider.close()
            assert not rig.fabric.sessions
            assert not other.asked

    play(act, FakeFabric(hold=True))


def test_order_completes_if_task_and_session_urls_are_unusable() -> None:
    async def act(rig: FabricRig, provider: RedfishFabric) -> None:
        await ordered(provider)
        while len(rig.fabric.patches(SYSTEMS)) < 2:
            await asyncio.sleep(TURN_S)
        rig.fabric.finish()
        await until(provider, phase("here"))

    play(act, FakeFabric(hold=True, named="https://[rack/elsewhere"))


# --- nodes that are removed or missing --------------------------------------------------------------------------------


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

"""GPUs of a fabric through the composable resource operator: shared requests, API calls, and releases."""

from __future__ import annotations

import asyncio
import copy

import msgspec
import pytest
from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import GPU_COUNT
from autoscaler.providers.cro.objects import (
    LAST_USED,
    LEASE,
    NOTE,
    REQUESTS,
    RESOURCES,
    VICTIM,
    LeaseNote,
    build_composability_request,
    request_name,
)
from autoscaler.providers.cro.provider import EXPECTED_S, FRESH_S, NODES, PARTIAL_S, CroFabric
from autoscaler.providers.kubernetes_access import AnswerError, Object
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.release_checks import CLAIMS, SLICES
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import LeaseId, ReleaseOrder
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId
from tests.contracts.provider import OWNER, ProviderContract, order
from tests.support.builders.worlds import replace_fields
from tests.support.fakes.kubernetes.cro import NONE_FREE
from tests.support.fakes.kubernetes.kube_objects import PlayedServer, stamp
from tests.support.harness.providers.cro_rig import (
    MODEL,
    NODE,
    SETTINGS,
    UNIX_S,
    Rack,
    given_back,
    in_rack,
    ordered,
    world,
)


class TestCroFabric(ProviderContract):
    @pytest.fixture
    def rig(self) -> Rack:
        return Rack()


@pytest.fixture
def rack() -> Rack:
    return Rack()


@in_rack
async def test_order_creates_one_composability_request_naming_its_owner(rack: Rack) -> None:
    name = await ordered(rack, devices=2)
    made = rack.request()
    assert made["metadata"]["name"] == request_name(MODEL, NODE)
    assert made["spec"]["resource"] == {
        "type": "gpu", "model": MODEL, "size": 2, "target_node": NODE, "allocation_policy": "samenode",
    }  # fmt: skip
    note = msgspec.json.decode(made["metadata"]["annotations"][NOTE + name])
    assert (note["owner"], note["epoch"], note["devices"]) == (OWNER, 1, 2)


@in_rack
async def test_offer_and_order_are_limited_to_the_free_device_slots_of_a_node(rack: Rack) -> None:
    (offer,) = await rack.provider().offers()
    assert (offer.node, offer.product, offer.devices_max, offer.memory_bytes) == (NODE, MODEL, 3, 40 << 30)
    assert (offer.bought, offer.price_per_hour, offer.expected_s) == ("fabric", 1.5, EXPECTED_S)
    await ordered(rack, devices=2)
    assert [one.devices_max for one in await rack.provider().offers()] == [1]
    made = replace(order(offer, 1), devices=2)
    with pytest.raises(RefusedError, match="no room for 2 more"):
        await rack.provider().acquire(made)


@in_rack
async def test_node_without_a_known_device_maximum_is_not_offered(rack: Rack) -> None:
    rack.world = world(Settings(nodes=(replace(SETTINGS.nodes[0], devices_max=None),)))
    with pytest.raises(RefusedError):
        await rack.provider().offers()
    rack.server.change(f"{NODES}/{NODE}", {"metadata": {"annotations": {GPU_COUNT: "3"}}})
    assert [one.devices_max for one in await rack.provider().offers()] == [2]
    rack.server.change(f"{NODES}/{NODE}", {"spec": {"unschedulable": True}})
    assert not await rack.provider().offers()


@in_rack
async def test_device_model_of_unknown_memory_is_not_offered(rack: Rack) -> None:
    one = CroFabric("rack", "NVIDIA-H200-NVL", rack.server, lambda: rack.world)
    with pytest.raises(RefusedError, match="the memory of NVIDIA-H200-NVL is unknown: add it to Settings `nodes`"):
        await one.offers()
    device = replace(SETTINGS.nodes[0].device, model="NVIDIA-H200-NVL")
    rack.world = world(Settings(nodes=(replace(SETTINGS.nodes[0], device=device),)))
    assert [offer.memory_bytes for offer in await one.offers()] == [40 << 30]


@in_rack
async def test_device_model_is_not_offered_while_another_request_lacks_devices(rack: Rack) -> None:
    rack.cro.pool[MODEL] = 0
    await rack.another_asks("w2")
    while not any(one.get("status", {}).get("error") for one in rack.resources()):
        await asyncio.sleep(0.5)
    assert not await rack.provider().offers()


@in_rack
async def test_concurrent_identical_orders_by_two_leaders_create_one_request(rack: Rack) -> None:
    offer = (await rack.provider().offers())[0]
    made = order(offer)
    other = CroFabric("rack", MODEL, rack.server, lambda: rack.world)
    rack.server.before_write = lambda *_: rack.server.put(
        f"{REQUESTS}/{request_name(MODEL, NODE)}",
        build_composability_request(MODEL, NODE, 1, {made.id.name: LeaseNote("rack", OWNER, 2, 1, UNIX_S)}),
    )
    await other.acquire(made)
    assert rack.request()["spec"]["resource"]["size"] == 1


def old_at_hand(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the API server's cached objects: reads with resourceVersion 0 stay at the current state."""
    kept, items = copy.deepcopy(rack.server.objects), rack.server.items

    async def asked(path: str, **query: str) -> list[Object]:
        if query.pop("resourceVersion", "") != "0":
            return await items(path, **query)
        now, rack.server.objects = rack.server.objects, kept
        try:
            return await items(path, **query)
        finally:
            rack.server.objects = now

    monkeypatch.setattr(rack.server, "items", asked)


@in_rack
async def test_stale_cached_reads_neither_duplicate_nor_lose_orders(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_at_hand(rack, monkeypatch)
    await ordered(rack, 0)
    await ordered(rack, 0)
    assert rack.request()["spec"]["resource"]["size"] == 1
    await ordered(rack, 1)
    assert rack.request()["spec"]["resource"]["size"] == 2
    assert len(await rack.provider().list()) == 2


@in_rack
async def test_order_after_a_release_has_its_full_size_despite_a_stale_cache(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await ordered(rack, 0, devices=3)
    old_at_hand(rack, monkeypatch)
    await rack.provider().release(ReleaseOrder(id=LeaseId("rack", name), epoch=1))
    await rack.until(lambda leases: not leases)
    await ordered(rack, 1, devices=3)
    assert rack.request()["spec"]["resource"]["size"] == 3


@in_rack
async def test_concurrent_resize_of_a_request_by_another_writer_is_kept(rack: Rack) -> None:
    await rack.another(1)
    resize = {"spec": {"resource": {"size": 2}}}
    rack.server.before_write = lambda *_: rack.server.change(f"{REQUESTS}/theirs", resize)
    await ordered(rack)
    assert rack.request()["spec"]["resource"]["size"] == 3


@in_rack
async def test_request_shared_with_others_changes_only_by_our_devices(rack: Rack) -> None:
    await rack.another(1)
    (foreign,) = rack.resources()
    name = await ordered(rack)
    assert (rack.request()["metadata"]["name"], rack.request()["spec"]["resource"]["size"]) == ("theirs", 2)
    await rack.until_here(name)
    await asyncio.sleep(1.0)
    await rack.provider().list()
    mine = next(one for one in rack.resources() if one["metadata"]["name"] != foreign["metadata"]["name"])
    assert mine["metadata"]["labels"][LEASE] == name
    assert mine["metadata"]["annotations"][LAST_USED] >= stamp(rack.server.unix_s() - 60.0)
    await given_back(rack, name)
    await rack.until_gone(name)
    (left,) = rack.resources()
    assert left["metadata"]["name"] == foreign["metadata"]["name"]
    assert left["metadata"].get("annotations", {}) == {}
    assert LEASE not in left["metadata"]["labels"]
    assert rack.request()["spec"]["resource"]["size"] == 1
    assert not rack.request()["metadata"]["annotations"], "no annotation of Pilotlight remains"


@in_rack
async def test_last_used_annotation_is_refreshed_while_a_device_is_attached(rack: Rack) -> None:
    name = await ordered(rack)
    await rack.until_here(name)
    for _ in range(12):
        await asyncio.sleep(60.0)
        await rack.provider().list()
        (mine,) = rack.resources()
        assert mine["metadata"]["annotations"][LAST_USED] > stamp(rack.server.unix_s() - 61.0)


@in_rack
async def test_releasing_one_of_two_orders_on_a_node_keeps_the_other(rack: Rack) -> None:
    first = await ordered(rack)
    await rack.until_here(first)
    second = await ordered(rack, 1)
    before = await rack.until(lambda leases: leases[second].phase == "here")
    assert [before[one].counted_from for one in (first, second)] == [1, 2]
    await given_back(rack, second)
    await rack.until_gone(second)
    (left,) = await rack.provider().list()
    assert (left.name, left.device_ids) == (first, before[first].device_ids)
    await given_back(rack, first)
    await rack.until_gone(first)


@in_rack
async def test_release_if_uncommitted_keeps_the_device_of_another_order(rack: Rack) -> None:
    """The operator releases any resource that has no device yet, not the one that belonged to this order."""
    rack.cro.attach_s = 60.0
    first = await ordered(rack)
    second = await ordered(rack, 1)
    await rack.until(lambda leases: len(leases) == len(rack.resources()) == 2)
    await rack.provider().release(ReleaseOrder(id=LeaseId("rack", first), epoch=1, uncommitted=True))
    await rack.until_gone(first)
    await rack.until_here(second)
    assert len(rack.resources()) == 1


@pytest.mark.parametrize("removed", [True, False])
@in_rack
async def test_released_order_can_be_placed_again_before_its_request_is_gone(rack: Rack, removed: bool) -> None:
    """The old request may still be being deleted, and removing its note may have failed."""
    name = await ordered(rack)
    await rack.until(lambda leases: len(rack.resources()) == 1)
    await rack.provider().release(ReleaseOrder(id=LeaseId("rack", name), epoch=1, uncommitted=True))
    while rack.resources():
        await asyncio.sleep(0.01)
    rack.cro.period_s = 0.7
    if removed:
        assert not await rack.provider().list()
    assert ("deletionTimestamp" in rack.request()["metadata"]) is removed
    assert await ordered(rack) == name
    await rack.until_here(name)
    assert len(rack.resources()) == 1


@in_rack
async def test_order_is_committed_before_its_device_is_visible_on_the_node(rack: Rack) -> None:
    rack.cro.visible = lambda node, uuid: asyncio.get_running_loop().time() > 1030.0
    name = await ordered(rack)
    found = await rack.until(lambda leases: leases[name].committed)
    assert (found[name].node, found[name].device_ids) == ("", ()), "nothing of it is there yet"
    await rack.provider().release(ReleaseOrder(id=LeaseId("rack", name), epoch=1, uncommitted=True))
    assert [one.phase for one in await rack.provider().list()] == ["coming"]
    await rack.until_here(name)


@in_rack
async def test_partly_fulfilled_order_counts_as_delivered_after_a_timeout(rack: Rack) -> None:
    rack.cro.pool[MODEL] = 1
    began_s = rack.server.unix_s()
    name = await ordered(rack, devices=2)
    await rack.until(lambda leases: len(leases[name].device_ids) == 1)
    assert [one.phase for one in await rack.provider().list()] == ["coming"]
    found = await rack.until(lambda leases: leases[name].phase == "here")
    assert rack.server.unix_s() - began_s >= PARTIAL_S
    assert len(found[name].device_ids) == 1
    assert found[name].says == NONE_FREE


@in_rack
async def test_shrinking_a_request_fails_the_order_that_lacks_devices(rack: Rack) -> None:
    names = [await ordered(rack), await ordered(rack, 1)]
    await rack.until(lambda leases: all(one.phase == "here" for one in leases.values()))
    rack.server.change(f"{REQUESTS}/{request_name(MODEL, NODE)}", {"spec": {"resource": {"size": 1}}})
    found = await rack.until(lambda leases: sorted(one.phase for one in leases.values()) == ["failed", "here"])
    lost = next(name for name in names if found[name].phase == "failed")
    assert found[lost].says == "another client reduced the size of its request"
    await given_back(rack, lost)
    assert rack.request()["spec"]["resource"]["size"] == 1, "the remaining devices belong to the other client"
    await rack.until_gone(lost)


@in_rack
async def test_device_reserved_by_a_resource_claim_is_not_released(rack: Rack) -> None:
    names = [await ordered(rack), await ordered(rack, 1)]
    found = await rack.until(lambda leases: all(one.phase == "here" for one in leases.values()))
    uuids = {name: found[name].device_ids[0].rpartition("/")[2] for name in names}
    devices = [{"name": f"d{at}", "attributes": {"uuid": {"string": uuids[name]}}} for at, name in enumerate(names)]
    pool = {"driver": "gpu.nvidia.com", "pool": {"name": NODE}, "nodeName": NODE, "devices": devices}
    rack.server.put(f"{SLICES}/a", {"spec": pool})
    got = {"results": [{"driver": "gpu.nvidia.com", "pool": NODE, "device": "d0"}]}
    status = {"allocation": {"devices": got}, "reservedFor": [{"name": "a"}]}
    claims = CLAIMS.replace("resourceclaims", "namespaces/a/resourceclaims")
    rack.server.put(f"{claims}/b", {"metadata": {"namespace": "a"}, "status": status})
    left = {"allocation": {"devices": {"results": [{**got["results"][0], "device": "d1"}]}}}
    rack.server.put(f"{claims}/nobodys", {"metadata": {"namespace": "a"}, "status": left})
    for name in names:
        await given_back(rack, name)
    phases = {one.name: one.phase for one in await rack.provider().list()}
    assert phases == {names[0]: "here", names[1]: "leaving"}


@in_rack
async def test_release_requires_an_idle_node_until_inventory_lists_the_device(rack: Rack) -> None:
    name = await ordered(rack)
    await rack.until_here(name)
    (listed,) = await rack.provider().list()
    assert listed.alone
    there = Slice(id=SliceId("a"), device=DeviceId(listed.device_ids[0]), node=NodeId(NODE), memory_bytes=1)
    rack.world = replace_fields(rack.world, slices={**rack.world.nodes.slices, there.id: there})
    assert [one.alone for one in await rack.provider().list()] == [False]


@in_rack
async def test_api_server_rejection_is_reported_with_its_message(rack: Rack) -> None:
    rack.server.refused["POST"] = AnswerError(403, "Forbidden", "admission webhook denied the request")
    with pytest.raises(RefusedError, match="the API server rejected the request: admission webhook denied"):
        await ordered(rack)


@in_rack
async def test_orders_are_listed_even_if_writing_annotations_is_forbidden(rack: Rack) -> None:
    name = await ordered(rack)
    rack.server.refused["PATCH"] = AnswerError(403, "Forbidden", "another leads now")
    rack.cro.server = rack.allowed()
    await rack.until_here(name)


@in_rack
async def test_malformed_annotation_on_a_foreign_request_is_not_an_order(rack: Rack) -> None:
    await rack.another(1)
    rack.server.change(f"{REQUESTS}/theirs", {"metadata": {"annotations": {NOTE + "a": "{", NOTE + "b": "[]"}}})
    assert not await rack.provider().list()


@in_rack
async def test_stuck_detach_is_forced_only_for_the_force_released_order(rack: Rack) -> None:
    names = [await ordered(rack, number) for number in range(2)]
    for name in names:
        await rack.until_here(name)
    rack.cro.busy = lambda node, uuid: True
    await given_back(rack, names[0])
    await given_back(rack, names[0])
    await asyncio.sleep(100)
    (stuck,) = [one for one in rack.resources() if one["status"]["state"] == "Detaching"]
    assert "there are processes" in stuck["status"]["error"]
    assert not any(one["spec"]["force_detach"] for one in rack.resources()), "a repeated order does not force a detach"
    await given_back(rack, names[0], force=True)
    forced = {one["metadata"]["name"] for one in rack.resources() if one["spec"]["force_detach"]}
    assert forced == {stuck["metadata"]["name"]}
    await rack.until_gone(names[0])
    assert [one.name for one in await rack.provider().list()] == [names[1]]
    assert not any(one["spec"]["force_detach"] for one in rack.resources())


@in_rack
async def test_fabric_device_in_use_is_detached_only_by_a_forced_release(rack: Rack) -> None:
    name = await ordered(rack)
    await rack.until_here(name)
    rack.use(name)
    await given_back(rack, name)
    (kept,) = await rack.provider().list()
    assert kept.phase == "here"
    await given_back(rack, name, force=True)
    await rack.until_gone(name)


@in_rack
async def test_own_composability_request_is_deleted_when_no_device_remains(rack: Rack) -> None:
    name = await ordered(rack)
    await rack.until_here(name)
    await given_back(rack, name)
    (listed,) = await rack.provider().list()
    assert (listed.phase, len(listed.device_ids)) == ("leaving", 1), "it is not free while it goes"
    with pytest.raises(RefusedError, match="still being released"):
        await ordered(rack)
    await rack.until_gone(name)
    await asyncio.sleep(1.0)
    await rack.provider().list()
    assert not rack.server.objects.keys() - {f"{NODES}/{NODE}"}
    assert rack.cro.pool[MODEL] == 3


@pytest.mark.parametrize("seen_s", [0.0, 0.15])
@in_rack
async def test_composability_request_released_before_a_device_exists_is_deleted(rack: Rack, seen_s: float) -> None:
    name = await ordered(rack)
    await asyncio.sleep(seen_s)
    await given_back(rack, name)
    assert not rack.resources()
    await asyncio.sleep(1.0)
    assert not await rack.provider().list()
    await asyncio.sleep(1.0)
    assert not rack.server.objects.keys() - {f"{NODES}/{NODE}"}


AT = f"{REQUESTS}/{request_name(MODEL, NODE)}"
EMPTY = build_composability_request(MODEL, NODE, 0, {})


@in_rack
async def test_order_added_during_deletion_of_an_empty_request_is_kept(rack: Rack) -> None:
    rack.cro.server = PlayedServer(lambda: UNIX_S)  # the operator works on another API server
    rack.server.put(AT, EMPTY)
    note = LeaseNote("rack", OWNER, 1, 1, UNIX_S)
    rack.server.before_write = lambda *_: rack.server.change(
        AT, build_composability_request(MODEL, NODE, 1, {"a": note})
    )
    assert not await rack.provider().list(), "it was read before"
    assert [method for method, _, _ in rack.server.writes] == ["DELETE"]
    assert [one.name for one in await rack.provider().list()] == ["a"]


@in_rack
async def test_order_after_concurrent_deletion_creates_a_new_request(rack: Rack) -> None:
    rack.cro.server = PlayedServer(lambda: UNIX_S)
    rack.server.put(AT, EMPTY)
    rack.server.before_write = lambda *_: rack.server.objects.__delitem__(AT)
    name = await ordered(rack)
    assert [one.name for one in await rack.provider().list()] == [name]
    assert rack.request()["spec"]["resource"]["size"] == 1


@in_rack
async def test_foreign_composability_request_without_devices_is_kept(rack: Rack) -> None:
    await rack.another_asks(NODE, size=0)
    await rack.provider().list()
    assert rack.request()["metadata"]["name"] == "theirs"
    assert not [one for one in rack.server.writes if one[0] == "DELETE"]


async def marked(rack: Rack, name: str) -> None:
    """Mark an order's device without changing the size, as if the leader that wrote it was replaced."""
    patch = rack.server.patch

    async def broken(path: str, body: Object) -> Object:
        if path.startswith(REQUESTS):
            raise AnswerError(500, "InternalError", "etcdserver: leader changed")
        return await patch(path, body)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rack.server, "patch", broken)
        with pytest.raises(AnswerError, match="leader changed"):
            await given_back(rack, name)
    assert marks(rack) == [name]


def marks(rack: Rack) -> list[str]:
    """The orders whose devices the operator would detach first."""
    return [one["labels"][LEASE] for one in metadata(rack) if VICTIM in one.get("annotations", {})]


def metadata(rack: Rack) -> list[Object]:
    """The metadata of all devices."""
    return [one["metadata"] for one in rack.resources()]


async def two(rack: Rack) -> tuple[str, str]:
    """Two delivered orders."""
    names = await ordered(rack), await ordered(rack, 1)
    await rack.until(lambda leases: all(one.phase == "here" for one in leases.values()))
    return names


@in_rack
async def test_release_after_a_failed_release_detaches_only_its_own_device(rack: Rack) -> None:
    first, second = await two(rack)
    before = {one.name: one for one in await rack.provider().list()}
    await marked(rack, first)
    await given_back(rack, second)
    assert marks(rack) == [second]
    await rack.until_gone(second)
    assert [*await rack.provider().list()] == [before[first]]


@in_rack
async def test_detach_annotation_of_a_failed_release_is_removed_after_a_delay(rack: Rack) -> None:
    first, _ = await two(rack)
    await asyncio.sleep(FRESH_S)
    await marked(rack, first)
    await rack.provider().list()
    assert marks(rack) == [first]
    await asyncio.sleep(FRESH_S + 1.0)
    await rack.provider().list()
    assert not marks(rack)


@in_rack
async def test_listing_keeps_a_detach_annotation_refreshed_by_a_new_release(rack: Rack) -> None:
    first, second = await two(rack)
    await marked(rack, first)
    await asyncio.sleep(FRESH_S + 1.0)
    (at,) = [f"{RESOURCES}/{one['name']}" for one in metadata(rack) if one["labels"][LEASE] == first]
    fresh = {VICTIM: "true", LAST_USED: stamp(rack.server.unix_s())}
    rack.server.before_write = lambda *_: rack.server.change(at, {"metadata": {"annotations": fresh}})
    await rack.provider().list()
    assert marks(rack) == [first]
    await given_back(rack, first)
    await rack.until_gone(first)
    assert [one.name for one in await rack.provider().list()] == [second]


@in_rack
async def test_repeated_release_of_a_device_in_use_removes_detach_annotation(rack: Rack) -> None:
    first, _ = await two(rack)
    await marked(rack, first)
    rack.use(first)
    await given_back(rack, first)
    assert not marks(rack)


@in_rack
async def test_detach_annotation_of_another_provider_is_kept(rack: Rack) -> None:
    first, second = await two(rack)
    await marked(rack, first)
    note = msgspec.json.decode(rack.request()["metadata"]["annotations"][NOTE + first], type=LeaseNote)
    foreign = {NOTE + first: msgspec.json.encode(replace(note, provider="theirs")).decode()}
    rack.server.change(f"{REQUESTS}/{request_name(MODEL, NODE)}", {"metadata": {"annotations": foreign}})
    rack.use(second)
    await given_back(rack, second)
    assert marks(rack) == [first], "an order of another installation may be in progress"

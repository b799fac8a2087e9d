"""A ComposabilityRequest without remaining orders of ours is deleted if it existed only for them."""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.providers.cro.objects import REQUESTS, LeaseNote, build_composability_request, request_name
from autoscaler.providers.cro.provider import NODES
from autoscaler.providers.provider import RefusedError
from tests.contracts.provider import OWNER
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.providers.cro_rig import MODEL, NODE, UNIX_S, Rack, given_back, in_rack, ordered


@pytest.fixture
def rack() -> Rack:
    return Rack()


@in_rack
async def test_own_request_is_deleted_when_no_device_remains(rack: Rack) -> None:
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
async def test_request_released_before_any_device_exists_is_deleted(rack: Rack, seen_s: float) -> None:
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
async def test_request_of_another_owner_without_devices_is_kept(rack: Rack) -> None:
    await rack.another_asks(NODE, size=0)
    await rack.provider().list()
    assert rack.request()["metadata"]["name"] == "theirs"
    assert not [one for one in rack.server.writes if one[0] == "DELETE"]

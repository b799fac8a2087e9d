"""Which device the operator detaches first: that of the released order, and never one that is kept."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from autoscaler.providers.cro.objects import (
    LAST_USED,
    LEASE,
    NOTE,
    REQUESTS,
    RESOURCES,
    VICTIM,
    LeaseNote,
    request_name,
)
from autoscaler.providers.cro.provider import FRESH_S
from autoscaler.providers.kube import AnswerError, Object
from tests.support.fakes.kubernetes.kube_objects import stamp
from tests.support.harness.providers.cro_rig import MODEL, NODE, Rack, given_back, in_rack, ordered


@pytest.fixture
def rack() -> Rack:
    return Rack()


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
async def test_release_after_another_one_failed_detaches_only_its_own_device(rack: Rack) -> None:
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
    theirs = {NOTE + first: msgspec.json.encode(replace(note, provider="theirs")).decode()}
    rack.server.change(f"{REQUESTS}/{request_name(MODEL, NODE)}", {"metadata": {"annotations": theirs}})
    rack.use(second)
    await given_back(rack, second)
    assert marks(rack) == [first], "an order of theirs may be under way"

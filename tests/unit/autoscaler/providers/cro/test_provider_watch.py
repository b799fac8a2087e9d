"""GPUs of a fabric through the composable resource operator: handling of its status, and how fast changes arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from autoscaler.providers.cro.objects import (
    API,
    LAST_USED,
    LEASE,
    REQUESTS,
    RESOURCES,
    find_starved_resource,
    list_stuck_resources,
    read_resource,
    request_name,
)
from autoscaler.providers.cro.provider import NODES, REST_S
from autoscaler.providers.kubernetes_access import AnswerError, Object
from autoscaler.providers.provider import Attended, RefusedError
from autoscaler.providers.runner import LIST_S, Observation, ProviderRunner
from autoscaler.state.capacity import OFFERS_MAX, LeasesSeen
from tests.contracts.provider import order
from tests.support.fakes.kubernetes.cro import NONE_FREE
from tests.support.fakes.kubernetes.kube_objects import HEARD_S
from tests.support.harness.providers.cro_rig import MODEL, NODE, Rack, given_back, in_rack, node, ordered

MANAGER = "failed to process FM scaleup request. FM returned code: '{}', error message: '{}'"
"""As the operator reports errors of the fabric manager."""


@pytest.fixture
def rack() -> Rack:
    return Rack()


def waiting(error: str, on: str = "w77", **status: str) -> Object:
    """A foreign resource that has no device yet, with the reason."""
    return {
        "apiVersion": API, "kind": "ComposableResource", "metadata": {"name": "gpu-of-another", "labels": {}},
        "spec": {"type": "gpu", "model": MODEL, "target_node": on},
        "status": {"state": "Attaching", "error": error, **status},
    }  # fmt: skip


def nodes(rack: Rack, names: list[str]) -> None:
    """Add these nodes."""
    for name in names:
        rack.server.put(f"{NODES}/{name}", node(name))


@in_rack
async def test_offers_are_limited_to_the_nodes_with_most_free_slots(rack: Rack) -> None:
    names = [f"w{at:03}" for at in range(OFFERS_MAX + 44)]
    nodes(rack, names)
    offers = await rack.provider().offers()
    assert len(offers) == OFFERS_MAX
    assert {one.devices_max for one in offers} == {4}, f"{NODE} has one already, and is the first by name only"
    assert [one.name for one in offers] == names[:OFFERS_MAX]
    assert await rack.provider().offers() == offers


@in_rack
async def test_operator_error_on_a_node_stops_offers_for_that_node_only(rack: Rack) -> None:
    rack.cro.pool.clear()  # the operator does not handle this model
    nodes(rack, ["w2", "w77"])
    offers = {one.node: one for one in await rack.provider().offers()}
    rack.server.put(f"{RESOURCES}/gpu-of-another", waiting("no nvidia driver found on node w77"))
    assert {one.node for one in await rack.provider().offers()} == {NODE, "w2"}
    with pytest.raises(RefusedError, match="node w77: gpu-of-another waits for a device and reports an error"):
        await rack.provider().acquire(order(offers["w77"]))
    await rack.provider().acquire(order(offers["w2"]))
    rack.server.change(f"{RESOURCES}/gpu-of-another", {"status": {"error": ""}})
    assert "w77" in {one.node for one in await rack.provider().offers()}


@pytest.mark.parametrize(
    "error",
    [
        NONE_FREE,
        MANAGER.format("E021001", "No GPU is available."),
        MANAGER.format("E021002", "There are not enough free resources in the resource pool"),
        MANAGER.format("E021003", "insufficient resources"),
        "an error occurred with the resource in CM: 'all devices of the pool are exhausted'",
    ],
)
def test_fabric_shortage_error_stops_offers_of_the_device_model(error: str) -> None:
    assert find_starved_resource(list_stuck_resources([read_resource(waiting(error))], MODEL)) is not None
    assert find_starved_resource(list_stuck_resources([read_resource(waiting(error))], "another model")) is None
    assert (
        find_starved_resource(list_stuck_resources([read_resource(waiting(error, device_id="GPU-1"))], MODEL)) is None
    ), "it has one"


@pytest.mark.parametrize(
    "error",
    [
        "no nvidia driver found on node w77",
        "no Pod with label 'app.kubernetes.io/component=nvidia-driver' found on node w77",
        "no free slot is left in node w77",
        "failed to get annotation 'machine.openshift.io/machine' from Node w77, now is ''",
        "failed to process CM get request. http returned status: 404",
        MANAGER.format("E02XXXX", "scaleup method not found"),
        "the attached device called by gpu-1 is in Critical state",
    ],
)
def test_operator_error_without_a_shortage_keeps_offers_of_the_device(error: str) -> None:
    vain = list_stuck_resources([read_resource(waiting(error))], MODEL)
    assert [one.node for one in vain] == ["w77"]
    assert find_starved_resource(vain) is None


# --- latency of updates -----------------------------------------------------------------------------------------------

SOON_S = REST_S + HEARD_S + 0.2
"""From an operator update until it is reported: another update may have been reported just before."""


class Log(list[tuple[float, LeasesSeen]]):
    """Reported lists, with their times."""

    def observe(self, batch: tuple[Observation, ...]) -> None:
        now_s = asyncio.get_running_loop().time()
        super().extend((now_s, one) for one in batch if isinstance(one, LeasesSeen))

    async def until(self, *phases: str) -> None:
        """Wait until the last list has these phases."""
        while not self or [one.phase for one in self[-1][1].leases] != [*phases]:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def listing(rack: Rack) -> AsyncIterator[Log]:
    """The lists that a runner reports for the rack."""
    log = Log()
    task = asyncio.create_task(
        ProviderRunner({"rack": rack.provider()}, log.observe, asyncio.get_running_loop().time).run()
    )
    yield log
    task.cancel()


@asynccontextmanager
async def attended(rack: Rack) -> AsyncIterator[list[float]]:
    """The times at which changes are reported, without those of the initial state."""
    notified_s, provider, now = list[float](), rack.provider(), asyncio.get_running_loop().time
    assert isinstance(provider, Attended)
    task = asyncio.ensure_future(provider.attend(lambda: notified_s.append(now())))
    await asyncio.sleep(3 * REST_S)
    notified_s.clear()
    yield notified_s
    assert not task.done()
    task.cancel()


async def until_online(rack: Rack) -> None:
    """Wait until the operator reports all devices as online."""
    while {one.get("status", {}).get("state") for one in rack.resources()} != {"Online"}:
        await asyncio.sleep(0.01)


@in_rack
async def test_attached_and_removed_devices_trigger_a_prompt_listing(rack: Rack) -> None:
    rack.cro.attach_s = rack.cro.detach_s = 40.0
    async with listing(rack) as log:
        name = await ordered(rack)
        await until_online(rack)
        async with asyncio.timeout(SOON_S):
            await log.until("here")
        await given_back(rack, name)
        while rack.resources():
            await asyncio.sleep(0.01)
        async with asyncio.timeout(SOON_S):
            await log.until()


@in_rack
async def test_annotation_written_by_the_provider_triggers_no_extra_listing(rack: Rack) -> None:
    """Our own annotations must not count as changes, or each listing would trigger the next."""
    async with listing(rack) as log:
        name = await ordered(rack)
        await rack.until_here(name)
        await asyncio.sleep(100.0)
        log.clear()
        before = rack.resources()[0]["metadata"]["annotations"][LAST_USED]
        await asyncio.sleep(20 * LIST_S[1])
        assert len(log) <= 21
        assert rack.resources()[0]["metadata"]["annotations"][LAST_USED] > before


@in_rack
async def test_only_changes_of_own_devices_trigger_rate_limited_notifications(rack: Rack) -> None:
    name = await ordered(rack)
    await rack.until_here(name)
    (mine,) = (f"{RESOURCES}/{one['metadata']['name']}" for one in rack.resources())
    async with attended(rack) as notified_s:
        await rack.another_asks("w2")
        rack.server.put(f"{RESOURCES}/theirs", waiting("something is wrong", on=NODE))
        labelled = waiting("something is wrong") | {"metadata": {"labels": {LEASE: "of-another-model"}}}
        labelled["spec"] = {**labelled["spec"], "model": "another"}
        rack.server.put(f"{RESOURCES}/of-another-model", labelled)
        await asyncio.sleep(10.0)
        assert not notified_s
        for number in range(100):
            rack.server.change(mine, {"status": {"error": f"the target gpu shows warning {number}"}})
            await asyncio.sleep(0.1)
        assert 10.0 / REST_S - 2 <= len(notified_s) <= 10.0 / REST_S + 2
        await asyncio.sleep(2 * REST_S)
        notified_s.clear()
        rack.server.change(f"{REQUESTS}/{request_name(MODEL, NODE)}", {"spec": {"resource": {"size": 0}}})
        await asyncio.sleep(2 * HEARD_S)
        assert notified_s, "another client reduced our request"


@in_rack
async def test_changes_missed_during_an_api_outage_are_reported_afterwards(rack: Rack) -> None:
    rack.cro.attach_s = 30.0
    name = await ordered(rack)
    await asyncio.sleep(1.0)
    await rack.provider().list()
    rack.cro.server = rack.allowed()
    async with attended(rack) as notified_s:
        rack.server.away = True
        await until_online(rack)
        await asyncio.sleep(600.0)
        assert not notified_s
        rack.server.away = False
        await asyncio.sleep(2 * HEARD_S)
        assert notified_s
        assert [(one.name, one.phase) for one in await rack.provider().list()] == [(name, "here")]


@in_rack
async def test_forbidden_watch_falls_back_to_periodic_listing(rack: Rack) -> None:
    rack.server.refused["WATCH"] = AnswerError(403, "Forbidden", "cannot watch")
    rack.cro.attach_s = 40.0
    async with listing(rack) as log:
        await ordered(rack)
        await until_online(rack)
        async with asyncio.timeout(LIST_S[1] + 1.0):
            await log.until("here")

"""Fabric devices that node agents should have, and how agent reports affect a detach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from autoscaler.agent_contract import NODE_EXPIRY_S, FabricReport, FabricWant, NodeReport, NodeWants
from autoscaler.capacity import agent_device_requests
from autoscaler.capacity.agent_device_requests import UNHEARD
from autoscaler.planner.plan import plan
from autoscaler.server import agents as nodetelling
from autoscaler.server.agents import BLANK, NodeWantsServer
from autoscaler.spec.capacity import ProviderSettings, Redfish
from autoscaler.spec.settings import Settings
from autoscaler.state.actions import Acted, ReleaseLease
from autoscaler.state.capacity import AcquireOrder, LeaseId, LeasesSeen, ReleaseOrder
from autoscaler.state.events import NodeReported
from autoscaler.state.world import NodeId, World
from tests.support.builders.capacity import A, acted, arrived, listed, observe, offer, orders, releases, shown, surge
from tests.support.builders.worlds import T0
from tests.support.fakes.redfish import FakeFabric
from tests.support.harness.manual_loop import SteppedLoop
from tests.support.harness.providers.redfish_rig import FabricRig

GPU = "GPU-aaaaaaaa-0000-0000-0000-000000000001"


def settings(*, agents: bool = True) -> Settings:
    """Settings with a Redfish fabric."""
    fabric = Redfish(url="https://fabric", systems={"w1": "/redfish/v1/Systems/1"}, agents=agents)
    return Settings(capacity=(ProviderSettings(name="rack", redfish=fabric),))


def attached(*, agents: bool = True) -> World:
    """The provider reports the device as attached, and no slice shows it yet."""
    after, _ = acted(surge(offer(), settings=settings(agents=agents)))
    return shown(after, T0 + 5, phase="here", committed=True, node="w1", device_ids=(f"w1/{GPU}",))


def given_back(of: World, now_s: float = T0 + 50) -> World:
    (id,) = of.capacity.leases
    order = ReleaseOrder(id=id, epoch=1)
    return observe(of, Acted(action=ReleaseLease(order=order, reason="a test")), now_s=now_s)


def heard(of: World, now_s: float, *reports: FabricReport, attaches: bool = True, sequence: int = 1) -> World:
    """The state after a report of the node agent."""
    report = NodeReport(node="w1", boot="b", sequence=sequence, attaches=attaches, fabric=reports)
    return observe(of, NodeReported(report=report), now_s=now_s)


def test_agent_is_ordered_to_add_undetected_and_remove_released_devices() -> None:
    assert agent_device_requests.build_fabric_wants(attached()) == {NodeId("w1"): (FabricWant(device=GPU),)}
    assert agent_device_requests.build_fabric_wants(arrived(attached(), T0 + 30)) == {}, "it is seen"
    leaving = given_back(attached())
    assert agent_device_requests.build_fabric_wants(leaving) == {NodeId("w1"): (FabricWant(device=GPU, leave=True),)}
    removed = observe(leaving, LeasesSeen(provider="rack", leases=(), began_s=T0 + 60), now_s=T0 + 60)
    assert agent_device_requests.build_fabric_wants(removed) == {}


def test_node_agents_get_no_fabric_orders_if_the_fabric_disables_agents() -> None:
    assert agent_device_requests.build_fabric_wants(attached(agents=False)) == {}


async def test_node_stream_sends_a_fabric_device_after_its_provider_attached_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodetelling, "HEARTBEAT_S", 0.01)
    before, _ = acted(surge(offer(), settings=settings()))
    stepped = SteppedLoop(before)
    lines = NodeWantsServer(stepped.loop).messages(NodeId("w1"))
    async with asyncio.timeout(60):
        first = await _next_wants(lines)
        assert first.fabric == ()
        here = listed(before, phase="here", committed=True, node="w1", device_ids=(f"w1/{GPU}",))
        stepped.step(LeasesSeen(provider="rack", leases=here, began_s=T0 + 5))
        assert (await _next_wants(lines)).fabric == (FabricWant(device=GPU),)
    await lines.aclose()


async def _next_wants(lines: AsyncGenerator[bytes]) -> NodeWants:
    async for line in lines:
        if line != BLANK:
            return msgspec.json.decode(line, type=NodeWants)
    raise AssertionError


def test_detach_is_blocked_until_the_node_agent_releases_the_device() -> None:
    leaving = given_back(attached())
    now_s = T0 + 60
    for expected, why in (
        ((), UNHEARD),
        ((FabricReport(device=GPU, done=True),), UNHEARD),
        ((FabricReport(device=GPU, leave=True, says="process 7 (sh) has it open"),), "its node's agent: process 7"),
        ((FabricReport(device=GPU, leave=True, done=True),), ""),
    ):
        words = agent_device_requests.explain_detach_block(heard(leaving, now_s, *expected), "w1", [GPU], now_s)
        assert words.startswith(why)
        assert bool(words) is bool(why)
    done = heard(leaving, now_s, FabricReport(device=GPU, leave=True, done=True))
    assert agent_device_requests.explain_detach_block(done, "w1", [GPU, "GPU-other"], now_s) == UNHEARD, "all of them"
    assert agent_device_requests.explain_detach_block(done, "w1", [GPU], now_s + NODE_EXPIRY_S) == UNHEARD, (
        "that was long ago"
    )
    silent = heard(leaving, now_s, FabricReport(device=GPU, leave=True, done=True), attaches=False)
    assert agent_device_requests.explain_detach_block(silent, "w1", [GPU], now_s) == UNHEARD


def test_detach_waits_for_the_agent_report_unless_the_node_is_gone() -> None:
    leaving = given_back(attached())
    assert leaving.nodes.agents == {}
    assert agent_device_requests.explain_detach_block(leaving, "w1", [GPU], T0 + 60) == UNHEARD
    assert agent_device_requests.explain_detach_block(leaving, "w9", [GPU], T0 + 60) == ""
    assert agent_device_requests.explain_detach_block(leaving, "w1", [""], T0 + 60) == "", "no driver has a name for it"


def test_attached_device_unseen_by_the_agent_is_released_and_not_reordered() -> None:
    unseen = FabricReport(device=GPU, failed=True, says="the node's driver does not show it")
    after = heard(attached(), T0 + 9.0, unseen)
    (back,) = releases(plan(after, T0 + 9.0).actions)
    assert back.reason == f"it failed: {GPU}: the node's driver does not show it"
    assert not back.order.uncommitted, "it has come, and goes all the same"
    after, done = acted(after, T0 + 9.0)
    assert not orders(done), "not the same once more"
    (barred,) = after.capacity.barred.values()
    assert barred.why == back.reason
    assert agent_device_requests.build_fabric_wants(after) == {NodeId("w1"): (FabricWant(device=GPU, leave=True),)}


def test_agent_failure_report_is_ignored_if_agents_off_or_device_unknown() -> None:
    unseen = FabricReport(device=GPU, failed=True, says="no")
    for at in (
        heard(attached(agents=False), T0 + 9.0, unseen),
        heard(attached(), T0 + 9.0, unseen.__class__(device="x")),
    ):
        assert not releases(plan(at, T0 + 9.0).actions)


@pytest.mark.standard
def test_fabric_detaches_only_devices_released_by_the_agent() -> None:
    fabric = FakeFabric()
    rig = FabricRig(fabric)
    world = [heard(given_back(attached()), T0)]

    async def in_use(node: str, uuids: tuple[str, ...]) -> str:
        """The callback that `pilotlight.models.capacity_providers` passes."""
        return agent_device_requests.explain_detach_block(world[0], node, uuids, T0)

    async def scenario() -> None:
        rig.in_use = in_use  # type: ignore[method-assign]
        provider = rig.provider()
        (free, *_) = [one for one in await provider.offers() if one.node == "w1"]
        id = LeaseId("rack", "pilotlight-a-1")
        await provider.acquire(AcquireOrder(id=id, offer=free, devices=1, owner=A.name, epoch=1, due_s=9.0))
        await rig.until_here(id.name)
        (there,) = [one for one in await provider.list() if one.name == id.name]
        uuid = there.device_ids[0].rpartition("/")[2]
        await provider.release(ReleaseOrder(id=id, epoch=1))
        (still,) = [one for one in await provider.list() if one.name == id.name]
        assert still.phase == "here"
        world[0] = heard(world[0], T0, FabricReport(device=uuid, leave=True, done=True), sequence=2)
        await provider.release(ReleaseOrder(id=id, epoch=1))
        await rig.until_gone(id.name)

    rig.run(scenario())

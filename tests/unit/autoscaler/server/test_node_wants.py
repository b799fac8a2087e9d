"""The stream of the desired state of a node: sent by the leader only, complete, and at once when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import msgspec
import pytest
from msgspec.structs import replace
from pytest_aiohttp import AiohttpClient

from autoscaler.agent_contract import ImageWant, NodeReport, NodeWants
from autoscaler.contract import ModelName
from autoscaler.controller.loop import Listener, Loop, LoopStep
from autoscaler.server import agents
from autoscaler.server.agents import BLANK, NodeWantsServer
from autoscaler.server.gateways import ContractServer
from autoscaler.spec.model import Gpu, Model, ModelSpec, ReplicaRange
from autoscaler.spec.quantity import BytesOrAuto
from autoscaler.spec.settings import Settings, Weights
from autoscaler.state.actions import Plan
from autoscaler.state.events import DocumentsSeen, ModelWoken, Tick
from autoscaler.state.images import NodeImages, make_image
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NodeAgentStatus, NodeId, World
from autoscaler.weights.inspection import SILENT_S
from tests.support.builders.worlds import T0, device, replace_fields, replica, world
from tests.support.harness.faults.fault_injection import concerns, inject
from tests.support.harness.manual_loop import SteppedLoop
from tests.unit.autoscaler.weights.test_image_prepull import ENGINE, at, needs
from tests.unit.autoscaler.weights.test_image_prepull import starting as starts

KNOWN = Gpu(memory_bytes=BytesOrAuto(1 << 30))
"""Known memory, so no agent needs to inspect its header."""
ADA = Model(name=ModelName("ada"), spec=ModelSpec(engine="llama.cpp", artifact="oci://r.io/a:1", gpu=KNOWN))


def starting() -> World:
    return world([ADA], [device("g1", 80, "n1")], [replica(ADA, "a1", ("g1",), S.STARTING)])


def read(line: bytes) -> NodeWants:
    return msgspec.json.decode(line, type=NodeWants)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "HEARTBEAT_S", 0.01)


async def test_weights_requests_are_sent_on_connect_and_then_only_on_change() -> None:
    stepped = SteppedLoop(starting())
    lines = NodeWantsServer(stepped.loop).messages(NodeId("n1"))
    async with asyncio.timeout(60):
        first = read(await anext(lines))
        assert [one.replicas for one in first.wants] == [("a1",)]
        assert await anext(lines) == BLANK
        settings = Settings(weights=Weights(ca_file="/ca.pem"))
        stepped.step(DocumentsSeen(models=(ADA,), settings=settings))
        after = read(await anext(lines))
        assert (after.wants, after.weights.ca_file) == (first.wants, "/ca.pem")
        stepped.step(DocumentsSeen(settings=settings))
        assert read(await anext(lines)) == replace(after, wants=()), "its Model was deleted"
    await lines.aclose()


async def test_unknown_artifact_is_inspected_by_one_connected_agent() -> None:
    unknown = replace(ADA, spec=replace(ADA.spec, gpu=Gpu()))
    stepped = SteppedLoop(world([unknown], [device("g1", 80, "n1")]))
    telling = NodeWantsServer(stepped.loop)
    async with asyncio.timeout(60):
        first, other = telling.messages(NodeId("n1")), telling.messages(NodeId("n2"))
        assert [one.look for one in read(await anext(first)).wants] == [True]
        assert read(await anext(other)).wants == (), "one is enough"
        await first.aclose()
        stepped.step(Tick())
        assert [one.look for one in read(await next_line(other)).wants] == [True], "the first agent has disconnected"
        third = telling.messages(NodeId("n3"))
        assert read(await anext(third)).wants == ()
        stepped.step(Tick())  # either of the two does it from now on
        by_third = bool(telling._wants.get(NodeId("n3")))
        removed, left = (third, other) if by_third else (other, third)
        await removed.aclose()
        stepped.step(Tick())
        requests = telling._wants[NodeId("n2" if by_third else "n3")].wants
        assert [one.look for one in requests] == [True], "a remaining agent does it"
    await left.aclose()


async def test_artifact_is_inspected_by_another_agent_if_the_first_is_silent() -> None:
    unknown = replace(ADA, spec=replace(ADA.spec, gpu=Gpu()))
    stepped = SteppedLoop(world([unknown], [device("g1", 80, "n1")]))
    telling = NodeWantsServer(stepped.loop)
    async with asyncio.timeout(60):
        lines = {node: telling.messages(NodeId(node)) for node in ("n1", "n2")}
        for one in lines.values():
            await anext(one)
        stepped.step(Tick())
        (first,) = telling._wants
        stepped.now_s += SILENT_S
        stepped.step(Tick())
        (other,) = telling._wants
        assert {first, other} == {"n1", "n2"}
        for one in lines.values():
            await one.aclose()


BOB = replace(ADA, name=ModelName("bob"), spec=replace(ADA.spec, artifact="oci://r.io/b:1"))
CAROL = replace(ADA, name=ModelName("carol"), spec=replace(ADA.spec, artifact="oci://r.io/c:1", gpu=Gpu()))
"""Its memory is unknown, so that an agent inspects its artifact."""
POINTS = (
    "autoscaler.weights.desired:build_weights_requests",
    "autoscaler.weights.image_prepull:build_placement_request",
    "autoscaler.weights.inspection:should_read_header",
)
"""Functions of each part of the wants: weights, images and inspections."""


@pytest.mark.parametrize("point", POINTS)
async def test_exception_for_a_model_drops_only_that_model_from_desired_state(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node keeps the copies that pods of the faulty Model use, and agents continue inspections."""
    faulty = replace(ADA, spec=replace(ADA.spec, image="engine:1", replicas=ReplicaRange(min=2, max=2)))
    devices = [device("g1", 80, "n1"), device("g2", 80, "n2")]
    uses = replica(faulty, "a0", ("g1",), weights=("copies/a",))
    stepped = SteppedLoop(world([faulty, BOB, CAROL], devices, [uses], agents=agents_of("n1", "n2")))
    telling = NodeWantsServer(stepped.loop)
    connected = [telling.messages(NodeId(node)) for node in ("n1", "n2")]
    for lines in connected:
        await anext(lines)
    stepped.step(Tick())
    turns = telling._lookers._turns
    assert len(turns) == 1
    faults = inject(monkeypatch, point, concerns("ada"))
    begun = [replica(faulty, "a1", ("g1",), S.STARTING), replica(BOB, "b1", ("g2",), S.STARTING)]
    at = stepped.loop.world
    stepped.loop.world = world(at.models.values(), devices, [uses, *begun], agents=at.nodes.agents)
    stepped.now_s += 1.0
    after = stepped.step(DocumentsSeen(models=(faulty, BOB, CAROL), settings=Settings(lease_seconds=30)))
    assert (set(after.learned.faults), after.degraded) == ({"ada"}, "")
    assert faults.reported == [("ada", "wants")]
    assert weights_of(telling) == {"oci://r.io/b:1", "oci://r.io/c:1"}
    assert telling._wants[NodeId("n1")].held == ("copies/a",)
    assert telling._lookers._turns == turns, "the search for the faulty Model changes no assignment"
    stepped.step(DocumentsSeen(models=(faulty, BOB, CAROL), settings=Settings(lease_seconds=40)))
    assert len(faults.reported) == 1
    assert weights_of(telling) == {"oci://r.io/b:1", "oci://r.io/c:1"}
    faults.stop()
    stepped.step(ModelWoken(model=faulty.name))
    assert weights_of(telling) == {"oci://r.io/a:1", "oci://r.io/b:1", "oci://r.io/c:1"}
    for lines in connected:
        await lines.aclose()


async def test_new_agent_gets_desired_state_of_other_models_if_a_model_is_faulty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inject(monkeypatch, POINTS[0], concerns("ada"))
    begun = [replica(ADA, "a1", ("g1",), S.STARTING), replica(BOB, "b1", ("g1",), S.STARTING)]
    stepped = SteppedLoop(world([ADA, BOB], [device("g1", 80, "n1")], begun))
    lines = NodeWantsServer(stepped.loop).messages(NodeId("n1"))
    assert [one.artifact for one in read(await anext(lines)).wants] == ["oci://r.io/b:1"]
    assert set(stepped.loop.world.learned.faults) == {"ada"}
    await lines.aclose()


async def test_desired_state_is_recomputed_after_an_error_not_tied_to_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepped = SteppedLoop(world([ADA], [device("g1", 80, "n1")]))
    telling = NodeWantsServer(stepped.loop)
    lines = telling.messages(NodeId("n1"))
    await anext(lines)
    faults = inject(monkeypatch, "autoscaler.server.agents:build_node_wants", lambda *_: True)
    stepped.loop.world = starting()
    after = stepped.step(DocumentsSeen(models=(ADA,), settings=Settings(lease_seconds=30)))
    assert "InjectedError" in after.degraded
    assert after.learned.faults == {}
    faults.stop()
    after = stepped.step(Tick())
    assert (after.degraded, weights_of(telling)) == ("", {"oci://r.io/a:1"})
    await lines.aclose()


def agents_of(*nodes: str) -> dict[str, NodeAgentStatus]:
    """Agents that report nothing but themselves."""
    reports = (NodeReport(node=node, boot="b", sequence=1, brings=True) for node in nodes)
    return {one.node: NodeAgentStatus(report=one, seen_s=T0) for one in reports}


def weights_of(telling: NodeWantsServer) -> set[str]:
    """The artifacts that any node is requested to pull or inspect."""
    return {one.artifact for wants in telling._wants.values() for one in wants.wants}


async def next_line(lines: AsyncGenerator[bytes]) -> bytes:
    """The next non-empty line."""
    while not (line := (await anext(lines)).strip()):
        pass
    return line


@pytest.mark.parametrize("not_yet", [{"leads": False}, {"synced": False}, {"documented": False}])
async def test_node_stream_sends_blank_lines_until_the_leader_is_ready(not_yet: dict[str, bool]) -> None:
    lines = NodeWantsServer(SteppedLoop(replace_fields(starting(), **not_yet)).loop).messages(NodeId("n1"))
    async with asyncio.timeout(60):
        assert [await anext(lines), await anext(lines)] == [BLANK, BLANK]
    await lines.aclose()


@pytest.mark.standard
async def test_node_stream_without_a_node_name_is_rejected_with_400(aiohttp_client: AiohttpClient) -> None:
    client = await aiohttp_client(ContractServer(SteppedLoop(starting()).loop).application())
    assert (await client.get("/v1/wants")).status == 400
    async with client.get("/v1/wants?node=n2") as answer, asyncio.timeout(60):
        assert read(await answer.content.readline()) == NodeWants(epoch=1), "nothing is wanted there"


class Watched:
    """A loop that takes no decisions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = Plan()
        self.listeners: list[Listener] = []

    def becomes(self, world: World) -> None:
        before, self.world = self.world, world
        for listener in self.listeners:
            listener(LoopStep(before, world, Plan(), (), (), T0, T0, T0))


def images(line: bytes) -> tuple[ImageWant, ...]:
    assert line != BLANK, "the agent already has this line"
    return msgspec.json.decode(line, type=NodeWants).images


async def test_node_stream_sends_wanted_images_until_they_are_present() -> None:
    a = needs()
    began = replace_fields(at([a], [starts(a, 3)], agents=[3]), documented=True)
    loop = Watched(replace(began, replicas={}, by_model={}, by_slice={}))
    telling = NodeWantsServer(cast("Loop", loop))
    lines = telling.messages(NodeId("n3"))
    assert images(await anext(lines)) == ()
    loop.becomes(began)
    assert images(await anext(lines)) == (ENGINE,)
    has = {"n3": NodeImages((), (make_image((ENGINE.image,)),))}
    loop.becomes(replace_fields(began, images=has))
    assert images(await anext(lines)) == ()
    loop.becomes(began)
    assert images(await anext(lines)) == (ENGINE,)
    loop.becomes(replace_fields(began, agents={}))
    assert images(await anext(lines)) == (), "no agent is known there any more"
    await lines.aclose()


async def test_node_stream_sends_wanted_images_once_the_node_agent_is_known() -> None:
    a = needs()
    began = replace_fields(at([a], [starts(a, 3)], agents=[3, 4]), documented=True)
    loop = Watched(replace_fields(began, agents={"n4": began.nodes.agents["n4"]}))
    lines = NodeWantsServer(cast("Loop", loop)).messages(NodeId("n3"))
    assert images(await anext(lines)) == (), "no agent is known there"
    loop.becomes(replace_fields(began, agents={"n3": began.nodes.agents["n3"]}))
    assert images(await anext(lines)) == (ENGINE,)
    await lines.aclose()

"""Peers that an agent is given before a pull: nodes that have the weights or will have them, limited in number."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec.structs import replace
from pytest_aiohttp import AiohttpClient

from artifacts.peers import selection
from autoscaler.agent_contract import NODE_EXPIRY_S, NodeReport, NodeWant, NodeWants, WeightsReport
from autoscaler.fold.fold import fold
from autoscaler.server.gateways import ContractServer
from autoscaler.state.events import NodeReported
from autoscaler.state.world import NodeId, World
from autoscaler.weights.peers import KEPT_S, PEERS_MAX, NodePeer, NodePeers, PeerCache, list_peers, select_peers
from tests.support.builders.worlds import T0, world
from tests.support.harness.manual_loop import SteppedLoop

ADA = "oci://r.io/a:1"
DIGEST = "sha256:" + "a" * 64


def report(node: str, **fields: object) -> NodeReport:
    return NodeReport(node=node, boot="b", sequence=1, brings=True, peer=f"https://{node}:1", **fields)  # type: ignore[arg-type]


def with_reports(*reports: NodeReport, now_s: float = T0) -> World:
    return fold(world(), [NodeReported(report=one) for one in reports], now_s)[0]


def names(of: tuple[NodePeer, ...]) -> list[str]:
    return [one.node for one in of]


def test_peers_with_the_artifact_come_before_fetching_peers() -> None:
    holds = WeightsReport(artifact=ADA, digest=DIGEST, folder="copies/x/files")
    there = with_reports(
        report("n1", weights=(WeightsReport(artifact=ADA),)),
        report("n2"),
        report("n3", copies=(ADA,)),
        report("n4", copies=("oci://r.io/b:1",)),
        report("n5", weights=(holds,)),
        replace(report("n6", copies=(ADA,)), peer=""),
    )
    requests = {NodeId("n2"): NodeWants(epoch=1, wants=(NodeWant(artifact=ADA),))}
    found = list_peers(there, requests, ADA, T0)
    assert (names(found.whole), names(found.coming)) == (["n3", "n5"], ["n1", "n2"])
    assert [one.digest for one in found.whole] == ["", DIGEST]
    assert set(names(select_peers(found, NodeId("n3")))) == {"n5", "n1", "n2"}, "a node is not its own peer"
    assert select_peers(found, NodeId("n9"))[:2] != found.coming, "who has it is first"


def test_agent_that_only_inspects_an_artifact_is_not_a_peer() -> None:
    there = with_reports(report("n1", weights=(WeightsReport(artifact=ADA, digest=DIGEST, look=True),)), report("n2"))
    requests = {NodeId("n2"): NodeWants(epoch=1, wants=(NodeWant(artifact=ADA, look=True),))}
    assert list_peers(there, requests, ADA, T0) == ((), ())


def test_silent_agent_is_not_listed_as_a_peer() -> None:
    there = with_reports(report("n1", copies=(ADA,)))
    assert names(list_peers(there, {}, ADA, T0 + NODE_EXPIRY_S - 1).whole) == ["n1"]
    assert list_peers(there, {}, ADA, T0 + NODE_EXPIRY_S).whole == ()


def test_peers_are_spread_over_many_agents_and_limited_per_request() -> None:
    found = list_peers(with_reports(*(report(f"n{number}", copies=(ADA,)) for number in range(200))), {}, ADA, T0)
    answers = [names(select_peers(found, NodeId(f"n{number}"))) for number in range(200)]
    assert {len(one) for one in answers} == {PEERS_MAX} == {selection.PEERS_MAX}
    assert {len(set(one)) for one in answers} == {PEERS_MAX}
    assert len({name for one in answers for name in one}) > 150
    size = len(msgspec.json.encode(NodePeers(peers=select_peers(found, NodeId("x")))))
    assert size < 4096


def test_peer_list_is_cached_for_a_short_time() -> None:
    asked, before, after = (
        PeerCache(),
        with_reports(report("n1", copies=(ADA,))),
        with_reports(report("n2", copies=(ADA,))),
    )
    for now_s, there, expected in (
        (T0, before, ["n1"]),
        (T0 + KEPT_S / 2, after, ["n1"]),
        (T0 + KEPT_S, after, ["n2"]),
    ):
        assert names(asked.peers(there, {}, NodeId("x"), ADA, now_s).peers) == expected


@pytest.mark.standard
async def test_peers_route_returns_the_agents_that_have_the_artifact(aiohttp_client: AiohttpClient) -> None:
    stepped = SteppedLoop(world(), asyncio.get_running_loop().time())
    client = await aiohttp_client(ContractServer(stepped.loop).application())
    body = msgspec.json.encode(report("n1", copies=(ADA,)))
    assert (await client.post("/v1/node", data=body)).status == 200
    stepped.step()
    async with client.get("/v1/peers", params={"node": "n2", "artifact": ADA}) as answer:
        answered = msgspec.json.decode(await answer.read(), type=NodePeers)
    assert answered.peers == (NodePeer(node="n1", url="https://n1:1"),)
    assert (await client.get("/v1/peers?node=n2")).status == 400

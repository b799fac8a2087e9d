"""Selects the agents that may have an artifact, so that a node tries them before the registry. Pure.

Agents with a complete copy come first, then agents that pull it or will pull it. A response names at most PEERS_MAX
agents, and different ones for each node, so that it stays small and no node serves all others. It grants no access:
agents authenticate each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoscaler.agent_contract import NodeReport, NodeWants
from autoscaler.contract import Message
from autoscaler.queries.agent_reports import is_report_fresh
from autoscaler.state.world import Copy, NodeId, World

PEERS_MAX = 16
"""The maximum number of peers in one response, and of peers that one pull tries (`artifacts.peers.selection`)."""
KEPT_S = 1.0
"""Maximum age of a cached list. To build a list, all nodes are examined, and nodes that start together request lists at
the same time.
"""
KEPT_MAX = 64


class NodePeer(Message, frozen=True):
    """One agent that may have the artifact."""

    node: str
    url: str
    digest: str = ""
    """The digest that it reported for the artifact. Empty: it reported none, or its copy is incomplete."""


class NodePeers(Message, frozen=True):
    """The response to an agent."""

    peers: tuple[NodePeer, ...] = ()


class Having(NamedTuple):
    """Peers for one artifact, in the order of nodes."""

    whole: tuple[NodePeer, ...]
    coming: tuple[NodePeer, ...]


class PeerCache:
    """Answers agents from lists that are cached for KEPT_S."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Having]] = {}

    def peers(
        self, world: World, wants: Mapping[NodeId, NodeWants], node: NodeId, artifact: str, now_s: float
    ) -> NodePeers:
        """Return peers for the agent of `node`. `wants`: the wants of the nodes."""
        kept = self._kept.get(artifact)
        if kept is None or now_s >= kept[0] + KEPT_S:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            kept = self._kept[artifact] = (now_s, list_peers(world, wants, artifact, now_s))
        return NodePeers(peers=select_peers(kept[1], node))


def list_peers(world: World, wants: Mapping[NodeId, NodeWants], artifact: str, now_s: float) -> Having:
    """Return all agents that share weights and have this artifact, or will have it."""
    whole, coming = list[NodePeer](), list[NodePeer]()
    for name in sorted(world.nodes.agents):
        report = world.nodes.agents[name].report
        if not report.peer or not is_report_fresh(world.nodes.agents[name], now_s):
            continue
        digest, pulls = _digest(report, artifact)
        wanted = wants[NodeId(name)].wants if NodeId(name) in wants else ()
        if digest or Copy(artifact=artifact, node=NodeId(name)) in world.nodes.copies:
            whole.append(NodePeer(node=name, url=report.peer, digest=digest))
        elif pulls or any(one.artifact == artifact and not one.look for one in wanted):
            coming.append(NodePeer(node=name, url=report.peer))
    return Having(tuple(whole), tuple(coming))


def select_peers(of: Having, node: NodeId) -> tuple[NodePeer, ...]:
    """Return at most PEERS_MAX peers other than `node`."""
    first = _some(of.whole, node, PEERS_MAX)
    return first + _some(of.coming, node, PEERS_MAX - len(first))


def _some(of: Sequence[NodePeer], node: NodeId, count: int) -> tuple[NodePeer, ...]:
    """Return consecutive peers, from a position that depends on the node."""
    begin = zlib.crc32(node.encode())
    some = [of[(begin + number) % len(of)] for number in range(min(count + 1, len(of)))]
    return tuple(one for one in some if one.node != node)[:count]


def _digest(report: NodeReport, artifact: str) -> tuple[str, bool]:
    """Return the digest reported for the artifact, and whether the agent pulls it. An inspection does not count."""
    pulls = [one for one in report.weights if one.artifact == artifact and not one.look]
    return next((one.digest for one in pulls if one.digest), ""), bool(pulls)

"""Selects the agents that may have an artifact, to be asked before its registry. Pure.

Agents that have all of it come first, then those that pull it or are to. An answer names at most PEERS_MAX of them, and
different ones to each node, so that it stays small and no node serves all. It grants no access: what agents give each
other, and to whom, is between them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoscaler.agent_contract import NodeWants
from autoscaler.contract import Message, NodeReport
from autoscaler.queries.device_health import is_report_fresh
from autoscaler.state.world import Copy, NodeId, World

PEERS_MAX = 16
"""Peers named in one answer; as many are asked by one pull (`artifacts.peers.selection`)."""
KEPT_S = 1.0
"""Maximum age of a cached list: nodes that start together ask together, and each list examines all nodes."""
KEPT_MAX = 64


class NodePeer(Message, frozen=True):
    """One agent that may have the artifact."""

    node: str
    url: str
    digest: str = ""
    """The digest that it reported under that name; empty: it reported none, or has not all of it."""


class NodePeers(Message, frozen=True):
    """The answer to an agent."""

    peers: tuple[NodePeer, ...] = ()


class Having(NamedTuple):
    """Peers for one artifact, in order of nodes."""

    whole: tuple[NodePeer, ...]
    coming: tuple[NodePeer, ...]


class PeerCache:
    """Answers agents, from lists that are cached for KEPT_S."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Having]] = {}

    def peers(
        self, world: World, wants: Mapping[NodeId, NodeWants], node: NodeId, artifact: str, now_s: float
    ) -> NodePeers:
        """Peers for the agent of `node`. `wants`: what nodes are to have."""
        kept = self._kept.get(artifact)
        if kept is None or now_s >= kept[0] + KEPT_S:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            kept = self._kept[artifact] = (now_s, list_peers(world, wants, artifact, now_s))
        return NodePeers(peers=select_peers(kept[1], node))


def list_peers(world: World, wants: Mapping[NodeId, NodeWants], artifact: str, now_s: float) -> Having:
    """All agents that share weights and have this artifact, or are to."""
    whole, coming = list[NodePeer](), list[NodePeer]()
    for name in sorted(world.nodes.agents):
        report = world.nodes.agents[name].report
        if not report.peer or not is_report_fresh(world.nodes.agents[name], now_s):
            continue
        digest, told = _digest(report, artifact)
        if digest or Copy(artifact=artifact, node=NodeId(name)) in world.nodes.copies:
            whole.append(NodePeer(node=name, url=report.peer, digest=digest))
        elif told or _is_wanted(wants.get(NodeId(name)), artifact):
            coming.append(NodePeer(node=name, url=report.peer))
    return Having(tuple(whole), tuple(coming))


def select_peers(of: Having, node: NodeId) -> tuple[NodePeer, ...]:
    """Peers other than `node`, PEERS_MAX at most."""
    first = _some(of.whole, node, PEERS_MAX)
    return first + _some(of.coming, node, PEERS_MAX - len(first))


def _some(of: Sequence[NodePeer], node: NodeId, count: int) -> tuple[NodePeer, ...]:
    """Consecutive peers, from a starting point that differs by node."""
    begin = zlib.crc32(node.encode())
    some = [of[(begin + number) % len(of)] for number in range(min(count + 1, len(of)))]
    return tuple(one for one in some if one.node != node)[:count]


def _digest(report: NodeReport, artifact: str) -> tuple[str, bool]:
    """(Digest reported under that name; whether it pulls it.) An agent that only inspected it has none of it."""
    told = [one for one in report.weights if one.artifact == artifact and not one.look]
    return next((one.digest for one in told if one.digest), ""), bool(told)


def _is_wanted(wants: NodeWants | None, artifact: str) -> bool:
    return wants is not None and any(one.artifact == artifact and not one.look for one in wants.wants)

"""Assigns artifacts that no agent has inspected: one agent for each, and another if it is silent. Pure.

Decides who inspects, and for how long. Guarantees: all agents take part; a connected agent that reports nothing about
its task is replaced within SILENT_S, and one that does not find out within SLOW_S, so that one node's trouble (its
registry unreachable, an inspection that hangs) costs a model no more than that. Time is an argument.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from math import inf
from typing import NamedTuple

from autoscaler.agent_contract import WeightsRequest, read_weights_request
from autoscaler.contract import WeightsReport
from autoscaler.queries.device_health import is_report_fresh
from autoscaler.state.world import NodeId, World
from autoscaler.weights.desired import build_wishes, should_read_header

SILENT_S = 6.0
"""An agent reports what it does within one or two seconds; `autoscaler.planner.reconcile` waits for two agents."""
SLOW_S = 60.0
"""As long as an agent waits between two tries of its own."""


class _Turn(NamedTuple):
    node: NodeId
    since_s: float | None
    """None before any step."""
    tried: frozenset[NodeId] = frozenset()
    """Nodes that had it before, and did not find out."""


class InspectionAssigner:
    """Assignments by one process to which agents connect."""

    def __init__(self) -> None:
        self._turns: dict[WeightsRequest, _Turn] = {}
        self.next_s = inf
        """When time alone changes an assignment."""

    def looks(
        self, world: World, agents: Collection[NodeId], now_s: float | None
    ) -> Iterator[tuple[NodeId, WeightsRequest]]:
        """The assignments now. `agents`: those connected; `now_s`: None if no step has set it yet."""
        before, self._turns, self.next_s = self._turns, {}, inf
        live = frozenset(agents if now_s is None else (one for one in agents if _lives(world, one, now_s)))
        for wish in sorted(list_uninspected_artifacts(world)) if agents else ():
            turn = self._turns[wish] = _turn(world, before.get(wish), wish, live or frozenset(agents), now_s)
            if turn.since_s is not None:
                self.next_s = min(self.next_s, _ends_s(world, turn, wish))
            yield turn.node, wish


def list_uninspected_artifacts(world: World) -> set[WeightsRequest]:
    """Artifacts that no agent has inspected, and one has to."""
    return {
        look
        for model in world.models.values()
        for wish in build_wishes(world, model).values()
        if not _known(world, look := wish._replace(look=True), image=wish.look, header=should_read_header(model))
    }


def _known(world: World, look: WeightsRequest, *, image: bool, header: bool) -> bool:
    """Whether all that is needed is known.

    `image`: that it is an image (if not, no pod starts with it, so that only an inspection would notice a new push);
    `header`: what its header states.
    """
    said = world.learned.looked.get(look) or WeightsReport(artifact=look.artifact)
    return not (image and said.image is None) and (not header or bool(said.header or said.no_header))


def _turn(
    world: World, before: _Turn | None, wish: WeightsRequest, live: frozenset[NodeId], now_s: float | None
) -> _Turn:
    tried = frozenset[NodeId]() if before is None else before.tried
    if before is not None and before.since_s is not None and (now_s or 0.0) >= _ends_s(world, before, wish):
        tried |= {before.node}
    left = live - tried
    if not left:  # all had it: start over
        tried, left = frozenset(), live
    node = min(left, key=lambda one: (zlib.crc32(f"{one} {wish}".encode()), one))
    same = before is not None and before.node == node and before.tried == tried
    since_s = before.since_s if before is not None and same and before.since_s is not None else now_s
    return _Turn(node, since_s, tried)


def _ends_s(world: World, turn: _Turn, wish: WeightsRequest) -> float:
    node = world.nodes.agents.get(turn.node)
    says = node is not None and any(read_weights_request(one) == wish for one in node.report.weights)
    return (turn.since_s or 0.0) + (SLOW_S if says else SILENT_S)


def _lives(world: World, name: NodeId, now_s: float) -> bool:
    node = world.nodes.agents.get(name)
    return node is not None and is_report_fresh(node, now_s) and node.report.brings

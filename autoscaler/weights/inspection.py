"""Assigns artifacts that no agent has inspected to agents: one agent each, and another if it does not respond. Pure.

Decides who inspects, and for how long. Guarantees: all agents take part. A connected agent that reports nothing about
its task is replaced within SILENT_S, one without a result within SLOW_S. So a problem of one node (an unreachable
registry, an inspection that hangs) delays a model no longer than that. Time is an argument.
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
from autoscaler.weights.desired import build_weights_requests, should_read_header

SILENT_S = 6.0
"""An agent reports its task within one or two seconds; `autoscaler.planner.reconcile` waits for two agents."""
SLOW_S = 60.0
"""As long as an agent waits between two of its own attempts."""


class _Turn(NamedTuple):
    node: NodeId
    since_s: float | None
    """None before any step."""
    tried: frozenset[NodeId] = frozenset()
    """Nodes that had the task before and found no result."""


class InspectionAssigner:
    """Assignments by one process, to the agents that are connected to it."""

    def __init__(self) -> None:
        self._turns: dict[WeightsRequest, _Turn] = {}
        self.next_s = inf
        """The time at which an assignment changes without an observation."""

    def looks(
        self, world: World, agents: Collection[NodeId], now_s: float | None
    ) -> Iterator[tuple[NodeId, WeightsRequest]]:
        """Yield the current assignments. `agents`: the connected agents; `now_s`: None before the first step."""
        before, self._turns, self.next_s = self._turns, {}, inf
        live = frozenset(agents if now_s is None else (one for one in agents if _lives(world, one, now_s)))
        for request in sorted(list_uninspected_artifacts(world)) if agents else ():
            turn = self._turns[request] = _turn(world, before.get(request), request, live or frozenset(agents), now_s)
            if turn.since_s is not None:
                self.next_s = min(self.next_s, _ends_s(world, turn, request))
            yield turn.node, request


def list_uninspected_artifacts(world: World) -> set[WeightsRequest]:
    """Return the artifacts that an agent must inspect and none has."""
    return {
        look
        for model in world.models.values()
        for request in build_weights_requests(world, model).values()
        if not _known(world, look := request._replace(look=True), image=request.look, header=should_read_header(model))
    }


def _known(world: World, look: WeightsRequest, *, image: bool, header: bool) -> bool:
    """Return whether everything that is needed is known.

    `image`: that it is an image. If it is not, no pod starts with it, so only an inspection would detect a new push.
    `header`: the data in its header.
    """
    said = world.learned.looked.get(look) or WeightsReport(artifact=look.artifact)
    return not (image and said.image is None) and (not header or bool(said.header or said.no_header))


def _turn(
    world: World, before: _Turn | None, request: WeightsRequest, live: frozenset[NodeId], now_s: float | None
) -> _Turn:
    tried = frozenset[NodeId]() if before is None else before.tried
    if before is not None and before.since_s is not None and (now_s or 0.0) >= _ends_s(world, before, request):
        tried |= {before.node}
    left = live - tried
    if not left:  # all had the task: restart the rotation
        tried, left = frozenset(), live
    node = min(left, key=lambda one: (zlib.crc32(f"{one} {request}".encode()), one))
    same = before is not None and before.node == node and before.tried == tried
    since_s = before.since_s if before is not None and same and before.since_s is not None else now_s
    return _Turn(node, since_s, tried)


def _ends_s(world: World, turn: _Turn, request: WeightsRequest) -> float:
    node = world.nodes.agents.get(turn.node)
    says = node is not None and any(read_weights_request(one) == request for one in node.report.weights)
    return (turn.since_s or 0.0) + (SLOW_S if says else SILENT_S)


def _lives(world: World, name: NodeId, now_s: float) -> bool:
    node = world.nodes.agents.get(name)
    return node is not None and is_report_fresh(node, now_s) and node.report.brings

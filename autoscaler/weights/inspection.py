"""Assigns inspections of artifacts to node agents. Pure.

An artifact that no agent has inspected is assigned to one agent. A connected agent that reports nothing about its task
is replaced within SILENT_S, one without a result within SLOW_S. So a problem of one node (an unreachable registry, an
inspection that hangs) delays a model no longer than that, and all agents take part.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from math import inf
from typing import NamedTuple

from autoscaler.agent_contract import (
    WeightsReport,
    WeightsRequest,
    read_weights_request,
)
from autoscaler.queries.agent_reports import is_report_fresh
from autoscaler.spec.engines import ENGINES
from autoscaler.spec.model import Model
from autoscaler.state.world import NodeId, World
from autoscaler.weights.desired import build_weights_requests


def should_read_header(model: Model) -> bool:
    """Return whether the artifact's header has data that the document lacks: the memory of a replica, or the parts
    of this memory (weights, cache).
    """
    gpu = model.spec.gpu
    made = gpu.elastic_percent is not None or gpu.growth_percent is not None or ENGINES[model.spec.engine].pages
    return gpu.count > 0 and (made or not gpu.memory_bytes)


SILENT_S = 6.0
"""An agent reports its task within one or two seconds; `autoscaler.planner.reconcile` waits for two agents."""


SLOW_S = 60.0
"""Equal to the time for which an agent waits between two attempts of its own."""


LOOKS_MAX = 128
"""Maximum number of inspections assigned to an agent; the others are assigned when one ends."""


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
        """Yield the current assignments. `agents`: the connected agents; `now_s`: None before the first step.

        If an agent has LOOKS_MAX assignments, further artifacts wait: those that were never assigned are next, the
        first ones of each Model before the second ones, and then those whose assignment ended first.
        """
        before, self._turns, self.next_s = self._turns, {}, inf
        live = frozenset(agents if now_s is None else (one for one in agents if _lives(world, one, now_s)))
        counts: Counter[NodeId] = Counter()
        positions = list_uninspected_artifacts(world) if agents else {}

        def order(request: WeightsRequest) -> tuple[float, int, WeightsRequest]:
            turn = before.get(request)
            if turn is None:
                return 0.0, positions[request], request
            ended = _has_ended(world, turn, request, now_s)
            return (turn.since_s or 0.0) if ended else -1.0, 0, request

        for request in sorted(positions, key=order):
            turn = _turn(world, before.get(request), request, live or frozenset(agents), now_s)
            if counts[turn.node] >= LOOKS_MAX:
                if request in before:
                    self._turns[request] = before[request]
                continue
            counts[turn.node] += 1
            self._turns[request] = turn
            if turn.since_s is not None:
                self.next_s = min(self.next_s, _ends_s(world, turn, request))
            yield turn.node, request


def list_uninspected_artifacts(world: World) -> dict[WeightsRequest, int]:
    """Return the artifacts that an agent must inspect, because no agent has reported all required facts yet, with the
    lowest position of each one among the artifacts of a Model.
    """
    found: dict[WeightsRequest, int] = {}
    for model in world.models.values():
        header = should_read_header(model)
        for position, request in enumerate(build_weights_requests(world, model).values()):
            look = request._replace(look=True)
            if not _known(world, look, image=request.look, header=header):
                found[look] = min(position, found.get(look, position))
    return found


def _known(world: World, look: WeightsRequest, *, image: bool, header: bool) -> bool:
    """Return whether all required facts are known. `header`: the data in the artifact's header is required. `image`:
    the artifact must be an image. Until it is one, no pod starts with it, so only an inspection detects a new push.
    """
    said = world.learned.looked.get(look) or WeightsReport(artifact=look.artifact)
    return not (image and said.image is None) and (not header or bool(said.header or said.no_header))


def _turn(
    world: World, before: _Turn | None, request: WeightsRequest, live: frozenset[NodeId], now_s: float | None
) -> _Turn:
    tried, ended = frozenset[NodeId]() if before is None else before.tried, False
    if before is not None and _has_ended(world, before, request, now_s):
        tried, ended = tried | {before.node}, True
    left = live - tried
    if not left:  # all had the task: restart the rotation
        tried, left = frozenset(), live
    node = min(left, key=lambda one: (zlib.crc32(f"{one} {request}".encode()), one))
    same = not ended and before is not None and before.node == node and before.tried == tried
    since_s = before.since_s if before is not None and same and before.since_s is not None else now_s
    return _Turn(node, since_s, tried)


def _has_ended(world: World, turn: _Turn, request: WeightsRequest, now_s: float | None) -> bool:
    return turn.since_s is not None and (now_s or 0.0) >= _ends_s(world, turn, request)


def _ends_s(world: World, turn: _Turn, request: WeightsRequest) -> float:
    node = world.nodes.agents.get(turn.node)
    says = node is not None and any(read_weights_request(one) == request for one in node.report.weights)
    return (turn.since_s or 0.0) + (SLOW_S if says else SILENT_S)


def _lives(world: World, name: NodeId, now_s: float) -> bool:
    node = world.nodes.agents.get(name)
    return node is not None and is_report_fresh(node, now_s) and node.report.brings

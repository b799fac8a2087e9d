"""All nodes and their free amounts, as arrays; selects the best node and lanes for each request. Pure.

A *lane* is one slice of a node. For each `ScoreKey` a row of scores is cached, and only nodes that changed since are
scored again. The choice is by the lowest tier, the highest score (`autoscaler.placement.index.residual_waste`), the
first node in order, which limits fragmentation, and the tightest lane.

Invariants: nothing is overcommitted (amounts are exact; milli are used for scores only). A cached row equals a new one.
Upper bounds of the amounts prevent overflows of sums and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoscaler.placement.index import residual_waste, spread_and_links
from autoscaler.placement.index.request_encoding import EncodedRequest, ScoreKey
from autoscaler.placement.index.residual_waste import NodeSubset
from autoscaler.placement.index.residual_waste_tables import IDLE, WHOLE, Face, Ints, Taught, quantize_milli
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, RequestShape, ResourceAmount, SliceClass

PERCENT_MAX: Final = 1 << 20
"""Maximum compute of a lane: some drivers scale compute above 100 %."""
LANES_MAX: Final = 4000
"""Maximum per node."""


class NodeCapacity(NamedTuple):
    """A node's capacity."""

    name: str
    lanes: tuple[SliceClass, ...]
    cpu_milli: int = CPU_MAX
    host_bytes: int = BYTES_MAX
    links: tuple[str, ...] = ()
    """Per lane, the name of its link: lanes with the same name are connected. Empty: unknown."""

    @property
    def face(self) -> Face:
        """The fields that define its class."""
        return Face(tuple((lane.product, lane.memory_bytes) for lane in self.lanes), self.cpu_milli)


class LaneAssignment(NamedTuple):
    """A node, and the lanes of it that a request is assigned."""

    node: int
    lanes: tuple[int, ...]


class RequestUsage(NamedTuple):
    """The amounts that a request takes of its place."""

    rooms: tuple[ResourceAmount, ...]
    """Per lane."""
    cpu_milli: int = 0
    host_bytes: int = 0


def compute_request_usage(kind: RequestShape, node: NodeCapacity, lanes: Sequence[int]) -> RequestUsage:
    """Return the amounts that a request takes there. Raises ValueError if it never fits there."""
    rooms = [room for lane in lanes if (room := kind.takes(node.lanes[lane])) is not None]
    if len(rooms) < len(lanes):
        raise ValueError(f"{kind} does not fit on node {node.name}, even if it is empty")
    return RequestUsage(tuple(rooms), kind.cpu_milli, kind.host_bytes)


def validate_node(node: NodeCapacity) -> None:
    """Raise ValueError if a node exceeds the bounds."""
    lanes = all(0 < lane.memory_bytes <= BYTES_MAX and 0 <= lane.compute_percent <= PERCENT_MAX for lane in node.lanes)
    lanes = lanes and len(node.lanes) <= LANES_MAX and all(0 <= lane.price < inf for lane in node.lanes)
    if not lanes or not 0 <= node.cpu_milli <= CPU_MAX or not 0 <= node.host_bytes <= BYTES_MAX:
        raise ValueError(
            f"node {node.name} is out of bounds: at most {LANES_MAX} slices, each of 1 to {BYTES_MAX} bytes and 0 to "
            f"{PERCENT_MAX} % of compute at a price of at least 0; CPU at most {CPU_MAX} milli, memory at most "
            f"{BYTES_MAX} bytes"
        )


Flags = NDArray[np.bool_]
ROWS_MAX: Final = 512
"""Score keys with cached scores; the least recently used are dropped."""
_TIER, _SCORE, _LEFT = 42, 22, 12
"""Lowest bit of each field of a key; higher fields count more. The rest is the lane number, lowest first."""
_LAST = (1 << _LEFT) - 1
_LOWEST: Final = -(1 << 60)
"""Below any score."""


class NodeArrays:
    """All nodes, initially empty and open, in the order that breaks ties. Raises ValueError for invalid nodes."""

    def __init__(self, nodes: Sequence[NodeCapacity], taught: Taught) -> None:
        self.nodes = tuple(nodes)
        for node in self.nodes:
            validate_node(node)
        self.lanes = tuple(dict.fromkeys(lane for node in self.nodes for lane in node.lanes))
        """The distinct lanes; an `EncodedRequest` is indexed by these."""
        numbers = {lane: number for number, lane in enumerate(self.lanes)}
        all_lanes = [lane for node in self.nodes for lane in node.lanes]
        counts = np.array([len(node.lanes) for node in self.nodes], np.int64)
        self.lane_of: Ints = np.array([numbers[lane] for lane in all_lanes], np.int64)
        """[lanes]: index into `lanes`; all arrays below are [lanes] or [nodes] too."""
        self.node_of: Ints = np.repeat(np.arange(len(self.nodes)), counts)
        self.counts: Ints = counts
        self.first: Ints = counts.cumsum() - counts
        self.size_bytes: Ints = np.array([lane.memory_bytes for lane in all_lanes], np.int64)
        self.left_bytes: Ints = self.size_bytes.copy()
        self.left_percent: Ints = np.array([lane.compute_percent for lane in all_lanes], np.int64)
        self.shut: Flags = np.zeros(len(all_lanes), bool)
        """Closed for an unknown time: free room there has no value."""
        self.held: Flags = np.zeros(len(all_lanes), bool)
        """Closed temporarily, by a start."""
        self._open: Flags = np.ones(len(all_lanes), bool)
        self.milli: Ints = np.full(len(all_lanes), WHOLE, np.int64)
        """Free milli; -1 if the lane is shut."""
        self.level: Ints = np.full(len(all_lanes), IDLE, np.int64)
        """Level of the lane in the tables."""
        self.cpu: Ints = np.array([node.cpu_milli for node in self.nodes], np.int64)
        self.cpu_size: Ints = self.cpu.copy()
        self.host_bytes: Ints = np.array([node.host_bytes for node in self.nodes], np.int64)
        self.host_size: Ints = self.host_bytes.copy()
        self._numbers = np.arange(len(all_lanes), dtype=np.int64) - self.first[self.node_of]
        self._links = spread_and_links.find_link_numbers([node.links for node in self.nodes], counts.tolist())
        self._leading = np.array([_leading(node, numbers) for node in self.nodes], np.int64)
        self._rows: dict[ScoreKey, _Row] = {}
        self._version = 0
        self._changed: Ints = np.zeros(len(self.nodes), np.int64)
        """[nodes]: the version at which each node last changed."""
        self._before: dict[int, _Before] | None = None
        """State of nodes that changed since the mark; None: there is no mark."""
        self.teach(taught)

    def teach(self, taught: Taught) -> None:
        """Replace the learned values of room."""
        self._tables = taught.tables
        known = {face: number for number, face in enumerate(taught.faces)}
        self.classes: Ints = np.array([known.get(node.face, len(known)) for node in self.nodes], np.int64)
        self._rows.clear()

    # --- queries ------------------------------------------------------------------------------------------------------

    def choose(
        self,
        ask: EncodedRequest,
        ok: Flags | None = None,
        lacks: Ints | None = None,
        free: Flags | None = None,
        crowd: Ints | None = None,
        *,
        must: Ints | None = None,
    ) -> LaneAssignment | None:
        """Return the best place for a request. None: it fits nowhere now. `ok` [nodes]: where it may be placed;
        `lacks`, `crowd`: see `EncodedRequest.tiers`; `free` [lanes]: lanes that it may have; `must`: see
        `spread_and_links.choose_best_lanes`.
        """
        row = self._rows.pop(ask.form, None) or _Row(self, ask.form)
        self._rows[ask.form] = row  # most recently used last
        if len(self._rows) > ROWS_MAX:
            del self._rows[next(iter(self._rows))]
        self._refresh(row)
        fits = (self.cpu >= ask.form.cpu_milli) & (self.host_bytes >= ask.host_bytes)
        if ok is not None:
            fits &= ok
        if ask.form.devices == 0:
            return self._node(np.where(fits, row.scores, _LOWEST))
        lanes = self.fitting(ask) & fits[self.node_of]
        if free is not None:
            lanes &= free
        if not lanes.any():
            return None
        flat = ask.flat and lacks is None and crowd is None
        tiers = None if flat else ask.tiers(lacks, self.lane_of, self.node_of, crowd)
        if ask.form.devices > 1:
            return self._several(ask.form.devices, lanes, tiers, row.scores, must)
        if tiers is not None and ask.wide:
            lanes, tiers = lanes & (tiers == tiers[lanes].min()), None
        scores = row.scores if tiers is None else row.scores - (tiers << _TIER)
        keys = np.where(lanes, scores, np.iinfo(np.int64).min)
        best = int(((keys >> _SCORE) == keys.max() >> _SCORE).argmax())
        node = int(self.node_of[best])
        here = self._span(node)
        return LaneAssignment(node, (int(keys[here].argmax()),))

    def granted(self, ask: EncodedRequest, place: LaneAssignment) -> int:
        """Return how many bytes to grant a request whose place was just chosen.
        The grant is all that it requests, its minimum, or all that is left if that is in between.
        """
        at = int(self.first[place.node]) + place.lanes[0]
        lane, left = self.lane_of[at], int(self.left_bytes[at])
        most, least = int(ask.most[lane]), int(ask.memory[lane])
        return left if left < most else least if ask.form.least and self._rows[ask.form].less[at] else most

    def unneeded(self, place: LaneAssignment) -> int:
        """Return how many bytes left on the place's single lane others are not expected to use."""
        at = int(self.first[place.node]) + place.lanes[0]
        milli = residual_waste.compute_needed_milli(self._tables, self.part(np.array([place.node])), place.lanes[0])
        return max(0, int(self.left_bytes[at]) - -(-milli * int(self.size_bytes[at]) // WHOLE))

    def fitting(self, ask: EncodedRequest, *, held: bool = False) -> Flags:
        """[lanes]: open lanes with enough for one part of the request now; with `held`, held lanes instead."""
        enough = ask.memory[0] if ask.flat else ask.memory[self.lane_of]
        fits: Flags = (self.left_bytes >= enough) & ((self.held & ~self.shut) if held else self._open)
        return fits & (self.left_percent >= ask.compute[self.lane_of]) if ask.computes else fits

    def _node(self, scores: Ints) -> LaneAssignment | None:
        best = int(scores.argmax()) if len(scores) else -1
        return None if best < 0 or scores[best] == _LOWEST else LaneAssignment(best, ())

    def _several(
        self, devices: int, lanes: Flags, tiers: Ints | None, scores: Ints, must: Ints | None
    ) -> LaneAssignment | None:
        """Return the node whose `devices` best lanes have the lowest tier; prefer linked lanes of equal tier."""
        if tiers is None:
            tiers = np.zeros(len(lanes), np.int64)
        found = spread_and_links.choose_best_lanes(
            devices, lanes, tiers, scores, self.node_of, link_of=self._links, must=must
        )
        if found is None:
            return None
        node = int(self.node_of[found[0]])
        return LaneAssignment(node, tuple(sorted(int(one) for one in found - self.first[node])))

    # --- changes ------------------------------------------------------------------------------------------------------

    def take(self, place: LaneAssignment, load: RequestUsage) -> None:
        """Take the usage from the place. Raises ValueError if that is more than is left."""
        self._move(place, load, 1)

    def give_back(self, place: LaneAssignment, load: RequestUsage) -> None:
        """Undo `take`. Raises ValueError if more would be left than the node has."""
        self._move(place, load, -1)

    def set(self, node: int, lane: int, left: ResourceAmount, *, shut: bool, held: bool) -> None:
        """Set the state of one lane."""
        at = int(self.first[node]) + lane
        state = left.memory_bytes, left.compute_percent, shut, held
        before = self.left_bytes[at], self.left_percent[at], self.shut[at], self.held[at]
        if before == state:
            return
        self._remember(node)
        self.left_bytes[at], self.left_percent[at], self.shut[at], self.held[at] = state
        self._open[at] = not shut and not held
        if before[:3] != state[:3]:
            self._settle(node)

    def set_host(self, node: int, cpu_milli: int, host_bytes: int) -> None:
        """Set the host resources left on a node."""
        if (self.cpu[node], self.host_bytes[node]) != (cpu_milli, host_bytes):
            self._remember(node)
            self.cpu[node], self.host_bytes[node] = cpu_milli, host_bytes
            self._touch(node)

    def set_there(self, node: int, *, there: bool) -> None:
        """Add or remove a node without lanes; a removed node has less than any request needs."""
        one = self.nodes[node]
        self.cpu_size[node], self.host_size[node] = (one.cpu_milli, one.host_bytes) if there else (-1, -1)
        self.set_host(node, int(self.cpu_size[node]), int(self.host_size[node]))

    def mark(self) -> None:
        """Set the point to `rewind` to."""
        self._before = {}

    def rewind(self) -> None:
        """Restore the state at the mark, and clear the mark."""
        for node, before in (self._before or {}).items():
            here = self._span(node)
            self.left_bytes[here], self.left_percent[here] = before.left_bytes, before.left_percent
            self.shut[here], self.held[here] = before.shut, before.held
            self._open[here] = ~(before.shut | before.held)
            self.cpu[node], self.host_bytes[node] = before.cpu, before.host_bytes
            self._settle(node)
        self._before = None

    def _move(self, place: LaneAssignment, load: RequestUsage, sign: int) -> None:
        node, many = place.node, len(place.lanes)
        lanes = self.nodes[node].lanes
        once = many == len(set(place.lanes)) == len(load.rooms)
        if not once or not all(0 <= lane < len(lanes) for lane in place.lanes):
            raise ValueError(f"{place} is not a valid assignment of {load} on node {self.nodes[node].name}")
        here = self._span(node)
        memory, percent = self.left_bytes[here].copy(), self.left_percent[here].copy()
        for lane, room in zip(place.lanes, load.rooms, strict=True):
            memory[lane] -= sign * room.memory_bytes
            percent[lane] -= sign * room.compute_percent
        cpu, host = self.cpu[node] - sign * load.cpu_milli, self.host_bytes[node] - sign * load.host_bytes
        most = self.nodes[node].cpu_milli, self.nodes[node].host_bytes
        amounts = [*load[1:], *(amount for room in load.rooms for amount in room)]
        right = min(amounts) >= 0 and 0 <= cpu <= most[0] and 0 <= host <= most[1]
        right = right and bool((memory >= 0).all() and (memory <= self.size_bytes[here]).all())
        if not right or not all(0 <= percent[at] <= lanes[at].compute_percent for at in place.lanes):
            raise ValueError(f"{load} does not fit on node {self.nodes[node].name}")
        self._remember(node)
        self.left_bytes[here], self.left_percent[here] = memory, percent
        self.cpu[node], self.host_bytes[node] = cpu, host
        self._settle(node)

    def _remember(self, node: int) -> None:
        if self._before is None or node in self._before:
            return
        here = self._span(node)
        left, shut = (self.left_bytes[here].copy(), self.left_percent[here].copy()), self.shut[here].copy()
        hosts = int(self.cpu[node]), int(self.host_bytes[node])
        self._before[node] = _Before(*left, shut, self.held[here].copy(), *hosts)

    def _settle(self, node: int) -> None:
        """Update the values derived from the free room of a node."""
        here = self._span(node)
        milli = WHOLE * self.left_bytes[here] // self.size_bytes[here]
        self.milli[here] = left = np.where(self.shut[here], -1, milli)
        self.level[here] = IDLE if (left == WHOLE).all() else quantize_milli(left)
        self._touch(node)

    def _touch(self, node: int) -> None:
        """Invalidate the node's scores."""
        self._version += 1
        self._changed[node] = self._version

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _span(self, node: int) -> slice:
        begin = int(self.first[node])
        return slice(begin, begin + len(self.nodes[node].lanes))

    def _lanes_at(self, nodes: Ints) -> Ints:
        """Return where the lanes of these nodes are in the arrays, in order."""
        if len(nodes) == 1:
            here = self._span(int(nodes[0]))
            return np.arange(here.start, here.stop)
        wanted = np.zeros(len(self.nodes), bool)
        wanted[nodes] = True
        return np.flatnonzero(wanted[self.node_of])

    def part(self, nodes: Ints) -> NodeSubset:
        """Return these nodes, in order, as input of a score."""
        at = self._lanes_at(nodes)
        return NodeSubset(
            at=at,
            left=self.milli[at],
            level=self.level[at],
            seat=np.repeat(np.arange(len(nodes)), self.counts[nodes]),
            counts=self.counts[nodes],
            cpu=self.cpu[nodes],
            cpu_size=self.cpu_size[nodes],
            classes=self.classes[nodes],
        )

    def _refresh(self, row: _Row) -> None:
        if row.version == self._version:
            return
        nodes = np.flatnonzero(self._changed > row.version)
        row.version = self._version
        form, part = row.form, self.part(nodes)
        at = part.at
        if form.devices == 1:
            milli = np.array((*form.milli, 0), np.int64)  # the last is that of nodes without lanes
            taken = milli[self._leading[nodes]]
            if form.least:
                scores = self._elastic(row, part, milli[self.lane_of[at]], nodes)
            else:
                scores = residual_waste.score_lanes(self._tables, part, milli[self.lane_of[at]], taken, form.cpu_milli)
            row.scores[at] = (scores << _SCORE) + ((WHOLE - self.milli[at]) << _LEFT) + _LAST - self._numbers[at]
            return
        idle = (self.milli[at] == WHOLE).astype(np.int64)
        chosen = idle * (part.ranks(idle) <= form.devices)
        scores = residual_waste.score_nodes(self._tables, part, chosen, form.cpu_milli)
        row.scores[nodes] = scores << _SCORE

    def _elastic(self, row: _Row, part: NodeSubset, milli: Ints, nodes: Ints) -> Ints:
        """[lanes] -> the score with the full request (or all that is free, if less) or, if better, with its minimum."""
        cpu_milli, lanes, leading = row.form.cpu_milli, self.lane_of[part.at], self._leading[nodes]
        all_, less = np.array((*row.form.milli, 0), np.int64), np.array((*row.form.least, 0), np.int64)
        short = np.maximum(milli - part.left, 0)
        most = residual_waste.score_lanes(self._tables, part, milli, all_[leading], cpu_milli, forgone=short)
        least = residual_waste.score_lanes(
            self._tables, part, less[lanes], less[leading], cpu_milli, forgone=milli - less[lanes]
        )
        row.less[part.at] = (least > most) & (short == 0)
        found: Ints = np.where(row.less[part.at], least, most)
        return found


class _Before(NamedTuple):
    """Saved state of one node."""

    left_bytes: Ints
    left_percent: Ints
    shut: Flags
    held: Flags
    cpu: int
    host_bytes: int


class _Row:
    """The scores of one `ScoreKey`, and the version of the `NodeArrays` that they are for."""

    def __init__(self, arrays: NodeArrays, form: ScoreKey) -> None:
        self.form = form
        self.scores: Ints = np.zeros(len(arrays.node_of if form.devices == 1 else arrays.nodes), np.int64)
        """[lanes], or [nodes] for requests for several devices or none."""
        self.less: Flags = np.zeros(len(self.scores) if form.least else 0, bool)
        """[lanes]: where an elastic request is better off with its minimum."""
        self.version = -1


def _leading(node: NodeCapacity, numbers: dict[SliceClass, int]) -> int:
    """Return the class of its largest lane, which approximates what a request takes of the node; -1: it has none."""
    return numbers[max(node.lanes, key=lambda lane: lane.memory_bytes)] if node.lanes else -1

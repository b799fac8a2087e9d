"""Learns the value of room by repeated simulation of the expected demand on the existing nodes.

Each iteration replays the demand with the current values, records the final use of each sampled lane, and raises the
prices of nodes that are the only ones for some requests. Deterministic for equal nodes, demand and random draws. Only
the frequency of each shape matters, not the order of requests. Source: research/packing 1.4b.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np

from autoscaler.placement.index.elastic_requests import Elastic
from autoscaler.placement.index.node_search import NodeArrays, NodeCapacity
from autoscaler.placement.index.residual_waste_tables import (
    ABSENT,
    BINS,
    FORGONE,
    LEVELS,
    UNITS,
    WHOLE,
    Floats,
    Ints,
    Taught,
    bin_of,
    build_tables,
    compute_residual_waste,
    sample_levels,
)
from autoscaler.state.resources import RequestFrequency, RequestShape

T = TypeVar("T")
Draw = Callable[[int], int]
"""n -> a random integer from 0 to n - 1, uniformly distributed."""
Chance = Callable[[int], Draw]
"""Seed -> its draws, the same each time."""

SEED: Final = 5000
REPLAYS: Final = 6
"""Per iteration."""
ITERATIONS: Final = 10
"""Not counting the first, which uses the residual recursion."""
ARRIVES: Final = 1.3
"""Requested capacity per replay, as a multiple of the total capacity."""
LANES_MIN: Final = 500
"""A smaller cluster is replicated for the simulation, because a few lanes give too few samples."""
LOOK_EVERY: Final = 0.03
"""Sampling interval of all nodes, as a fraction of the capacity that arrives. The chosen node is sampled every time."""
SHRINK: Final = 30.0
"""Weight, in samples, of the prior value of a cell."""
FADE: Final = 0.7
"""Weight of an iteration's samples in the next."""
PRICE_MAX: Final = 3.0
PRICE_FADE, PRICE_STEP = 0.95, 0.3
SCARCE: Final = 0.5
"""If all nodes that a request fits on have together less than this fraction of the capacity, and the request is refused
before EARLY, the prices of these nodes are raised."""
EARLY: Final = 0.97
HALFWAY: Final = 0.5
"""Weight of the free room when requests for 100 % of the capacity have arrived; the free room at the end has the
remaining weight. ELASTIC_HALFWAY applies to elastic demand, of which much more fits after that point."""
ELASTIC_HALFWAY: Final = 0.25
WEIGHTS_MAX: Final = 10_000
"""Approximate maximum number of requests to simulate. If there are more, the number of each shape is reduced in
proportion, but not below one."""
JUDGED: Final = {95: 0.5, 100: 1.0, 130: 1.0}
"""Arrived requests, in percent of the capacity -> weight of the percentage in use at that time. The weighted sum is the
score that selects the best iteration."""


class _Looks:
    """Samples of lanes: [classes, BINS, LEVELS] sums of their milli left at the end, and counts."""

    def __init__(self, classes: int) -> None:
        self.sums: Floats = np.zeros((classes, BINS, LEVELS))
        self.counts: Floats = np.zeros((classes, BINS, LEVELS))

    def add(self, cells: Ints, lefts: Floats) -> None:
        """Add samples: cells as flat indices, including ABSENT ones, and the free amount of each lane."""
        shape = (*self.sums.shape[:2], LEVELS + 1)
        size = int(np.prod(shape))
        self.sums += np.bincount(cells, lefts, size).reshape(shape)[:, :, :ABSENT]
        self.counts += np.bincount(cells, minlength=size).reshape(shape)[:, :, :ABSENT]

    def fade(self) -> None:
        """Reduce the weight of the samples after an iteration."""
        self.sums *= FADE
        self.counts *= FADE

    def fit(self, waste: Floats) -> Floats:
        """[classes, BINS, LEVELS]: the value of each cell in milli by its samples, shrunk towards those of its bin and
        level, of its level, and finally `waste`.
        """
        by_level = (self.sums.sum(axis=(0, 1)) + SHRINK * waste) / (self.counts.sum(axis=(0, 1)) + SHRINK)
        by_bin = (self.sums.sum(axis=0) + SHRINK * by_level) / (self.counts.sum(axis=0) + SHRINK)
        fitted: Floats = (self.sums + SHRINK * by_bin) / (self.counts + SHRINK)
        return fitted


class _Replay:
    """One simulated run: records samples, refused requests and utilization."""

    def __init__(self, nodes: Sequence[NodeCapacity], made: Taught, capacity: int) -> None:
        self.arrays = NodeArrays(nodes, made)
        self._elastic = Elastic(self.arrays)
        self._capacity = capacity
        self._looks: list[tuple[Ints, Ints, Ints]] = []
        self._forgone: Ints = np.zeros(len(self.arrays.milli), np.int64)
        """[lanes]: requested milli that elastic requests on the lane are not granted."""
        self._half_left: Ints | None = None
        self._arrived = self._used = self._looked = 0
        self._judged = dict.fromkeys(JUDGED, 0.0)
        self.refused: list[RequestShape] = []
        """Requests refused early."""

    def play(self, kind: RequestShape, milli: int) -> None:
        """Simulate the arrival of a request that takes `milli` of the capacity."""
        if self._arrived + milli > self._looked * LOOK_EVERY * self._capacity:
            self._looked += 1
            self._look(np.arange(len(self.arrays.nodes)))
        one = self._elastic.start(kind)
        self._arrived += milli
        if one is not None:
            if one.asked_bytes:
                at = self.arrays.first[one.place.node] + one.place.lanes[0]
                self._forgone[at] += WHOLE * (one.asked_bytes - one.granted_bytes) // self.arrays.size_bytes[at]
            self._used += milli
            self._look(np.array([one.place.node]))
        elif kind.devices and self._arrived < EARLY * self._capacity:
            self.refused.append(kind)
        if self._half_left is None and self._arrived >= self._capacity:
            self._half_left = self.arrays.milli.copy()
        for percent in JUDGED:
            if 100 * self._arrived <= percent * self._capacity:
                self._judged[percent] = 100 * self._used / self._capacity

    def _look(self, nodes: Ints) -> None:
        part = self.arrays.part(nodes)
        rows = part.classes * BINS + bin_of(part.cpu, part.sums(part.left))
        cells = rows[part.seat] * (LEVELS + 1) + part.level
        self._looks.append((part.at, cells, self._forgone[part.at]))

    def seen(self, looks: _Looks, halfway: float) -> None:
        """Add the samples of this run. The value of a sample is the free room of its lane, less the cost of the memory
        that elastic requests were not granted there since the sample. The free room is a weighted mean: that when
        requests for 100 % of the capacity had arrived (weight `halfway`), and that at the end.
        """
        end = self.arrays.milli
        half = end if self._half_left is None else self._half_left
        at, cells, forgone = (np.concatenate(found) for found in zip(*self._looks, strict=True))
        lefts = halfway * half[at] + (1 - halfway) * end[at] - (self._forgone[at] - forgone) * FORGONE / UNITS
        looks.add(cells, lefts)

    def score(self) -> float:
        """Return the weighted utilization of the run; higher is better."""
        return sum(weight * self._judged[percent] for percent, weight in JUDGED.items())


class Learner:
    """Learns from simulated runs. Raises ValueError if there is nothing to learn from: no lanes, or no demand."""

    def __init__(
        self,
        nodes: Sequence[NodeCapacity],
        demand: Sequence[RequestFrequency],
        chance: Chance,
        lanes_min: int = LANES_MIN,
        seed: int = SEED,
    ) -> None:
        lanes = sum(len(node.lanes) for node in nodes)
        self._nodes = tuple(nodes) * max(1, -(-lanes_min // max(1, lanes)))
        self._alike = {node.face: node for node in nodes}
        """One node of each class."""
        self._faces = tuple(sorted(self._alike))
        counts = Counter(node.face for node in self._nodes)
        self._of_face = [WHOLE * len(face.lanes) * counts[face] for face in self._faces]
        self._capacity = sum(self._of_face)
        self._chance, self._seed = chance, seed
        sizes = count_request_sizes(self._alike.values(), demand)
        if not self._capacity or not sizes:
            raise ValueError("there is nothing to learn from: no device, or no demand for devices")
        self._demand = [(kind, self._milli(kind)) for kind, weight in _bounded(demand) for _ in range(weight)]
        least: dict[int, int] = {}
        for kind, milli in self._demand:
            if kind.spare_bytes:
                least[milli] = -(-milli * kind.least.memory_bytes // kind.memory_bytes)
        self._halfway = ELASTIC_HALFWAY if least else HALFWAY
        self._waste = sample_levels(compute_residual_waste(sizes, least))
        self._values: Floats = np.broadcast_to(self._waste, (len(self._faces), BINS, LEVELS))
        self._prices = np.zeros(len(self._faces))
        self._capable: dict[RequestShape, tuple[list[int], int]] = {}

    def _milli(self, kind: RequestShape) -> int:
        return compute_request_milli(self._alike.values(), kind)

    def _taught(self, values: Floats) -> Taught:
        """Build the tables; a class never seen gets the mean of the known ones."""
        others = values.mean(axis=0, keepdims=True)
        return Taught(self._faces, build_tables(np.concatenate((values, others)), np.append(self._prices, 0.0)))

    def lessons(self) -> Iterator[tuple[Taught, float]]:
        """Yield, after each iteration, the tables that it used, at first those of the residual recursion, and their
        score. Callers should keep the best tables, not the last.
        """
        looks = _Looks(len(self._faces))
        for iteration in range(ITERATIONS + 1):
            made, score = self._taught(self._values), 0.0
            for number in range(REPLAYS):
                score += self._replay(self._seed + iteration * REPLAYS + number, looks)
            yield made, score / REPLAYS
            self._values = looks.fit(self._waste)
            looks.fade()

    def _replay(self, seed: int, looks: _Looks) -> float:
        draw = self._chance(seed)
        arrivals = self._arrivals(draw)
        replay = _Replay(_shuffled(self._nodes, draw), self._taught(self._values), self._capacity)
        for kind, milli in arrivals:
            replay.play(kind, milli)
        replay.seen(looks, self._halfway)
        self._price(replay.refused)
        return replay.score()

    def _arrivals(self, draw: Draw) -> list[tuple[RequestShape, int]]:
        """Return expected requests in random order, until they add up to slightly more than ARRIVES times the capacity.
        If there are too few, some are repeated.
        """
        arrivals, total = [], 0
        for one in _shuffled(self._demand, draw):
            arrivals.append(one)
            total += one[1]
            if total > ARRIVES * self._capacity:
                break
        while total <= ARRIVES * self._capacity:
            arrivals.append(self._demand[draw(len(self._demand))])
            total += arrivals[-1][1]
        return arrivals

    def _price(self, refused: Sequence[RequestShape]) -> None:
        raised = np.zeros(len(self._faces))
        for kind in refused:
            faces, milli = self._where(kind)
            if 0 < milli < SCARCE * self._capacity:
                raised[faces] += self._milli(kind) / milli
        self._prices = np.minimum(PRICE_MAX, PRICE_FADE * self._prices + PRICE_STEP * raised)

    def _where(self, kind: RequestShape) -> tuple[list[int], int]:
        """Return the classes that it fits on when empty, and their total capacity in milli."""
        if kind not in self._capable:
            faces = [number for number, face in enumerate(self._faces) if _fits(kind, self._alike[face])]
            self._capable[kind] = faces, sum(self._of_face[face] for face in faces)
        return self._capable[kind]


def compute_request_milli(nodes: Iterable[NodeCapacity], kind: RequestShape) -> int:
    """Return the capacity that a request takes, on the node where that is least; 0: it fits on none."""
    return kind.devices * min((min(milli) for node in nodes if (milli := _fits(kind, node))), default=0)


def count_request_sizes(nodes: Iterable[NodeCapacity], demand: Iterable[RequestFrequency]) -> dict[int, float]:
    """Milli of one device -> how often that is requested; requests that fit on none of these nodes do not count."""
    ones, sizes = tuple(nodes), dict[int, float]()
    for kind, weight in demand:
        milli = compute_request_milli(ones, kind)
        if milli and weight:
            size = milli // kind.devices
            sizes[size] = sizes.get(size, 0.0) + kind.devices * weight
    return sizes


def _bounded(demand: Sequence[RequestFrequency]) -> list[RequestFrequency]:
    """Return the demand in order, reduced to about WEIGHTS_MAX requests."""
    total = sum(weight for _, weight in demand)
    if total <= WEIGHTS_MAX:
        return sorted(demand)
    return [RequestFrequency(kind, max(1, weight * WEIGHTS_MAX // total)) for kind, weight in sorted(demand) if weight]


def _fits(kind: RequestShape, node: NodeCapacity) -> list[int]:
    """Return the milli that it takes of each suitable lane of an empty node. An empty list: it never fits there."""
    fitting = [lane for lane in node.lanes if kind.rank(lane.product) is not None and kind.takes(lane) is not None]
    if not kind.devices or len(fitting) < kind.devices or kind.cpu_milli > node.cpu_milli:
        return []
    rooms = [(kind.takes(lane) or lane.room, lane) for lane in fitting]
    return [-(-WHOLE * room.memory_bytes // lane.memory_bytes) for room, lane in rooms]


def _shuffled(items: Sequence[T], draw: Draw) -> list[T]:
    """Shuffle a copy of the items (Fisher-Yates)."""
    mixed = list(items)
    for last in range(len(mixed) - 1, 0, -1):
        other = draw(last + 1)
        mixed[last], mixed[other] = mixed[other], mixed[last]
    return mixed

"""Training of placement values: when to learn them, from which input, and how to decode the result.

Converts a `World` to a `TrainingInput` (its nodes grouped by equality, its recent demand by shape), decides by drift
when to learn again, and decodes `PlacementValues` to tables. A `TrainingInput` is bounded, and does not depend on the
order of observations; equal input gives equal `PlacementValues`. Learning takes a minute or more and runs in
`pilotlight.processes.learner_runner`; the planner only calls `decode_placement_values`, which is fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from autoscaler.placement.index.node_search import NodeCapacity
from autoscaler.placement.index.residual_waste_tables import (
    BINS,
    LEVELS,
    UNITS,
    WHOLE,
    Face,
    Tables,
    Taught,
    build_untrained_estimate,
)
from autoscaler.placement.learning.expected_demand import build_demand_histogram
from autoscaler.placement.learning.learner import SEED, Chance, Learner, compute_request_milli, count_request_sizes
from autoscaler.placement.model.bin_builder import list_whole_devices
from autoscaler.placement.model.types import slice_class_of
from autoscaler.state.resources import HostResources, RequestFrequency, RequestShape
from autoscaler.state.world import Alike, NodeId, PlacementValues, Slice, TrainingInput, World

AGAIN_S: Final = 600.0
"""Minimum time between two trainings."""
FAILED_S: Final = 3600.0
"""The same after a failure, which may repeat."""
DRIFT_MAX: Final = 0.1
"""Fraction of the demand, by capacity, that may change before training is repeated."""
GROWN_MAX: Final = 0.2
"""Fraction of the capacity that may be added, removed or changed before training is repeated."""
ALIKE_MAX: Final = 64
"""Kinds of nodes to learn, those with the most slices. Others are treated like nodes never seen."""
LANES_MAX: Final = 4_000
"""Approximate lanes to simulate: a larger cluster is represented by a fraction of each kind of its nodes."""
TABLE_MAX: Final = WHOLE * UNITS
"""Maximum of a table entry: no more stays unused than exists."""
GRAIN_BYTES: Final = 1 << 30
"""Rounding of a node's memory."""
_FOUR: Final = np.dtype("<i4")


class Tried(NamedTuple):
    """When the last training ended, and whether it failed."""

    at_s: float
    failed: bool


def build_training_input(world: World, now_s: float) -> TrainingInput | None:
    """Build the input. None: nothing to learn, since no request needs a device or there is only one slice."""
    by_node: dict[str, list[Slice]] = {}
    whole = list_whole_devices(world.nodes.slices.values())
    for id in sorted(world.nodes.slices):
        by_node.setdefault(world.nodes.slices[id].node, []).append(world.nodes.slices[id])
    counts: Counter[Alike] = Counter()
    for node, slices in by_node.items():
        host = world.nodes.hosts.get(NodeId(node), HostResources())
        lanes = tuple(slice_class_of(one, whole=one.device in whole) for one in slices)
        # rounded down, so that memory reserved by the system does not make nodes differ
        host_bytes = host.host_bytes // GRAIN_BYTES * GRAIN_BYTES
        counts[Alike(lanes, host.cores_milli, host_bytes, many=0)] += 1
    most = sorted(counts, key=lambda alike: (-len(alike.lanes) * counts[alike], alike))[:ALIKE_MAX]
    found = tuple(alike._replace(many=counts[alike]) for alike in sorted(most))
    demand = build_demand_histogram(world, now_s)
    if len(world.nodes.slices) < 2 or not count_request_sizes(_samples(found), demand):
        return None
    return TrainingInput(nodes=found, demand=demand, seed=SEED)


def training_reason(now: TrainingInput, last: PlacementValues | None, tried: Tried | None, now_s: float) -> str:
    """Explain why it is time to learn from `now`; empty: it is not. `last`: the values in force."""
    if tried is not None and now_s < tried.at_s + (FAILED_S if tried.failed else AGAIN_S):
        return ""
    if last is None or not last.learnt:
        return "no training has succeeded yet"
    of = last.exercise
    before, after = _lanes(of), _lanes(now)
    if after.keys() - before.keys():
        return "a new kind of node was added"
    moved = sum(abs(before[one] - after[one]) for one in before.keys() | after.keys())
    if moved > GROWN_MAX * sum(before.values()):
        return "the number of nodes changed"
    samples = _samples(now.nodes)
    return "the demand changed" if _distance(samples, of.demand, now.demand) > DRIFT_MAX else ""


def build_initial_values(now: TrainingInput) -> PlacementValues:
    """Return the values without training: from the frequency of each request size."""
    return _lesson(now, build_untrained_estimate(count_request_sizes(_samples(now.nodes), now.demand)), learnt=False)


def learn_placement_values(now: TrainingInput, chance: Chance) -> PlacementValues:
    """Return the best iteration of the training. Raises ValueError if there is nothing to learn from."""
    best, _ = max(Learner(sample_nodes(now), now.demand, chance, seed=now.seed).lessons(), key=lambda lesson: lesson[1])
    return _lesson(now, best, learnt=True)


def sample_nodes(now: TrainingInput) -> tuple[NodeCapacity, ...]:
    """Return the nodes to simulate: all, or, to have about LANES_MAX lanes, a fraction of each kind, at least one."""
    lanes = sum(len(alike.lanes) * alike.many for alike in now.nodes)
    part = max(lanes, LANES_MAX)
    return tuple(
        NodeCapacity(f"{number}/{at}", alike.lanes, alike.cpu_milli, alike.host_bytes)
        for number, alike in enumerate(now.nodes)
        for at in range(max(1, alike.many * LANES_MAX // part) if lanes > LANES_MAX else alike.many)
    )


def decode_placement_values(lesson: PlacementValues) -> Taught:
    """Decode placement values to tables. Raises ValueError if they are invalid."""
    faces = tuple(sorted({node.face for node in _samples(lesson.exercise.nodes)})) if lesson.learnt else ()
    classes = len(faces) + 1
    if (len(lesson.values), len(lesson.prices)) != (4 * classes * BINS * (LEVELS + 1), 4 * classes):
        raise ValueError("placement values do not match their training input")
    values, prices = (np.frombuffer(text, _FOUR).astype(np.int64) for text in (lesson.values, lesson.prices))
    if min(values.min(), prices.min()) < 0 or max(values.max(), prices.max()) > TABLE_MAX:
        raise ValueError(f"placement values have an entry outside 0 to {TABLE_MAX}")
    return Taught(faces, Tables(values.reshape(classes, BINS, LEVELS + 1), prices))


def describe_training_input(of: TrainingInput) -> str:
    """Describe the input for logs and explanations."""
    return f"{len(of.demand)} request shapes, {sum(alike.many for alike in of.nodes)} nodes, seed {of.seed}"


def _lesson(of: TrainingInput, known: Taught, *, learnt: bool) -> PlacementValues:
    values, prices = (np.asarray(table, _FOUR).tobytes() for table in known.tables)
    return PlacementValues(exercise=of, values=values, prices=prices, learnt=learnt)


def _samples(nodes: Sequence[Alike]) -> tuple[NodeCapacity, ...]:
    """Return one node of each kind."""
    return tuple(NodeCapacity("", alike.lanes, alike.cpu_milli, alike.host_bytes) for alike in nodes)


def _lanes(of: TrainingInput) -> Counter[Face]:
    """Count the slices on nodes of each class."""
    found: Counter[Face] = Counter()
    for node, alike in zip(_samples(of.nodes), of.nodes, strict=True):
        found[node.face] += len(alike.lanes) * alike.many
    return found


def _distance(
    samples: Sequence[NodeCapacity], one: Sequence[RequestFrequency], other: Sequence[RequestFrequency]
) -> float:
    """Return the total variation: the fraction of the requested capacity that differs, 0 to 1."""
    before, after = _parts(samples, one), _parts(samples, other)
    return sum(abs(before.get(kind, 0.0) - after.get(kind, 0.0)) for kind in before.keys() | after.keys()) / 2


def _parts(samples: Sequence[NodeCapacity], demand: Sequence[RequestFrequency]) -> dict[RequestShape, float]:
    """Shape -> its fraction of all requested capacity; shapes that take none are left out."""
    capacity = {kind: weight * compute_request_milli(samples, kind) for kind, weight in demand}
    total = sum(capacity.values()) or 1
    return {kind: milli / total for kind, milli in capacity.items() if milli}

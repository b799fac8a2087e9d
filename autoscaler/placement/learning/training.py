"""When it is time to learn what room is worth, from what, and what comes of it.

Owns the way from a World to a TrainingInput (its nodes by what they are alike in, its demand lately by Kind) and to
the tables of a PlacementValues, and the decision to learn anew: drift. Promises: a TrainingInput is bounded, and the
same for the same World in whatever order things were observed; the same TrainingInput gives the same PlacementValues.
Learning takes a minute or more and is done elsewhere (`pilotlight.processes.learner_runner`); nothing here is
called by the plan but `decode_placement_values`, which is quick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from autoscaler.placement.index.node_arrays import NodeCapacity
from autoscaler.placement.index.residual_waste import (
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
from autoscaler.placement.model.bins import list_whole_devices
from autoscaler.placement.model.types import slice_class_of
from autoscaler.state.placement_value import Alike, PlacementValues, TrainingInput
from autoscaler.state.resources import HostResources, RequestFrequency, RequestShape
from autoscaler.state.world import NodeId, Slice, World

AGAIN_S: Final = 600.0
"""After a PlacementValues the next one begins no sooner."""
FAILED_S: Final = 3600.0
"""Nor after one that failed: it may fail again, and took its time."""
DRIFT_MAX: Final = 0.1
"""Part of the demand, by capacity, that may be asked for otherwise before it is learnt anew."""
GROWN_MAX: Final = 0.2
"""Part of the capacity that may have come, gone or changed."""
ALIKE_MAX: Final = 64
"""Kinds of nodes that are learnt of: those with the most Slices. Others are like nodes never seen."""
LANES_MAX: Final = 4_000
"""Of a TrainingInput that is played, about: a larger cluster is played by a part of each kind of its nodes."""
TABLE_MAX: Final = WHOLE * UNITS
"""Nothing in a table is more: no more stays unused than there is."""
GRAIN_BYTES: Final = 1 << 30
"""Of a node's memory."""
_FOUR: Final = np.dtype("<i4")


class Tried(NamedTuple):
    """When learning last ended, and whether it failed."""

    at_s: float
    failed: bool


def build_training_input(world: World, now_s: float) -> TrainingInput | None:
    """What could be learnt from; None: nothing, for nobody asks for a Device, or there is no choice among them."""
    by_node: dict[str, list[Slice]] = {}
    whole = list_whole_devices(world.slices.values())
    for id in sorted(world.slices):
        by_node.setdefault(world.slices[id].node, []).append(world.slices[id])
    counts: Counter[Alike] = Counter()
    for node, slices in by_node.items():
        host = world.hosts.get(NodeId(node), HostResources())
        lanes = tuple(slice_class_of(one, whole=one.device in whole) for one in slices)
        counts[Alike(lanes, host.cores_milli, _grains(host.host_bytes), many=0)] += 1
    most = sorted(counts, key=lambda alike: (-len(alike.lanes) * counts[alike], alike))[:ALIKE_MAX]
    found = tuple(alike._replace(many=counts[alike]) for alike in sorted(most))
    demand = build_demand_histogram(world, now_s)
    if len(world.slices) < 2 or not count_request_sizes(_samples(found), demand):
        return None
    return TrainingInput(nodes=found, demand=demand, seed=SEED)


def _grains(host_bytes: int) -> int:
    """So that what a system keeps for itself makes no two nodes differ."""
    return host_bytes // GRAIN_BYTES * GRAIN_BYTES


def training_reason(now: TrainingInput, last: PlacementValues | None, tried: Tried | None, now_s: float) -> str:
    """Why it is time to learn from `now`; empty: it is not. `last`: what is in force."""
    if tried is not None and now_s < tried.at_s + (FAILED_S if tried.failed else AGAIN_S):
        return ""
    if last is None or not last.learnt:
        return "nothing was learnt yet"
    of = last.exercise
    before, after = _lanes(of), _lanes(now)
    if after.keys() - before.keys():
        return "there are nodes of another kind"
    moved = sum(abs(before[one] - after[one]) for one in before.keys() | after.keys())
    if moved > GROWN_MAX * sum(before.values()):
        return "there are more or fewer nodes"
    samples = _samples(now.nodes)
    return "what is asked for has changed" if _distance(samples, of.demand, now.demand) > DRIFT_MAX else ""


def build_initial_values(now: TrainingInput) -> PlacementValues:
    """What is known at once: how often which size is asked for."""
    return _lesson(now, build_untrained_estimate(count_request_sizes(_samples(now.nodes), now.demand)), learnt=False)


def learn_placement_values(now: TrainingInput, chance: Chance) -> PlacementValues:
    """The best of all lessons. Raises ValueError where there is nothing to learn from."""
    best, _ = max(Learner(sample_nodes(now), now.demand, chance, seed=now.seed).lessons(), key=lambda lesson: lesson[1])
    return _lesson(now, best, learnt=True)


def sample_nodes(now: TrainingInput) -> tuple[NodeCapacity, ...]:
    """Nodes that are played with: all, or of each kind its part of about LANES_MAX, at least one."""
    lanes = sum(len(alike.lanes) * alike.many for alike in now.nodes)
    part = max(lanes, LANES_MAX)
    return tuple(
        NodeCapacity(f"{number}/{at}", alike.lanes, alike.cpu_milli, alike.host_bytes)
        for number, alike in enumerate(now.nodes)
        for at in range(max(1, alike.many * LANES_MAX // part) if lanes > LANES_MAX else alike.many)
    )


def decode_placement_values(lesson: PlacementValues) -> Taught:
    """As tables. Raises ValueError for what is none."""
    faces = tuple(sorted({node.face for node in _samples(lesson.exercise.nodes)})) if lesson.learnt else ()
    classes = len(faces) + 1
    if (len(lesson.values), len(lesson.prices)) != (4 * classes * BINS * (LEVELS + 1), 4 * classes):
        raise ValueError("a lesson of other nodes")
    values, prices = (np.frombuffer(text, _FOUR).astype(np.int64) for text in (lesson.values, lesson.prices))
    if min(values.min(), prices.min()) < 0 or max(values.max(), prices.max()) > TABLE_MAX:
        raise ValueError(f"a lesson with numbers that are not in 0 to {TABLE_MAX}")
    return Taught(faces, Tables(values.reshape(classes, BINS, LEVELS + 1), prices))


def describe_training_input(of: TrainingInput) -> str:
    """In words."""
    return f"{len(of.demand)} kinds, {sum(alike.many for alike in of.nodes)} nodes, seed {of.seed}"


def _lesson(of: TrainingInput, known: Taught, *, learnt: bool) -> PlacementValues:
    values, prices = (np.asarray(table, _FOUR).tobytes() for table in known.tables)
    return PlacementValues(exercise=of, values=values, prices=prices, learnt=learnt)


def _samples(nodes: Sequence[Alike]) -> tuple[NodeCapacity, ...]:
    """One of each kind."""
    return tuple(NodeCapacity("", alike.lanes, alike.cpu_milli, alike.host_bytes) for alike in nodes)


def _lanes(of: TrainingInput) -> Counter[Face]:
    """How many Slices there are on nodes of each class."""
    found: Counter[Face] = Counter()
    for node, alike in zip(_samples(of.nodes), of.nodes, strict=True):
        found[node.face] += len(alike.lanes) * alike.many
    return found


def _distance(
    samples: Sequence[NodeCapacity], one: Sequence[RequestFrequency], other: Sequence[RequestFrequency]
) -> float:
    """Total variation: the part of the capacity asked for that would have to be asked for otherwise; 0 to 1."""
    before, after = _parts(samples, one), _parts(samples, other)
    return sum(abs(before.get(kind, 0.0) - after.get(kind, 0.0)) for kind in before.keys() | after.keys()) / 2


def _parts(samples: Sequence[NodeCapacity], demand: Sequence[RequestFrequency]) -> dict[RequestShape, float]:
    """Kind -> its part of all capacity that is asked for; who takes none has none."""
    capacity = {kind: weight * compute_request_milli(samples, kind) for kind, weight in demand}
    total = sum(capacity.values()) or 1
    return {kind: milli / total for kind, milli in capacity.items() if milli}

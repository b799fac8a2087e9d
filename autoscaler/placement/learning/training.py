"""When it is time to learn what room is worth, from what, and what comes of it.

Owns the way from a World to an Exercise (its nodes by what they are alike in, its demand lately by Kind) and to the
tables of a Lesson, and the decision to learn anew: drift. Promises: an Exercise is bounded, and the same for the same
World in whatever order things were observed; the same Exercise gives the same Lesson. Learning takes a minute or more
and is done elsewhere (`pilotlight.processes.placement_learning`); nothing here is called by the plan but `taught`,
which is quick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from autoscaler.placement.index.arrays import Node
from autoscaler.placement.index.residual_waste import BINS, LEVELS, UNITS, WHOLE, Face, Tables, Taught, untaught
from autoscaler.placement.learning.expected_demand import histogram
from autoscaler.placement.learning.learner import SEED, Chance, Learner, milli_of, sizes_of
from autoscaler.placement.model.bins import alone
from autoscaler.placement.model.types import lane_of
from autoscaler.state.placement_value import Alike, Exercise, Lesson
from autoscaler.state.resources import Host, Kind, Wanted
from autoscaler.state.world import NodeId, Slice, World

AGAIN_S: Final = 600.0
"""After a Lesson the next one begins no sooner."""
FAILED_S: Final = 3600.0
"""Nor after one that failed: it may fail again, and took its time."""
DRIFT_MAX: Final = 0.1
"""Part of the demand, by capacity, that may be asked for otherwise before it is learnt anew."""
GROWN_MAX: Final = 0.2
"""Part of the capacity that may have come, gone or changed."""
ALIKE_MAX: Final = 64
"""Kinds of nodes that are learnt of: those with the most Slices. Others are like nodes never seen."""
LANES_MAX: Final = 4_000
"""Of an Exercise that is played, about: a larger cluster is played by a part of each kind of its nodes."""
TABLE_MAX: Final = WHOLE * UNITS
"""Nothing in a table is more: no more stays unused than there is."""
GRAIN_BYTES: Final = 1 << 30
"""Of a node's memory."""
_FOUR: Final = np.dtype("<i4")


class Tried(NamedTuple):
    """When learning last ended, and whether it failed."""

    at_s: float
    failed: bool


def exercise(world: World, now_s: float) -> Exercise | None:
    """What could be learnt from; None: nothing, for nobody asks for a Device, or there is no choice among them."""
    by_node: dict[str, list[Slice]] = {}
    whole = alone(world.slices.values())
    for id in sorted(world.slices):
        by_node.setdefault(world.slices[id].node, []).append(world.slices[id])
    counts: Counter[Alike] = Counter()
    for node, slices in by_node.items():
        host = world.hosts.get(NodeId(node), Host())
        lanes = tuple(lane_of(one, whole=one.device in whole) for one in slices)
        counts[Alike(lanes, host.cores_milli, _grains(host.host_bytes), many=0)] += 1
    most = sorted(counts, key=lambda alike: (-len(alike.lanes) * counts[alike], alike))[:ALIKE_MAX]
    found = tuple(alike._replace(many=counts[alike]) for alike in sorted(most))
    demand = histogram(world, now_s)
    if len(world.slices) < 2 or not sizes_of(_samples(found), demand):
        return None
    return Exercise(nodes=found, demand=demand, seed=SEED)


def _grains(host_bytes: int) -> int:
    """So that what a system keeps for itself makes no two nodes differ."""
    return host_bytes // GRAIN_BYTES * GRAIN_BYTES


def why(now: Exercise, last: Lesson | None, tried: Tried | None, now_s: float) -> str:
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


def begin(now: Exercise) -> Lesson:
    """What is known at once: how often which size is asked for."""
    return _lesson(now, untaught(sizes_of(_samples(now.nodes), now.demand)), learnt=False)


def learn(now: Exercise, chance: Chance) -> Lesson:
    """The best of all lessons. Raises ValueError where there is nothing to learn from."""
    best, _ = max(Learner(played(now), now.demand, chance, seed=now.seed).lessons(), key=lambda lesson: lesson[1])
    return _lesson(now, best, learnt=True)


def played(now: Exercise) -> tuple[Node, ...]:
    """Nodes that are played with: all, or of each kind its part of about LANES_MAX, at least one."""
    lanes = sum(len(alike.lanes) * alike.many for alike in now.nodes)
    part = max(lanes, LANES_MAX)
    return tuple(
        Node(f"{number}/{at}", alike.lanes, alike.cpu_milli, alike.host_bytes)
        for number, alike in enumerate(now.nodes)
        for at in range(max(1, alike.many * LANES_MAX // part) if lanes > LANES_MAX else alike.many)
    )


def taught(lesson: Lesson) -> Taught:
    """As tables. Raises ValueError for what is none."""
    faces = tuple(sorted({node.face for node in _samples(lesson.exercise.nodes)})) if lesson.learnt else ()
    classes = len(faces) + 1
    if (len(lesson.values), len(lesson.prices)) != (4 * classes * BINS * (LEVELS + 1), 4 * classes):
        raise ValueError("a lesson of other nodes")
    values, prices = (np.frombuffer(text, _FOUR).astype(np.int64) for text in (lesson.values, lesson.prices))
    if min(values.min(), prices.min()) < 0 or max(values.max(), prices.max()) > TABLE_MAX:
        raise ValueError(f"a lesson with numbers that are not in 0 to {TABLE_MAX}")
    return Taught(faces, Tables(values.reshape(classes, BINS, LEVELS + 1), prices))


def told(of: Exercise) -> str:
    """In words."""
    return f"{len(of.demand)} kinds, {sum(alike.many for alike in of.nodes)} nodes, seed {of.seed}"


def _lesson(of: Exercise, known: Taught, *, learnt: bool) -> Lesson:
    values, prices = (np.asarray(table, _FOUR).tobytes() for table in known.tables)
    return Lesson(exercise=of, values=values, prices=prices, learnt=learnt)


def _samples(nodes: Sequence[Alike]) -> tuple[Node, ...]:
    """One of each kind."""
    return tuple(Node("", alike.lanes, alike.cpu_milli, alike.host_bytes) for alike in nodes)


def _lanes(of: Exercise) -> Counter[Face]:
    """How many Slices there are on nodes of each class."""
    found: Counter[Face] = Counter()
    for node, alike in zip(_samples(of.nodes), of.nodes, strict=True):
        found[node.face] += len(alike.lanes) * alike.many
    return found


def _distance(samples: Sequence[Node], one: Sequence[Wanted], other: Sequence[Wanted]) -> float:
    """Total variation: the part of the capacity asked for that would have to be asked for otherwise; 0 to 1."""
    before, after = _parts(samples, one), _parts(samples, other)
    return sum(abs(before.get(kind, 0.0) - after.get(kind, 0.0)) for kind in before.keys() | after.keys()) / 2


def _parts(samples: Sequence[Node], demand: Sequence[Wanted]) -> dict[Kind, float]:
    """Kind -> its part of all capacity that is asked for; who takes none has none."""
    capacity = {kind: weight * milli_of(samples, kind) for kind, weight in demand}
    total = sum(capacity.values()) or 1
    return {kind: milli / total for kind, milli in capacity.items() if milli}

"""What the packer may expect: which Kinds come how often, and what a restart of each Model costs.

Owns the RestartCosts of a World. The demand lately of a Model is the Replicas that its most Calls at once need, fading
since the last Call; declared Models that nobody calls count for nothing. Promises: the same World gives the same
RestartCosts whatever order things were observed in, and its size is bounded. It places nothing;
`autoscaler.placement.packer` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import exp2, inf

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand.desired_replicas import LIVE, NO_HISTORY, NO_LOAD, exclude_replaced_replicas, median_start_s
from autoscaler.placement.model.bins import build_placement_request
from autoscaler.placement.model.types import EvictionLevel, RestartCosts
from autoscaler.queries.cordons import is_stop_ordered
from autoscaler.spec.model import Model
from autoscaler.state.resources import RequestFrequency, RequestShape
from autoscaler.state.world import History, ModelLoad, World

HALF_LIFE_S = 3600.0
"""A Model last called so long ago counts half."""
KINDS_MAX = 256
"""Kinds in the histogram: the most wanted ones. The rest is left out of it."""
_PARTS = 1 << 20
"""Weights are whole parts of a Replica, because sums of floats depend on their order."""


def build_restart_costs(world: World) -> RestartCosts:
    """What may be expected, as far as starts are remembered."""
    return RestartCosts(start_s=Starts(world.histories))


class Starts(Mapping[ModelName, float]):
    """Seconds that a start of each Model takes whose starts are remembered; worked out when it is asked for."""

    def __init__(self, histories: Mapping[ModelName, History]) -> None:
        self._histories = histories
        self._known: dict[ModelName, float | None] = {}

    def look(self, histories: Mapping[ModelName, History], otherwise: Iterable[ModelName]) -> None:
        """These are remembered now: those named are not as they were."""
        self._histories = histories
        for name in otherwise:
            self._known.pop(name, None)

    def __getitem__(self, name: ModelName) -> float:
        if name not in self._known:
            self._known[name] = median_start_s(self._histories.get(name, NO_HISTORY))
        median_s = self._known[name]
        if median_s is None:
            raise KeyError(name)
        return median_s

    def __iter__(self) -> Iterator[ModelName]:
        return (name for name, history in self._histories.items() if history.starts_s)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def build_demand_histogram(world: World, now_s: float) -> tuple[RequestFrequency, ...]:
    """What was asked for lately, the most wanted first, in parts of a Replica. Empty while nobody has called."""
    histories, loads, defaults = world.histories, world.loads, world.settings.pod
    parts: dict[RequestShape, int] = {}
    for name, model in world.models.items():
        history, load = histories.get(name, NO_HISTORY), loads.get(name, NO_LOAD)
        if history is NO_HISTORY and load is NO_LOAD and not model.spec.replicas.min:
            continue  # as most are
        weight = int(_PARTS * estimate_recent_replicas(model, history, load, now_s))
        if weight:
            kind = build_placement_request(model, 0, inf, EvictionLevel.NONE, "", defaults).kind
            parts[kind] = parts.get(kind, 0) + weight
    most = sorted(parts, key=lambda kind: (-parts[kind], kind))[:KINDS_MAX]
    return tuple(RequestFrequency(kind, parts[kind]) for kind in most)


class PossibleStarts:
    """What may be asked for beside what is there, and how often: each Model's Replicas up to its maximum, whether
    anybody called it lately or not. Those that a Device has no part for are left out, and so is who has its own pods.

    Of one World after the other: only Models are counted again of which anything is otherwise, when somebody asks.
    """

    def __init__(self) -> None:
        self._world = World(epoch=0)
        self._stale = set[ModelName]()
        self._each: dict[ModelName, tuple[RequestShape, int]] = {}
        """Of each Model that may have more."""
        self._many: dict[RequestShape, int] = {}

    def look(self, world: World, otherwise: Collection[ModelName]) -> None:
        """It is like this now: those named are not as they were, nor is anything of their Replicas."""
        before, self._world = self._world, world
        ordered = (before.cordons, before.stops) == (world.cordons, world.stops)
        told = ordered and before.settings is world.settings and (before.slices is world.slices or not world.cordons)
        self._stale.update(otherwise if told else (*otherwise, *world.models))

    def now(self, leaving: Collection[ReplicaId] = (), staying: Collection[ReplicaId] = ()) -> dict[RequestShape, int]:
        """`leaving` and `staying`: Replicas that this tick drains or evicts, and revives."""
        for name in self._stale:
            self._put(name, self._lacking(name))
        self._stale.clear()
        found, replicas = dict(self._many), self._world.replicas
        for name in {replicas[id].model for id in (*leaving, *staying) if id in replicas}:
            _count(found, self._each.get(name), -1)
            _count(found, self._lacking(name, leaving, staying), 1)
        return found

    def _put(self, name: ModelName, lacking: tuple[RequestShape, int] | None) -> None:
        _count(self._many, self._each.pop(name, None), -1)
        _count(self._many, lacking, 1)
        if lacking is not None:
            self._each[name] = lacking

    def _lacking(
        self, name: ModelName, leaving: Collection[ReplicaId] = (), staying: Collection[ReplicaId] = ()
    ) -> tuple[RequestShape, int] | None:
        """Its Kind, and how many more it may have: who is to give way to another is not counted beside that."""
        world, model = self._world, self._world.models.get(name)
        if model is None or model.adopted is not None or not model.memory_bytes:
            return None
        spec, hash = model.spec, model.spec_hash()
        if spec.paused or spec.gpu.count != 1:
            return None
        there = (world.replicas[id] for id in world.by_model.get(name, ()) if id not in leaving)
        here = exclude_replaced_replicas([one for one in there if one.state in LIVE or one.id in staying])
        many = spec.replicas.max - sum(one.spec_hash == hash and not is_stop_ordered(world, one) for one in here)
        return (
            (build_placement_request(model, 0, inf, EvictionLevel.NONE, "", world.settings.pod).kind, many)
            if many > 0
            else None
        )


def _count(found: dict[RequestShape, int], of: tuple[RequestShape, int] | None, sign: int) -> None:
    if of is not None:
        kind, many = of
        found[kind] = found.get(kind, 0) + sign * many
        if not found[kind]:
            del found[kind]


def estimate_recent_replicas(model: Model, history: History, load: ModelLoad, now_s: float) -> float:
    """How many Replicas the Model needed when it was last called, fading since then; never below its minimum."""
    spec = model.spec
    if spec.paused:
        return 0.0
    low, high = spec.replicas.min, spec.replicas.max
    calls, age_s = load.waiting + load.running, 0.0
    if not calls:
        called_s = max(history.last_activity_s or -inf, history.refused_cold_s or -inf)
        if called_s == -inf:
            return low
        age_s = max(0.0, now_s - called_s)
    for _, peak in history.peaks:
        calls = max(calls, peak)
    needed = min(max(1, -(-calls // model.slots)), high)
    return max(float(low), needed * exp2(-age_s / HALF_LIFE_S))

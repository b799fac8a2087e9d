"""Expected demand: how often each request shape is expected, and what a restart of each model costs.

Recent demand of a model is the number of replicas for its peak of concurrent requests, decaying since the last request;
models that were never called count only with their minimum of replicas. Invariants: results do not depend on the order
of observations and are bounded in size. `autoscaler.placement.packer` does the placement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import exp2, inf

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand.desired_replicas import exclude_replaced_replicas
from autoscaler.demand.idle_timeout import median_start_s
from autoscaler.placement.model.request_builder import build_request_shape
from autoscaler.placement.model.types import RestartCosts
from autoscaler.queries.operator_orders import is_stop_ordered
from autoscaler.spec.model import Model
from autoscaler.state.lifecycle import LIVE
from autoscaler.state.resources import RequestFrequency, RequestShape
from autoscaler.state.world import NO_HISTORY, NO_LOAD, History, ModelLoad, World

HALF_LIFE_S = 3600.0
"""A model whose last request is this long ago counts half."""
KINDS_MAX = 256
"""Shapes in the histogram, the most frequent ones. The rest is left out."""
_PARTS = 1 << 20
"""Weights are integer fractions of a replica, because sums of floats depend on their order."""


def build_restart_costs(world: World) -> RestartCosts:
    """Return the expected restart costs, as far as start times were measured."""
    return RestartCosts(start_s=Starts(world.learned.histories))


class Starts(Mapping[ModelName, float]):
    """Start time in seconds of each model with measured starts, computed on demand."""

    def __init__(self, histories: Mapping[ModelName, History]) -> None:
        self._histories = histories
        self._known: dict[ModelName, float | None] = {}

    def look(self, histories: Mapping[ModelName, History], otherwise: Iterable[ModelName]) -> None:
        """Update the histories; `otherwise` names the models whose history changed."""
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
    """Return recent demand, most frequent first, in fractions of a replica. Empty if no model was called."""
    histories, loads, defaults = world.learned.histories, world.loads, world.settings.pod
    parts: dict[RequestShape, int] = {}
    for name, model in world.models.items():
        history, load = histories.get(name, NO_HISTORY), loads.get(name, NO_LOAD)
        if history is NO_HISTORY and load is NO_LOAD and not model.spec.replicas.min:
            continue  # most models
        weight = int(_PARTS * estimate_recent_replicas(model, history, load, now_s))
        if weight:
            kind = build_request_shape(model, defaults)
            parts[kind] = parts.get(kind, 0) + weight
    most = sorted(parts, key=lambda kind: (-parts[kind], kind))[:KINDS_MAX]
    return tuple(RequestFrequency(kind, parts[kind]) for kind in most)


class PossibleStarts:
    """The replicas that may still be requested, and how often: of each model up to its maximum, even without recent
    requests. Requests for several or whole devices and adopted workloads are left out.

    Updated from one world to the next: only changed models are counted again, on demand.
    """

    def __init__(self) -> None:
        self._world = World(epoch=0)
        self._stale = set[ModelName]()
        self._each: dict[ModelName, tuple[RequestShape, int]] = {}
        """Shape and count of each model that may have more replicas."""
        self._many: dict[RequestShape, int] = {}

    def look(self, world: World, otherwise: Collection[ModelName]) -> None:
        """Update the `World`; `otherwise` names the models of which anything changed, including their replicas."""
        before, self._world = self._world, world
        ordered = (before.nodes.cordons, before.stops) == (world.nodes.cordons, world.stops)
        still = before.nodes.slices is world.nodes.slices or not world.nodes.cordons
        is_incremental = ordered and before.settings is world.settings and still
        self._stale.update(otherwise if is_incremental else (*otherwise, *world.models))

    def now(self, leaving: Collection[ReplicaId] = (), staying: Collection[ReplicaId] = ()) -> dict[RequestShape, int]:
        """Return the counts by shape. `leaving`, `staying`: replicas that this tick drains or evicts, and revives."""
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
        """Return its shape and how many more replicas it may have; a replica being replaced is not counted twice."""
        world, model = self._world, self._world.models.get(name)
        if model is None or model.adopted is not None or not model.memory_bytes:
            return None
        spec, hash = model.spec, model.spec_hash()
        if spec.paused or spec.gpu.count != 1:
            return None
        there = (world.replicas[id] for id in world.by_model.get(name, ()) if id not in leaving)
        here = exclude_replaced_replicas([one for one in there if one.state in LIVE or one.id in staying])
        many = spec.replicas.max - sum(one.spec_hash == hash and not is_stop_ordered(world, one) for one in here)
        return (build_request_shape(model, world.settings.pod), many) if many > 0 else None


def _count(found: dict[RequestShape, int], of: tuple[RequestShape, int] | None, sign: int) -> None:
    if of is not None:
        kind, many = of
        found[kind] = found.get(kind, 0) + sign * many
        if not found[kind]:
            del found[kind]


def estimate_recent_replicas(model: Model, history: History, load: ModelLoad, now_s: float) -> float:
    """Return the replicas that the model needed when last called, decaying since then; never below its minimum."""
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

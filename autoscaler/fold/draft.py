"""The mutable draft of the next `World` while a batch is folded: copy-on-write maps and incremental indices.

Every write of a fold goes through the draft. `by_model` and `by_slice` are updated with each replica; `loads` of marked
Models are summed once per batch. If gateways need an update (`news`), the version rises by one. A batch that changes
nothing returns the identical `World`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Generic, TypeVar

from msgspec.structs import replace

from autoscaler.contract import GatewayId, ModelName, ReplicaId, TenantName
from autoscaler.fold.indices import load_of, with_id
from autoscaler.queries.measured_memory import correct_memory_estimate
from autoscaler.state import StateRecord
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import NO_LOAD, Gateway, Grant, History, ModelLoad, NodeAgentStatus, Replica, SliceId, World

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
F = TypeVar("F", bound=StateRecord)

_ROUTED = frozenset({ReplicaState.READY, ReplicaState.UNREADY, ReplicaState.DRAINING, ReplicaState.STOPPING})
"""States in which gateways know a replica."""


class CopiedMap(Generic[K, V]):
    """A copy-on-write map. `now` is read-only."""

    __slots__ = ("_own", "now")

    def __init__(self, base: dict[K, V]) -> None:
        self.now = base
        self._own = False

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry."""
        if not self._own:
            self.now, self._own = dict(self.now), True
        self.now[key] = value

    def drop(self, key: K) -> None:
        """Remove an entry, if present."""
        if key in self.now:
            if not self._own:
                self.now, self._own = dict(self.now), True
            del self.now[key]


class Draft:
    """The `World` under construction for a batch at `now_s`; `finish` returns it."""

    def __init__(self, world: World, now_s: float) -> None:
        self.world = world
        """The fields that have no map below are current here; `change` replaces them."""
        self.before = world
        self.now_s = now_s
        self.version = world.version + 1
        """The version of the next `World`, if gateways need an update."""
        self.transitions: list[Transition] = []
        self.replicas: CopiedMap[ReplicaId, Replica] = CopiedMap(world.replicas)
        self.gateways: CopiedMap[GatewayId, Gateway] = CopiedMap(world.gateways)
        self.histories: CopiedMap[ModelName, History] = CopiedMap(world.learned.histories)
        self.attained: CopiedMap[ModelName, dict[TenantName, float]] = CopiedMap(world.learned.attained)
        self.agents: CopiedMap[str, NodeAgentStatus] = CopiedMap(world.nodes.agents)
        self.by_model: CopiedMap[ModelName, tuple[ReplicaId, ...]] = CopiedMap(world.by_model)
        self.by_slice: CopiedMap[SliceId, tuple[ReplicaId, ...]] = CopiedMap(world.by_slice)
        self.loads: CopiedMap[ModelName, ModelLoad] = CopiedMap(world.loads)
        self.news = False
        self.undivided: set[ModelName] = set()
        self.unsummed: set[ModelName] = set()
        self.settled = False
        """Whether `divide_slots` has processed the Models that were undivided before this batch."""

    @cached_property
    def by_pod(self) -> dict[str, ReplicaId]:
        """Pod UID -> replica. Computed at the first access, once per batch."""
        return {one.runtime.pod.uid: id for id, one in self.replicas.now.items() if one.runtime.pod is not None}

    def correct(self, name: ModelName) -> None:
        """Correct the memory estimate of a Model's next replica with measurements."""
        model, history = self.world.models.get(name), self.histories.now.get(name)
        after = model if model is None or history is None else correct_memory_estimate(model, history)
        if after is not None and after is not model:
            self.change(models={**self.world.models, name: after})

    def change(self, **fields: object) -> None:
        """Replace fields of the `World` that are neither maps of this draft nor groups."""
        self.world = replace(self.world, **fields)

    def change_nodes(self, **fields: object) -> None:
        """Replace fields of `World.nodes` that are not maps of this draft."""
        self.change(nodes=replace(self.world.nodes, **fields))

    def change_learned(self, **fields: object) -> None:
        """Replace fields of `World.learned` that are not maps of this draft."""
        self.change(learned=replace(self.world.learned, **fields))

    def change_leadership(self, **fields: object) -> None:
        """Replace fields of `World.leadership`."""
        self.change(leadership=replace(self.world.leadership, **fields))

    def history(self, model: ModelName) -> History:
        """The history of a Model; the defaults if there is none."""
        return self.histories.now.get(model) or History()

    def put_history(self, model: ModelName, history: History) -> None:
        """Replace the history of a Model."""
        if self.histories.now.get(model) != history:
            self.histories.put(model, history)

    def attain(self, model: ModelName, tenant: TenantName, attained: float) -> None:
        """Replace the service that a Tenant attained from a Model."""
        known = self.attained.now.get(model)
        if known is None or known is self.before.learned.attained.get(model):
            self.attained.put(model, dict(known or {}))
        self.attained.now[model][tenant] = attained

    def replicas_of(self, model: ModelName) -> Iterable[Replica]:
        """The replicas of a Model."""
        return (self.replicas.now[id] for id in self.by_model.now.get(model, ()))

    def put_replica(self, after: Replica) -> None:
        """Add or replace a replica and update the indices."""
        before = self.replicas.now.get(after.id)
        self.replicas.put(after.id, after)
        self.undivided.add(after.model)
        if before is None:
            self._index(after)
        elif (before.model, before.resources.slices) != (after.model, after.resources.slices):
            self._unindex(before)
            self._index(after)
        if before is not None and before.state is ReplicaState.READY and after.state is not ReplicaState.READY:
            # Revoke all holds, with the version that announces the new state.
            for gateway in tuple(self.gateways.now.values()):
                if after.id in gateway.grants:
                    lowered = with_grant(gateway.grants[after.id], Grant(version=self.version, hold=0))
                    self.gateways.put(gateway.id, replace(gateway, grants={**gateway.grants, after.id: lowered}))
        self.news = self.news or route_of(before) != route_of(after)

    def drop_replica(self, replica: Replica) -> None:
        """Remove a replica and every hold on it. The version rises, because replica names contain it."""
        self.replicas.drop(replica.id)
        self._unindex(replica)
        self.undivided.add(replica.model)
        self.news = True
        for gateway in tuple(self.gateways.now.values()):
            if replica.id in gateway.grants:
                grants = {id: grants for id, grants in gateway.grants.items() if id != replica.id}
                self.gateways.put(gateway.id, replace(gateway, grants=grants))

    def record(self, before: Replica | None, after: Replica, verb: str, reason: str) -> None:
        """Record one transition."""
        self.transitions.append(
            Transition(
                at_s=self.now_s,
                replica=after.id,
                model=after.model,
                slices=after.resources.slices,
                before=before.state if before is not None else None,
                after=after.state,
                verb=verb,
                reason=reason,
            )
        )

    def sum_loads(self) -> dict[ModelName, ModelLoad]:
        """Sum the demand of the marked Models; note changes in where requests wait. Returns those with demand."""
        summed: dict[ModelName, ModelLoad] = {}
        for model in self.unsummed:
            before, after = self.loads.now.get(model, NO_LOAD), load_of(self.gateways.now, model)
            if after != NO_LOAD:
                summed[model] = after
            if before == after:
                continue
            self.undivided.add(model)
            self.news = self.news or before.waiting_at != after.waiting_at
            if after == NO_LOAD:
                self.loads.drop(model)
            else:
                self.loads.put(model, after)
        self.unsummed.clear()
        return summed

    def finish(self) -> World:
        """Return the `World` after the batch."""
        before, gateways = self.before, self.gateways.now
        undivided = frozenset(self.undivided if self.settled else before.undivided | self.undivided)
        heard = all(g.in_epoch or g.gone or g.lapsed for g in gateways.values())
        leadership = self.world.leadership
        if not leadership.handed_over and leadership.synced and gateways and heard:
            self.change_leadership(handed_over=True)
            undivided |= self.by_model.now.keys()  # now the slots of adopted replicas can be allocated, too
        if self.agents.now is not self.world.nodes.agents:
            self.change_nodes(agents=self.agents.now)
        learned = self.world.learned
        if self.histories.now is not learned.histories or self.attained.now is not learned.attained:
            self.change_learned(histories=self.histories.now, attained=self.attained.now)
        after = replace(
            self.world,
            version=self.version if self.news else before.version,
            leadership=_kept(before.leadership, self.world.leadership),
            nodes=_kept(before.nodes, self.world.nodes),
            learned=_kept(before.learned, self.world.learned),
            undivided=before.undivided if undivided == before.undivided else undivided,
            replicas=self.replicas.now,
            gateways=gateways,
            by_model=self.by_model.now,
            by_slice=self.by_slice.now,
            loads=self.loads.now,
        )
        return _kept(before, after)

    def _index(self, replica: Replica) -> None:
        self.by_model.put(replica.model, with_id(self.by_model.now.get(replica.model, ()), replica.id))
        for slice_ in replica.resources.slices:
            self.by_slice.put(slice_, with_id(self.by_slice.now.get(slice_, ()), replica.id))

    def _unindex(self, replica: Replica) -> None:
        _without(self.by_model, replica.model, replica.id)
        for slice_ in replica.resources.slices:
            _without(self.by_slice, slice_, replica.id)


def _without(index: CopiedMap[K, tuple[ReplicaId, ...]], key: K, id: ReplicaId) -> None:
    left = tuple(other for other in index.now.get(key, ()) if other != id)
    if left:
        index.put(key, left)
    else:
        index.drop(key)


def with_grant(grants: tuple[Grant, ...], newest: Grant) -> tuple[Grant, ...]:
    """Return `grants` with a newer one. Older ones that are not higher are dropped: the newest one covers them."""
    return (*(grant for grant in grants if grant.hold > newest.hold), newest)


def is_routed(replica: Replica) -> bool:
    """Whether Routes contain the replica. A failed replica is omitted: Routes show a replica as stopping only if the
    stop is intended, because gateways do not count an attempt that such a stop interrupts.
    """
    return replica.state in _ROUTED and not replica.failure


def route_of(replica: Replica | None) -> tuple[object, ...] | None:
    """The facts about a replica that gateways learn; None: they do not know it."""
    if replica is None or not is_routed(replica):
        return None
    return (replica.state, replica.runtime.address, replica.slots, replica.model)


def _kept(before: F, after: F) -> F:
    """Return `before` if nothing was written, which is when every field is the identical object."""
    if after is before or all(getattr(before, field) is getattr(after, field) for field in before.__struct_fields__):
        return before
    return after

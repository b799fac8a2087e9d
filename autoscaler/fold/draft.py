"""The next World while a batch is folded into it: maps copied at their first write, derived indices kept as it goes.

Owns every write of a fold. `by_model` and `by_slice` are kept with each Replica; Models whose `loads` must be summed
again are noted, and summed once per batch; so is whether gateways have anything to learn, which raises the version by
one. A batch that changes nothing gives the very World it began with. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Generic, TypeVar

from msgspec.structs import replace

from autoscaler.contract import GatewayId, ModelName, ReplicaId, TenantName
from autoscaler.demand.desired_replicas import NO_LOAD
from autoscaler.fold.indices import load_of, with_id
from autoscaler.queries.memory import correct_memory_estimate
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.operator_orders import NodeAgentStatus
from autoscaler.state.world import Gateway, Grant, History, ModelLoad, Replica, SliceId, World

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_ROUTED = frozenset({ReplicaState.READY, ReplicaState.UNREADY, ReplicaState.DRAINING, ReplicaState.STOPPING})
"""States in which gateways know of a Replica."""


class CopiedMap(Generic[K, V]):
    """A map that is copied at the first write. `now` is for reading only."""

    __slots__ = ("_own", "now")

    def __init__(self, base: dict[K, V]) -> None:
        self.now = base
        self._own = False

    def put(self, key: K, value: V) -> None:
        """Adds or replaces."""
        if not self._own:
            self.now, self._own = dict(self.now), True
        self.now[key] = value

    def drop(self, key: K) -> None:
        """Removes what is there."""
        if key in self.now:
            if not self._own:
                self.now, self._own = dict(self.now), True
            del self.now[key]


class Draft:
    """The World that a batch at `now_s` makes; `finish` returns it."""

    def __init__(self, world: World, now_s: float) -> None:
        self.world = world
        """All that is not in a map below; replaced by `change`."""
        self.before = world
        self.now_s = now_s
        self.version = world.version + 1
        """The version of the next World, should gateways have anything to learn."""
        self.transitions: list[Transition] = []
        self.replicas: CopiedMap[ReplicaId, Replica] = CopiedMap(world.replicas)
        self.gateways: CopiedMap[GatewayId, Gateway] = CopiedMap(world.gateways)
        self.histories: CopiedMap[ModelName, History] = CopiedMap(world.histories)
        self.attained: CopiedMap[ModelName, dict[TenantName, float]] = CopiedMap(world.attained)
        self.nodes: CopiedMap[str, NodeAgentStatus] = CopiedMap(world.nodes)
        self.by_model: CopiedMap[ModelName, tuple[ReplicaId, ...]] = CopiedMap(world.by_model)
        self.by_slice: CopiedMap[SliceId, tuple[ReplicaId, ...]] = CopiedMap(world.by_slice)
        self.loads: CopiedMap[ModelName, ModelLoad] = CopiedMap(world.loads)
        self.news = False
        self.undivided: set[ModelName] = set()
        self.unsummed: set[ModelName] = set()
        self.settled = False
        """Shares has looked at all that was undivided."""

    @cached_property
    def by_pod(self) -> dict[str, ReplicaId]:
        """By the uids of their pods, those Replicas that were there when it was asked first: once per batch."""
        return {one.pod.uid: id for id, one in self.replicas.now.items() if one.pod is not None}

    def correct(self, name: ModelName) -> None:
        """What was measured of a Model holds for its next Replica."""
        model, history = self.world.models.get(name), self.histories.now.get(name)
        after = model if model is None or history is None else correct_memory_estimate(model, history)
        if after is not None and after is not model:
            self.change(models={**self.world.models, name: after})

    def change(self, **fields: object) -> None:
        """Replaces fields of the World that are not maps of this draft."""
        self.world = replace(self.world, **fields)

    def history(self, model: ModelName) -> History:
        """What is remembered of a Model; the defaults if nothing is."""
        return self.histories.now.get(model) or History()

    def put_history(self, model: ModelName, history: History) -> None:
        """Replaces what is remembered of a Model."""
        if self.histories.now.get(model) != history:
            self.histories.put(model, history)

    def attain(self, model: ModelName, tenant: TenantName, attained: float) -> None:
        """Replaces what a Tenant attained of a Model."""
        known = self.attained.now.get(model)
        if known is None or known is self.before.attained.get(model):
            self.attained.put(model, dict(known or {}))
        self.attained.now[model][tenant] = attained

    def replicas_of(self, model: ModelName) -> Iterable[Replica]:
        """All Replicas of a Model."""
        return (self.replicas.now[id] for id in self.by_model.now.get(model, ()))

    def put_replica(self, after: Replica) -> None:
        """Adds or replaces a Replica, and keeps the indices."""
        before = self.replicas.now.get(after.id)
        self.replicas.put(after.id, after)
        self.undivided.add(after.model)
        if before is None:
            self._index(after)
        elif (before.model, before.slices) != (after.model, after.slices):
            self._unindex(before)
            self._index(after)
        if before is not None and before.state is ReplicaState.READY and after.state is not ReplicaState.READY:
            self._withdraw(after.id)
        self.news = self.news or route_of(before) != route_of(after)

    def _withdraw(self, replica: ReplicaId) -> None:
        """Nobody holds a Replica that is not ready: every hold on it is lowered with the version that says so."""
        for gateway in tuple(self.gateways.now.values()):
            if replica in gateway.grants:
                lowered = with_grant(gateway.grants[replica], Grant(version=self.version, hold=0))
                self.gateways.put(gateway.id, replace(gateway, grants={**gateway.grants, replica: lowered}))

    def drop_replica(self, replica: Replica) -> None:
        """Forgets a Replica and every hold on it. A new version: names are made of it, and this one is over."""
        self.replicas.drop(replica.id)
        self._unindex(replica)
        self.undivided.add(replica.model)
        self.news = True
        for gateway in tuple(self.gateways.now.values()):
            if replica.id in gateway.grants:
                grants = {id: grants for id, grants in gateway.grants.items() if id != replica.id}
                self.gateways.put(gateway.id, replace(gateway, grants=grants))

    def record(self, before: Replica | None, after: Replica, verb: str, reason: str) -> None:
        """Writes one row of the log."""
        self.transitions.append(
            Transition(
                at_s=self.now_s,
                replica=after.id,
                model=after.model,
                slices=after.slices,
                before=before.state if before is not None else None,
                after=after.state,
                verb=verb,
                reason=reason,
            )
        )

    def sum_loads(self) -> dict[ModelName, ModelLoad]:
        """Sums the levels of the Models noted, notices where Calls begin or cease to wait; those with demand."""
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
        """The World after the batch."""
        before, gateways = self.before, self.gateways.now
        undivided = frozenset(self.undivided if self.settled else before.undivided | self.undivided)
        handed_over = self.world.handed_over
        heard = all(g.in_epoch or g.gone or g.lapsed for g in gateways.values())
        if not handed_over and self.world.synced and gateways and heard:
            handed_over, undivided = True, undivided | self.by_model.now.keys()  # what was found may be divided now
        after = replace(
            self.world,
            version=self.version if self.news else before.version,
            handed_over=handed_over,
            undivided=before.undivided if undivided == before.undivided else undivided,
            replicas=self.replicas.now,
            gateways=gateways,
            histories=self.histories.now,
            attained=self.attained.now,
            nodes=self.nodes.now,
            by_model=self.by_model.now,
            by_slice=self.by_slice.now,
            loads=self.loads.now,
        )
        return before if _same(before, after) else after

    def _index(self, replica: Replica) -> None:
        self.by_model.put(replica.model, with_id(self.by_model.now.get(replica.model, ()), replica.id))
        for slice_ in replica.slices:
            self.by_slice.put(slice_, with_id(self.by_slice.now.get(slice_, ()), replica.id))

    def _unindex(self, replica: Replica) -> None:
        _without(self.by_model, replica.model, replica.id)
        for slice_ in replica.slices:
            _without(self.by_slice, slice_, replica.id)


def _without(index: CopiedMap[K, tuple[ReplicaId, ...]], key: K, id: ReplicaId) -> None:
    left = tuple(other for other in index.now.get(key, ()) if other != id)
    if left:
        index.put(key, left)
    else:
        index.drop(key)


def with_grant(grants: tuple[Grant, ...], newest: Grant) -> tuple[Grant, ...]:
    """`grants` with a newer one. Those that it covers are void: they cannot count without it, and are no higher."""
    return (*(grant for grant in grants if grant.hold > newest.hold), newest)


def is_routed(replica: Replica) -> bool:
    """Routes name it. One that broke is in none from then on: where Routes say that a Replica stops, somebody wills it,
    and gateways count what it cuts against no Call.
    """
    return replica.state in _ROUTED and not replica.failure


def route_of(replica: Replica | None) -> tuple[object, ...] | None:
    """What gateways learn of a Replica; None when they do not know of it."""
    if replica is None or not is_routed(replica):
        return None
    return (replica.state, replica.address, replica.slots, replica.model)


def _same(before: World, after: World) -> bool:
    """Nothing was written: every field is the very object it was."""
    return all(getattr(before, field) is getattr(after, field) for field in World.__struct_fields__)

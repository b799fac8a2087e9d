"""Maintains the slice index of a `World`: from one update to the next, only changed slices are replaced.

Determines which changes of a `World` affect a slice. Invariant: the index equals a new one of the same `World`. The
`World` of the last update is kept for comparison, by identity: objects that were not replaced did not change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index.residual_waste_tables import Taught
from autoscaler.placement.learning.expected_demand import PossibleStarts, Starts
from autoscaler.placement.learning.training import decode_placement_values
from autoscaler.placement.model.bin_builder import (
    ENDING,
    NOTHING_KEPT,
    BinContext,
    build_bare_bin,
    build_bin_context,
    build_host,
    build_occupied_bin,
    compute_elastic_budget,
    slices_by_node,
)
from autoscaler.placement.model.request_builder import tenant_set_of
from autoscaler.placement.model.types import Bin, RestartCosts
from autoscaler.state.images import Whereabouts
from autoscaler.state.world import DeviceId, Replica, Slice, SliceId, World

K = TypeVar("K")
V = TypeVar("V")
NOTHING: World = World(epoch=0)


class IndexCache:
    """A slice index and what it depends on; empty at first."""

    def __init__(self) -> None:
        self._index = SliceIndex(())
        self._context = build_bin_context(NOTHING, 0.0)
        self._taught: Taught | None = None
        self._starts, self._yet = Starts({}), PossibleStarts()
        self.restart_costs = RestartCosts(start_s=self._starts)
        """Restart costs as of the last update."""
        self._ending: frozenset[SliceId] = frozenset()
        """Slices whose room counts as coming only for a limited time."""
        self._beside: dict[DeviceId, list[SliceId]] = {}
        self._images = Whereabouts()

    def update(
        self,
        world: World,
        now_s: float,
        leaving: Collection[ReplicaId] = (),
        staying: Collection[ReplicaId] = (),
        kept: Mapping[SliceId, str] = NOTHING_KEPT,
    ) -> SliceIndex:
        """Return the updated index, valid until the next call. For the parameters see `build_bin_context`."""
        before = self._context
        whole = before.whole if before.world.nodes.slices is world.nodes.slices else None
        context = build_bin_context(world, now_s, leaving, staying, whole=whole, kept=kept)
        self._context = context
        if before.world.learned.lesson is not world.learned.lesson:
            self._taught = None if world.learned.lesson is None else decode_placement_values(world.learned.lesson)
            self._index.teach(self._taught)
        names = _otherwise(before.world, world)
        self._starts.look(world.learned.histories, names)
        self._yet.look(world, names)
        other = before.whole is not context.whole and before.whole != context.whole
        hosts = _differ(before.world.nodes.hosts, world.nodes.hosts)
        resized = any(not self._index.admits(node, world.nodes.hosts.get(node)) for node in hosts)
        if other or resized or _rebuilt(before, context):
            self._begin(context)
        else:
            changed = self._changed(before, context)
            for id in changed:
                self._index.put(build_bare_bin(context, world.nodes.slices[id]))
            self._index.stir(
                world.nodes.slices
                if before.demand_complete != context.demand_complete
                else _stirred(before, context, names)
            )
            if world.nodes.hosts or hosts:
                for node in ({world.nodes.slices[id].node for id in changed} & world.nodes.hosts.keys()) | hosts:
                    there = node in world.nodes.hosts
                    self._index.put_host(
                        node, build_host(context, node, self._index.slices_of(node)) if there else None
                    )
        self._ending = frozenset(_slices_of(world, (r for r in world.replicas.values() if r.state in ENDING)))
        seen: dict[SliceId, Bin] = {}

        def full(id: SliceId) -> Bin:
            if id not in seen:
                seen[id] = build_occupied_bin(context, world.nodes.slices[id])
            return seen[id]

        self._images.update(world.nodes.images)
        self._index.locality.set_images(self._images)
        self._index.budget = partial(compute_elastic_budget, context)
        self._index.yet = lambda victims: self._yet.now({*context.leaving, *victims}, context.staying)
        self._index.full, self._index.models = full, world.by_model.keys()
        self._index.held = lambda replica: world.replicas[replica].resources.slices
        return self._index

    def _begin(self, context: BinContext) -> None:
        slices = context.world.nodes.slices
        self._beside = {}
        for id, slice_ in slices.items():
            self._beside.setdefault(slice_.device, []).append(id)
        on, there = slices_by_node(context.world), context.world.nodes.hosts
        hosts = {node: build_host(context, node, on.get(node, ())) for node in there}
        self._index = SliceIndex((build_bare_bin(context, slice_) for slice_ in slices.values()), hosts, self._taught)

    def _changed(self, before: BinContext, context: BinContext) -> set[SliceId]:
        """Return the slices whose `Bin` may have changed."""
        old, new = before.world, context.world
        nodes, known = new.nodes, old.nodes
        if nodes.cordons != known.cordons or nodes.cuttable is not known.cuttable or nodes.cutting is not known.cutting:
            return set(nodes.slices)
        found = set(_differ(known.slices, nodes.slices))
        found |= _differ(old.by_slice, new.by_slice)
        moved = _differ(old.replicas, new.replicas)
        for name in _differ(old.models, new.models):
            was, now = old.models.get(name), new.models.get(name)
            if (was is None) != (now is None) or tenant_set_of(was) != tenant_set_of(now):
                moved |= {*new.by_model.get(name, ())}
        moved |= {*before.leaving, *before.staying, *context.leaving, *context.staying}
        found |= {*_slices_of(new, (new.replicas[id] for id in moved if id in new.replicas))}
        found |= self._ending
        found |= {id for device in {*before.locked} ^ {*context.locked} for id in self._beside.get(device, ())}
        found |= _differ(before.shut, context.shut)
        return found & new.nodes.slices.keys()


def _otherwise(old: World, new: World) -> set[ModelName]:
    """Return the models with changes that affect their replicas on a slice."""
    names = _differ(old.models, new.models) | _differ(old.by_model, new.by_model)
    names |= {name for name in _differ(old.loads, new.loads) if old.loads.get(name) != new.loads.get(name)}
    was, now = old.learned.histories, new.learned.histories
    names |= {name for name in _differ(was, now) if was.get(name) != now.get(name)}
    moved = _differ(old.replicas, new.replicas)
    return names | {world.replicas[id].model for world in (old, new) for id in moved if id in world.replicas}


def _stirred(before: BinContext, context: BinContext, names: Iterable[ModelName]) -> Iterator[SliceId]:
    """Return the slices with a replica whose cost of eviction may have changed."""
    world, ids = context.world, set[ReplicaId]()
    if before.calls != context.calls:
        both = before.calls.keys() | context.calls.keys()
        ids |= {id for id in both if before.calls.get(id) != context.calls.get(id)}
    for name in names:
        ids.update(world.by_model.get(name, ()))
    return _slices_of(world, (world.replicas[id] for id in ids if id in world.replicas))


def _rebuilt(before: BinContext, context: BinContext) -> bool:
    """Whether slices were added or removed, or one changed its kind or price."""
    old, new = before.world.nodes.slices, context.world.nodes.slices
    if before.prices.entries != context.prices.entries:
        return True
    if old is new:
        return False
    differ = (id for id in _differ(old, new) if id in new)
    return old.keys() != new.keys() or any(
        _kind(old[id], before.prices.of(old[id])) != _kind(new[id], context.prices.of(new[id])) for id in differ
    )


def _kind(one: Slice, price: float) -> tuple[object, ...]:
    size = one.memory_bytes, one.device_bytes, one.compute_percent
    return (one.node, one.device, one.kind, one.product, one.isolation, one.shared, one.link, *size, price)


def _differ(old: Mapping[K, V], new: Mapping[K, V]) -> set[K]:
    """Return the keys that only one has, or whose values are not the same object."""
    if old is new:
        return set()
    found = {key for key, value in new.items() if old.get(key) is not value}
    return found | (old.keys() - new.keys())


def _slices_of(world: World, replicas: Iterator[Replica]) -> Iterator[SliceId]:
    return (id for replica in replicas for id in replica.resources.slices if id in world.nodes.slices)

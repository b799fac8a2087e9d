"""A Yard as it is supposed to be while one call of the packer works on it: what was taken, and promised to whom.

Owns the changed Shelves and hosts, on top of the Yard's own, and tells who worked something out about them that it is
void. What the Yard was given stays as it was; its NodeArrays is told, and rewound by the packer. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from autoscaler.contract import ReplicaId
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.tenant_isolation import domain_of, has_tenant_conflict
from autoscaler.placement.model.types import Bin, Occupant, PlacementRequest
from autoscaler.state.resources import Beside, HostResources
from autoscaler.state.world import NodeId, Slice, SliceId


class SliceCache(Protocol):
    """Who works something out about Slices."""

    def forget(self, ids: Iterable[SliceId]) -> None:
        """These are otherwise now."""

    def reconsider(self, ids: Iterable[SliceId]) -> None:
        """So is the CPU or memory of their node: they may be cheaper to have than was thought."""


class Overlay:
    """`most`: of CPU and memory any PlacementRequest of this call asks for."""

    def __init__(self, yard: SliceIndex, most: Beside) -> None:
        self.yard = yard
        self.listeners: list[SliceCache] = []
        self.hosts: dict[NodeId, HostResources] = {}
        """As they are by now, of those that changed."""
        self.gone: set[ReplicaId] = set()
        """Replicas that go by now."""
        self._most = most
        self._changed: dict[SliceId, Bin] = {}

    def shelf(self, id: SliceId) -> Bin:
        """As it is by now; not to be changed."""
        return self._changed.get(id) or self.yard.shelf(id)

    def is_changed(self, id: SliceId) -> bool:
        """Whether it may be otherwise than at first."""
        return id in self._changed

    def change(self, id: SliceId) -> Bin:
        """One that may be changed. What was worked out about it is void, and about all of its Domain."""
        if id not in self._changed:
            self._changed[id] = self.yard.shelf(id).copy()
        for listener in self.listeners:
            listener.forget(self.yard.together(self._changed[id].slice))
        return self._changed[id]

    def holds(self, id: SliceId, replica: ReplicaId) -> bool:
        """Whether that Replica is on it."""
        return any(one.replica == replica for one in self.shelf(id).incumbents)

    def lock(self, of: Slice) -> None:
        """A Replica is about to start on its Device: no other may start on any Slice of that."""
        for id in self.yard.beside(of.device):
            self.change(id).locked = True
            self.yard.sync(self._changed[id])

    # --- strangers ----------------------------------------------------------------------------------------------------

    def strangers(self, want: PlacementRequest, of: Slice) -> tuple[Occupant, ...]:
        """Those in its Domain with whom the PlacementRequest may not be there."""
        if not self.yard.company.among_strangers(domain_of(of), want.trust):
            return ()
        beside = (one for id in self.yard.together(of) for one in self.shelf(id).incumbents)
        return tuple({one.replica: one for one in beside if has_tenant_conflict(want.trust, one.trust)}.values())

    def promise(self, want: PlacementRequest, of: Slice) -> None:
        """From now on no stranger is put in its Domain."""
        domain = domain_of(of)
        if domain is not None:
            self.yard.company.expect(domain, want.trust)

    # --- hosts --------------------------------------------------------------------------------------------------------

    def host(self, node: NodeId) -> HostResources | None:
        """None: nothing is known of it, and any amount fits."""
        return self.hosts.get(node) or self.yard.hosts.get(node)

    def suppose(self, node: NodeId, host: HostResources) -> None:
        """It is like that now. Where not every PlacementRequest has enough there, what was worked out about its Slices
        is void.
        """
        self.hosts[node] = host
        self.yard.suppose(node, host)
        for listener in () if host.left.holds(self._most) else self.listeners:
            listener.reconsider(self.yard.slices_of(node))

    def around(self, node: NodeId) -> Iterator[Occupant]:
        """Who is on a node."""
        return (one for id in self.yard.slices_of(node) for one in self.shelf(id).incumbents)

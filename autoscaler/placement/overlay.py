"""The working state of one packer call: changed slices and hosts on top of a slice index.

Listeners that cache results about slices are notified of each change. The slices in the index are not modified, but its
`NodeArrays` is kept up to date; the packer rewinds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from autoscaler.contract import ReplicaId
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.tenant_isolation import domain_of, has_tenant_conflict
from autoscaler.placement.model.types import Bin, Occupant, PlacementRequest
from autoscaler.state.resources import HostAmount, HostResources
from autoscaler.state.world import NodeId, Slice, SliceId


class SliceCache(Protocol):
    """Caches results per slice."""

    def forget(self, ids: Iterable[SliceId]) -> None:
        """Drop the cached results of these slices, which changed."""

    def reconsider(self, ids: Iterable[SliceId]) -> None:
        """Recompute results of these slices: CPU or memory of their node changed, so they may be cheaper now."""


class Overlay:
    """`most`: the largest CPU and memory request of this call."""

    def __init__(self, index: SliceIndex, most: HostAmount) -> None:
        self.index = index
        self.listeners: list[SliceCache] = []
        self.hosts: dict[NodeId, HostResources] = {}
        """Current state of the hosts that changed."""
        self.gone: set[ReplicaId] = set()
        """Replicas evicted so far."""
        self._most = most
        self._changed: dict[SliceId, Bin] = {}

    def shelf(self, id: SliceId) -> Bin:
        """Return the current state of a slice; the caller must not modify it."""
        return self._changed.get(id) or self.index.shelf(id)

    def is_changed(self, id: SliceId) -> bool:
        """Whether it may differ from the index."""
        return id in self._changed

    def change(self, id: SliceId) -> Bin:
        """Return a `Bin` that the caller may modify. Cached results of it, and of its whole domain, are dropped."""
        if id not in self._changed:
            self._changed[id] = self.index.shelf(id).copy()
        for listener in self.listeners:
            listener.forget(self.index.together(self._changed[id].slice))
        return self._changed[id]

    def holds(self, id: SliceId, replica: ReplicaId) -> bool:
        """Whether the replica is on that slice."""
        return any(one.replica == replica for one in self.shelf(id).incumbents)

    def lock(self, of: Slice) -> None:
        """Lock the slice's device: a replica is about to start, so no other may start on any slice of it."""
        for id in self.index.slices_on(of.device):
            self.change(id).locked = True
            self.index.sync(self._changed[id])

    # --- tenant isolation ---------------------------------------------------------------------------------------------

    def strangers(self, want: PlacementRequest, of: Slice) -> tuple[Occupant, ...]:
        """Return the replicas in its domain whose tenants conflict with the request's."""
        if not self.index.occupancy.among_strangers(domain_of(of), want.trust):
            return ()
        occupants = (one for id in self.index.together(of) for one in self.shelf(id).incumbents)
        return tuple({one.replica: one for one in occupants if has_tenant_conflict(want.trust, one.trust)}.values())

    def promise(self, want: PlacementRequest, of: Slice) -> None:
        """Reserve the domain of the slice for the tenants of the request: conflicting tenants get no slice of it."""
        domain = domain_of(of)
        if domain is not None:
            self.index.occupancy.expect(domain, want.trust)

    # --- hosts --------------------------------------------------------------------------------------------------------

    def host(self, node: NodeId) -> HostResources | None:
        """Return the current host resources of a node. None: they are unknown, and any amount fits."""
        return self.hosts.get(node) or self.index.hosts.get(node)

    def suppose(self, node: NodeId, host: HostResources) -> None:
        """Set a node's host resources.
        Unless every request has enough of them there, cached results of the node's slices are computed again.
        """
        self.hosts[node] = host
        self.index.suppose(node, host)
        for listener in () if host.left.holds(self._most) else self.listeners:
            listener.reconsider(self.index.slices_of(node))

    def around(self, node: NodeId) -> Iterator[Occupant]:
        """Yield the replicas on a node."""
        return (one for id in self.index.slices_of(node) for one in self.shelf(id).incumbents)

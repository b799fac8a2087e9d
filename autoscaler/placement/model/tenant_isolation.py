"""Which Models may be on one Device where only a cluster's way of sharing keeps them apart.

Owns what trust is: the Tenants that a Model lists. Two Models are strangers where both list some and share none; one
that lists none is for everybody, and so is strange to nobody. Strangers never share a Device by time-slicing, MPS or
the like (one process there can stop all others, and read what they left); partitions of the hardware they do, and the
devices of one machine, where one person decides. Knows who is where, and no room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autoscaler.contract import TenantName
from autoscaler.slicing.nvidia_sharing import KAI, MPS, TIMESLICE, VOLCANO
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId

_OTHERS_CHOOSE = frozenset({TIMESLICE, MPS, KAI, VOLCANO})
"""Kinds of which another says which Device of the node it is. Volcano takes ours only since July 2026."""
TenantSet = tuple[TenantName, ...]
"""The Tenants that a Model is for, sorted; empty: everybody."""
NOBODY: Final[TenantSet] = (TenantName(""),)
"""For whom it is, is not known, or it is for none: a stranger to all that list somebody."""
TRUSTS_MAX: Final = 256
"""Different ones for which it is kept where they may be."""
Domain = tuple[NodeId, DeviceId | None]
"""All that may come to be on one Device; None: any of the node's, for its kubelet, or KAI, chooses among them."""


def has_tenant_conflict(one: TenantSet, other: TenantSet) -> bool:
    """Whether these may not be on one Device."""
    return bool(one and other) and not set(one) & set(other)


def domain_of(slice_: Slice) -> Domain | None:
    """Where no stranger may be beside who is on it; None: strangers do not count, for more than a cluster's way of
    sharing keeps them apart, or the Device is the machine's own.
    """
    if not slice_.kind or slice_.isolation == Isolation.HARDWARE:
        return None
    return slice_.node, None if slice_.kind in _OTHERS_CHOOSE else slice_.device


def group_slices_by_domain(slices: Iterable[Slice]) -> dict[Domain, list[SliceId]]:
    """The Slices of each Domain, in their order."""
    found: dict[Domain, list[SliceId]] = {}
    for slice_ in slices:
        domain = domain_of(slice_)
        if domain is not None:
            found.setdefault(domain, []).append(slice_.id)
    return found


class DomainOccupancy:
    """Who is in which Domain. `lanes`: the numbers of each Domain's Slices among `many`."""

    def __init__(self, lanes: Mapping[Domain, Sequence[int]], many: int) -> None:
        self._lanes, self._many = lanes, many
        self._there: dict[Domain, frozenset[TenantSet]] = {}
        self._guests: dict[Domain, set[TenantSet]] = {}
        self._free: dict[TenantSet, NDArray[np.bool_]] = {}

    def put(self, domain: Domain, trusts: Iterable[TenantSet]) -> None:
        """They are there, and nobody else. Who is for everybody need not be named."""
        there = frozenset(one for one in trusts if one)
        if there != self._there.get(domain, frozenset()):
            if there:
                self._there[domain] = there
            else:
                del self._there[domain]
            self._mark(domain)

    def expect(self, domain: Domain, trust: TenantSet) -> None:
        """One is about to come: for those who ask later it counts as there, until `forget`."""
        if trust:
            self._guests.setdefault(domain, set()).add(trust)
            self._mark(domain)

    def forget(self) -> None:
        """Nobody is about to come."""
        domains, self._guests = [*self._guests], {}
        for domain in domains:
            self._mark(domain)

    def expects_stranger(self, domain: Domain | None, trust: TenantSet) -> bool:
        """Whether a stranger is about to come."""
        return domain is not None and any(has_tenant_conflict(trust, one) for one in self._guests.get(domain, ()))

    def among_strangers(self, domain: Domain | None, trust: TenantSet) -> bool:
        """Whether a stranger is there."""
        return domain is not None and any(has_tenant_conflict(trust, one) for one in self._there.get(domain, ()))

    def free(self, trust: TenantSet) -> NDArray[np.bool_] | None:
        """[lanes]: where no stranger is, nor is about to come; None: anywhere."""
        if not trust or not (self._there or self._guests):
            return None
        if trust not in self._free:
            if len(self._free) >= TRUSTS_MAX:
                self._free.clear()
            made = self._free[trust] = np.ones(self._many, bool)
            for domain in self._there.keys() | self._guests.keys():
                made[self._lanes[domain]] = not self._strange(domain, trust)
        return self._free[trust]

    def strange(self, trust: TenantSet) -> NDArray[np.bool_]:
        """[lanes]: where a stranger is."""
        found = np.zeros(self._many, bool)
        for domain in self._there:
            found[self._lanes[domain]] = self.among_strangers(domain, trust)
        return found

    def _mark(self, domain: Domain) -> None:
        for trust, free in self._free.items():
            free[self._lanes[domain]] = not self._strange(domain, trust)

    def _strange(self, domain: Domain, trust: TenantSet) -> bool:
        return self.among_strangers(domain, trust) or self.expects_stranger(domain, trust)

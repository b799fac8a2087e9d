"""Tenant isolation: which models may share a device that only a cluster's sharing mode partitions.

Two models conflict if both list tenants and have none in common; a model without a tenant list conflicts with no other.
Conflicting models never share a device by time-slicing, MPS or similar modes, because a process there can stop all
others and read memory that they left. They may use different hardware partitions of one device, and may share the
devices of a single machine, which has one administrator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autoscaler.contract import TenantName
from autoscaler.slicing.hami import VOLCANO
from autoscaler.slicing.kai import KAI
from autoscaler.slicing.nvidia_device_plugin import MPS, TIMESLICE
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId

_OTHERS_CHOOSE = frozenset({TIMESLICE, MPS, KAI, VOLCANO})
"""Sharing modes in which another component chooses the device. Volcano accepts a chosen device only since July 2026."""
TenantSet = tuple[TenantName, ...]
"""The tenants that a model is limited to, sorted; empty: no limit."""
NO_TENANT: Final[TenantSet] = (TenantName(""),)
"""For a model with an empty tenant list, or of unknown tenants: conflicts with all models that list tenants."""
TRUSTS_MAX: Final = 256
"""Tenant sets with a cached mask of free lanes."""
Domain = tuple[NodeId, DeviceId | None]
"""All slices that may use one device. None: any device of the node, since its kubelet or KAI chooses."""


def has_tenant_conflict(one: TenantSet, other: TenantSet) -> bool:
    """Whether models of these tenants may not share a device."""
    return bool(one and other) and not set(one) & set(other)


def domain_of(slice_: Slice) -> Domain | None:
    """Return the domain that conflicting tenants may not share. None: tenants do not matter, because the slice is
    isolated by hardware or the device belongs to a single machine.
    """
    if not slice_.kind or slice_.isolation == Isolation.HARDWARE:
        return None
    return slice_.node, None if slice_.kind in _OTHERS_CHOOSE else slice_.device


def group_slices_by_domain(slices: Iterable[Slice]) -> dict[Domain, list[SliceId]]:
    """Group the slices by domain, in their order."""
    found: dict[Domain, list[SliceId]] = {}
    for slice_ in slices:
        domain = domain_of(slice_)
        if domain is not None:
            found.setdefault(domain, []).append(slice_.id)
    return found


class DomainOccupancy:
    """Tracks the tenant sets in each domain. `lanes`: the lane numbers of each domain; `many`: how many lanes exist."""

    def __init__(self, lanes: Mapping[Domain, Sequence[int]], many: int) -> None:
        self._lanes, self._many = lanes, many
        self._there: dict[Domain, frozenset[TenantSet]] = {}
        self._guests: dict[Domain, set[TenantSet]] = {}
        self._free: dict[TenantSet, NDArray[np.bool_]] = {}

    def put(self, domain: Domain, trusts: Iterable[TenantSet]) -> None:
        """Set the tenant sets in a domain. Models without a tenant limit can be left out."""
        there = frozenset(one for one in trusts if one)
        if there != self._there.get(domain, frozenset()):
            if there:
                self._there[domain] = there
            else:
                del self._there[domain]
            self._mark(domain)

    def expect(self, domain: Domain, trust: TenantSet) -> None:
        """Record an expected arrival: it counts as present until `forget`."""
        if trust:
            self._guests.setdefault(domain, set()).add(trust)
            self._mark(domain)

    def forget(self) -> None:
        """Drop all expected arrivals."""
        domains, self._guests = [*self._guests], {}
        for domain in domains:
            self._mark(domain)

    def expects_stranger(self, domain: Domain | None, trust: TenantSet) -> bool:
        """Whether a conflicting tenant set is expected there."""
        return domain is not None and any(has_tenant_conflict(trust, one) for one in self._guests.get(domain, ()))

    def among_strangers(self, domain: Domain | None, trust: TenantSet) -> bool:
        """Whether a conflicting tenant set is present there."""
        return domain is not None and any(has_tenant_conflict(trust, one) for one in self._there.get(domain, ()))

    def free(self, trust: TenantSet) -> NDArray[np.bool_] | None:
        """[lanes]: where no conflicting tenant set is present or expected. None: everywhere."""
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
        """[lanes]: where a conflicting tenant set is present."""
        found = np.zeros(self._many, bool)
        for domain in self._there:
            found[self._lanes[domain]] = self.among_strangers(domain, trust)
        return found

    def _mark(self, domain: Domain) -> None:
        for trust, free in self._free.items():
            free[self._lanes[domain]] = not self._strange(domain, trust)

    def _strange(self, domain: Domain, trust: TenantSet) -> bool:
        return self.among_strangers(domain, trust) or self.expects_stranger(domain, trust)

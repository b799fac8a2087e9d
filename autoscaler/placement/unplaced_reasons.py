"""Explains why requests cannot be placed: fragmentation of free room, and the obstacle on the most suitable slices.

Evaluates many slices at once; `autoscaler.placement.model.predicates` produces the sentences. Results that do not
depend on free room are cached until labels or taints change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from autoscaler.placement.index.node_search import Flags
from autoscaler.placement.index.residual_waste_tables import Ints
from autoscaler.placement.model.predicates import (
    host_shortage_reason,
    never_reason,
    node_exclusion_reason,
    node_too_small_reason,
    reservation_reason,
    tenant_conflict_reason,
)
from autoscaler.placement.model.tenant_isolation import domain_of
from autoscaler.placement.model.types import Bin, NodeConstraints, PlacementRequest
from autoscaler.spec.pod import Toleration
from autoscaler.state.resources import BYTES_MAX, HostAmount, RequestShape
from autoscaler.state.world import SliceId

if TYPE_CHECKING:
    from autoscaler.placement.index.index import SliceIndex


class Pieces(NamedTuple):
    """Free room on slices that could hold a shape: whole slices if it needs several devices, else bytes."""

    need: int
    total: int
    most: int
    """The maximum in one place: a node (or link) for several devices, else a slice."""
    places: tuple[tuple[SliceId, ...], ...]
    """The suitable slices of each place, the place with the most free room first."""


def pieces_of(index: SliceIndex, kind: RequestShape, choice: NodeConstraints, many: int) -> Pieces:
    """Return the free room on slices where it fits if they are empty, and at most `many` places with the most of it."""
    ask, arrays, could = index.ask(kind), index.arrays, index.possible(kind, choice)
    if kind.devices > 1:
        fits = could & (arrays.left_bytes >= ask.memory[arrays.lane_of])
        teams = index.teams(kind.link)
        free = np.bincount(teams[fits], minlength=len(index.nodes) + len(teams))
        enough = np.bincount(teams[could], minlength=len(free)) >= kind.devices
        groups = [np.flatnonzero(could & (teams == team)) for team in _most(free, enough, many)]
        need = kind.devices
    else:
        free = np.where(could, arrays.left_bytes, 0)
        groups = [np.array([lane]) for lane in _most(free, could, many)]
        need = int(ask.memory[arrays.lane_of][could].min(initial=BYTES_MAX))
    places = tuple(tuple(index.id_of(int(at)) for at in group) for group in groups)
    return Pieces(need, int(free.sum()), int(free.max(initial=0)), places)


def _most(free: Ints, flags: Flags, many: int) -> list[int]:
    """Return the `many` flagged indices with the most free, in order."""
    at = np.flatnonzero(flags)
    return [int(one) for one in at[np.lexsort((at, -free[at]))][:many]]


if TYPE_CHECKING:
    from autoscaler.placement.index.index import SliceIndex

ANSWERS_MAX: Final = 4096
EVERYTHING: Final = (Toleration(operator="Exists"),)
"""Tolerates every taint."""

Selector = tuple[tuple[str, str], ...]


class UnschedulableReasons:
    """The reasons for the slices of one index."""

    def __init__(self, index: SliceIndex) -> None:
        self._index = index
        self._never: dict[tuple[RequestShape, Selector], str | None] = {}
        self._samples: dict[Selector, tuple[SliceId, ...]] = {}

    def forget(self) -> None:
        """Drop cached results because labels or taints changed."""
        self._never.clear()
        self._samples.clear()

    def never(self, want: PlacementRequest) -> str | None:
        """Explain why the request fits on no slice, even an empty one. None: it fits on one."""
        want = want.least
        key = want.kind, want.choice.selector
        if key not in self._never:
            if len(self._never) >= ANSWERS_MAX:
                self._never.clear()
            could = self._on_device(want)
            most = int(np.bincount(self._index.teams(want.kind.link)[could]).max()) if could.any() else 0
            kinds = [self._index.shelves[id] for id in self._kinds(want.choice.selector)]
            self._never[key] = never_reason(want, kinds, most) or self._too_small(want, could)
        return self._never[key]

    def _too_small(self, want: PlacementRequest, could: Flags) -> str | None:
        """Explain why no node with enough devices has enough CPU or memory, even if empty. None: one has."""
        arrays, nodes = self._index.arrays, self._with_enough(want, could)
        if (nodes & self._large(want)).any():
            return None
        return node_too_small_reason(want, int(arrays.cpu_size[nodes].max()), int(arrays.host_size[nodes].max()))

    def scarce(self, want: PlacementRequest) -> str:
        """Explain the shortage of the node with enough devices and the most CPU and memory left; empty: none."""
        arrays, may = self._index.arrays, self._index.where_it_may(want.choice)
        nodes = self._with_enough(want, arrays.fitting(self._index.ask(want.kind)))
        if may is not None:
            nodes &= may
        found = np.flatnonzero(nodes)
        if not len(found):
            return ""
        best = int(found[np.lexsort((arrays.host_bytes[found], arrays.cpu[found]))[-1]])
        node = self._index.nodes[best]
        host = self._index.hosts.get(node)
        if host is None:
            return ""
        left = HostAmount(int(arrays.cpu[best]), int(arrays.host_bytes[best]))
        return host_shortage_reason(want, host.having(left), f"node {node}")

    def _with_enough(self, want: PlacementRequest, lanes: Flags) -> Flags:
        """[nodes]: those with enough of these lanes for the request, connected by the required link."""
        arrays, least = self._index.arrays, max(1, want.kind.devices)
        if want.kind.link:
            teams = self._index.teams(want.kind.link)
            at = np.flatnonzero(lanes & (teams >= 0))
            found = np.zeros(len(arrays.nodes), bool)
            found[arrays.node_of[at[np.bincount(teams[at], minlength=1)[teams[at]] >= least]]] = True
            return found
        enough: Flags = np.bincount(arrays.node_of[lanes], minlength=len(arrays.nodes)) >= least
        return enough

    def roomiest(self, want: PlacementRequest) -> SliceId | None:
        """Return the suitable open slice with the most room. None: none is open."""
        arrays, may = self._index.arrays, self._index.where_it_may(want.choice)
        could, free = self._could(want) & ~arrays.shut, self._index.occupancy.free(want.trust)
        if may is not None:
            could &= may[arrays.node_of]
        if free is not None:
            could &= free
        if not could.any():
            return None
        for left in (arrays.left_bytes, arrays.left_percent):
            could &= left == left[could].max()
        return self._index.id_of(int(np.flatnonzero(could)[-1]))

    def team(self, want: PlacementRequest) -> tuple[SliceId, ...]:
        """Return the suitable slices of the open node with the most free ones; empty: no node has enough devices."""
        places = pieces_of(self._index, want.kind, want.choice, 1).places
        return places[0] if places else ()

    def closed(self, want: PlacementRequest) -> str:
        """Explain why a suitable slice is closed to the request: the first such reason; empty: none is closed."""
        may, arrays = self._index.where_it_may(want.choice), self._index.arrays
        kept, free = (
            arrays.shut if may is None else arrays.shut | ~may[arrays.node_of],
            self._index.occupancy.free(want.trust),
        )
        kept = kept if free is None else kept | ~free
        shelves = (self._index.shelves[self._index.id_of(int(at))] for at in np.flatnonzero(self._could(want) & kept))
        found = (
            one.closed or node_exclusion_reason(want.choice, one.slice) or self._kept_by(want, one) for one in shelves
        )
        return next(filter(None, found), "")

    def _kept_by(self, want: PlacementRequest, shelf: Bin) -> str:
        domain = domain_of(shelf.slice)
        if self._index.occupancy.expects_stranger(domain, want.trust):
            return reservation_reason(shelf.slice)
        together = (self._index.shelf(id) for id in self._index.together(shelf.slice))
        return tenant_conflict_reason(want, shelf.slice, (one for other in together for one in other.incumbents))

    def _could(self, want: PlacementRequest) -> Flags:
        """[lanes]: those where it fits if they are empty and open."""
        could: Flags = self._on_device(want) & self._large(want)[self._index.arrays.node_of]
        return could

    def _large(self, want: PlacementRequest) -> Flags:
        """[nodes]: those with enough CPU and memory for it if they are empty."""
        arrays = self._index.arrays
        large: Flags = (arrays.cpu_size >= want.kind.cpu_milli) & (arrays.host_size >= want.kind.host_bytes)
        return large

    def _on_device(self, want: PlacementRequest) -> Flags:
        """[lanes]: those where it fits if they are empty, regardless of host resources."""
        arrays = self._index.arrays
        could: Flags = self._index.ask(want.kind).memory[arrays.lane_of] <= arrays.size_bytes
        if want.kind.link:
            could &= self._index.teams(want.kind.link) >= 0
        labelled = self._labelled(want.choice.selector)
        return could if labelled is None else could & labelled[arrays.node_of]

    def _labelled(self, selector: Selector) -> Flags | None:
        """[nodes]: those with these labels. None: all."""
        return self._index.where_it_may(NodeConstraints(selector, EVERYTHING, ())) if selector else None

    def _kinds(self, selector: Selector) -> tuple[SliceId, ...]:
        """Return one slice of each kind, with these labels and without."""
        if selector not in self._samples:
            labelled, arrays = self._labelled(selector), self._index.arrays
            kinds = 2 * arrays.lane_of + (0 if labelled is None else labelled[arrays.node_of])
            first = np.unique(kinds, return_index=True)[1]
            self._samples[selector] = tuple(self._index.id_of(int(at)) for at in sorted(first))
        return self._samples[selector]

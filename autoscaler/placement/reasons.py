"""What is free in pieces: of what could hold a Kind, how much, and where most of it is. It moves nobody.

Why a PlacementRequest is not placed: what of all Slices keeps it off, found among many at once.

Owns the questions that people ask of a Yard when there is no room; `autoscaler.placement.model.predicates` has the
sentences. What does not change with what is free is kept until labels or taints do. It chooses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from autoscaler.placement.index.node_arrays import Flags
from autoscaler.placement.index.residual_waste import Ints
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
from autoscaler.state.resources import BYTES_MAX, Beside, RequestShape
from autoscaler.state.world import SliceId

if TYPE_CHECKING:
    from autoscaler.placement.index.index import SliceIndex


class Pieces(NamedTuple):
    """What is free of what could hold a Kind: whole Slices for who needs several, else bytes."""

    need: int
    total: int
    most: int
    """Of one place: a node, or a link of one, for who needs several, else a Slice."""
    places: tuple[tuple[SliceId, ...], ...]
    """Those that could hold it, were nobody there, the roomiest first: their Slices."""


def pieces_of(yard: SliceIndex, kind: RequestShape, choice: NodeConstraints, many: int) -> Pieces:
    """What is free of what could hold it, and where most of it is: `many` such places at most."""
    ask, stock, could = yard.ask(kind), yard.stock, yard.possible(kind, choice)
    if kind.devices > 1:
        fits = could & (stock.left_bytes >= ask.memory[stock.lane_of])
        teams = yard.teams(kind.link)
        free = np.bincount(teams[fits], minlength=len(yard.nodes) + len(teams))
        enough = np.bincount(teams[could], minlength=len(free)) >= kind.devices
        groups = [np.flatnonzero(could & (teams == team)) for team in _most(free, enough, many)]
        need = kind.devices
    else:
        free = np.where(could, stock.left_bytes, 0)
        groups = [np.array([lane]) for lane in _most(free, could, many)]
        need = int(ask.memory[stock.lane_of][could].min(initial=BYTES_MAX))
    places = tuple(tuple(yard.id_of(int(at)) for at in group) for group in groups)
    return Pieces(need, int(free.sum()), int(free.max(initial=0)), places)


def _most(free: Ints, flags: Flags, many: int) -> list[int]:
    """Of the flagged ones those with the most, in order."""
    at = np.flatnonzero(flags)
    return [int(one) for one in at[np.lexsort((at, -free[at]))][:many]]


if TYPE_CHECKING:
    from autoscaler.placement.index.index import SliceIndex

ANSWERS_MAX: Final = 4096
EVERYTHING: Final = (Toleration(operator="Exists"),)
"""Tolerates every taint."""

Selector = tuple[tuple[str, str], ...]


class UnschedulableReasons:
    """Of one Yard."""

    def __init__(self, yard: SliceIndex) -> None:
        self._yard = yard
        self._never: dict[tuple[RequestShape, Selector], str | None] = {}
        self._samples: dict[Selector, tuple[SliceId, ...]] = {}

    def forget(self) -> None:
        """Labels or taints are others now."""
        self._never.clear()
        self._samples.clear()

    def never(self, want: PlacementRequest) -> str | None:
        """Why no Slice could hold the PlacementRequest, however empty; None: one could."""
        want = want.least
        key = want.kind, want.selector
        if key not in self._never:
            if len(self._never) >= ANSWERS_MAX:
                self._never.clear()
            could = self._on_device(want)
            most = int(np.bincount(self._yard.teams(want.link)[could]).max()) if could.any() else 0
            kinds = [self._yard.shelves[id] for id in self._kinds(want.selector)]
            self._never[key] = never_reason(want, kinds, most) or self._too_small(want, could)
        return self._never[key]

    def _too_small(self, want: PlacementRequest, could: Flags) -> str | None:
        """Where no node with Devices enough has enough beside them, however empty."""
        stock, nodes = self._yard.stock, self._with_enough(want, could)
        if (nodes & self._large(want)).any():
            return None
        return node_too_small_reason(want, int(stock.cpu_size[nodes].max()), int(stock.host_size[nodes].max()))

    def scarce(self, want: PlacementRequest) -> str:
        """Of the nodes with Devices enough the one with the most beside them, which is too little; empty: none."""
        stock, may = self._yard.stock, self._yard.where_it_may(want.choice)
        nodes = self._with_enough(want, stock.fitting(self._yard.ask(want.kind)))
        if may is not None:
            nodes &= may
        found = np.flatnonzero(nodes)
        if not len(found):
            return ""
        best = int(found[np.lexsort((stock.host_bytes[found], stock.cpu[found]))[-1]])
        node = self._yard.nodes[best]
        host = self._yard.hosts.get(node)
        if host is None:
            return ""
        left = Beside(int(stock.cpu[best]), int(stock.host_bytes[best]))
        return host_shortage_reason(want, host.having(left), f"node {node}")

    def _with_enough(self, want: PlacementRequest, lanes: Flags) -> Flags:
        """[nodes]: those with as many of these lanes as it needs, joined as it needs them."""
        stock, least = self._yard.stock, max(1, want.devices)
        if want.link:
            teams = self._yard.teams(want.link)
            at = np.flatnonzero(lanes & (teams >= 0))
            found = np.zeros(len(stock.nodes), bool)
            found[stock.node_of[at[np.bincount(teams[at], minlength=1)[teams[at]] >= least]]] = True
            return found
        enough: Flags = np.bincount(stock.node_of[lanes], minlength=len(stock.nodes)) >= least
        return enough

    def roomiest(self, want: PlacementRequest) -> SliceId | None:
        """Of the Slices that could hold it and are open the one with the most room; None: none is open."""
        stock, may = self._yard.stock, self._yard.where_it_may(want.choice)
        could, free = self._could(want) & ~stock.shut, self._yard.company.free(want.trust)
        if may is not None:
            could &= may[stock.node_of]
        if free is not None:
            could &= free
        if not could.any():
            return None
        for left in (stock.left_bytes, stock.left_percent):
            could &= left == left[could].max()
        return self._yard.id_of(int(np.flatnonzero(could)[-1]))

    def team(self, want: PlacementRequest) -> tuple[SliceId, ...]:
        """Of the nodes with Devices enough that are open: those of the one that has the most free; empty: there is
        none.
        """
        places = pieces_of(self._yard, want.kind, want.choice, 1).places
        return places[0] if places else ()

    def closed(self, want: PlacementRequest) -> str:
        """What keeps the PlacementRequest from a Slice that could hold it, in words: the first such reason; empty:
        nothing does.
        """
        may, stock = self._yard.where_it_may(want.choice), self._yard.stock
        kept, free = (
            stock.shut if may is None else stock.shut | ~may[stock.node_of],
            self._yard.company.free(want.trust),
        )
        kept = kept if free is None else kept | ~free
        shelves = (self._yard.shelves[self._yard.id_of(int(at))] for at in np.flatnonzero(self._could(want) & kept))
        found = (
            one.closed or node_exclusion_reason(want.choice, one.slice) or self._kept_by(want, one) for one in shelves
        )
        return next(filter(None, found), "")

    def _kept_by(self, want: PlacementRequest, shelf: Bin) -> str:
        domain = domain_of(shelf.slice)
        if self._yard.company.expects_stranger(domain, want.trust):
            return reservation_reason(shelf.slice)
        together = (self._yard.shelf(id) for id in self._yard.together(shelf.slice))
        return tenant_conflict_reason(want, shelf.slice, (one for other in together for one in other.incumbents))

    def _could(self, want: PlacementRequest) -> Flags:
        """[lanes]: those that could hold it, were nobody there and all open."""
        could: Flags = self._on_device(want) & self._large(want)[self._yard.stock.node_of]
        return could

    def _large(self, want: PlacementRequest) -> Flags:
        """[nodes]: those with enough beside their Devices, were nobody there."""
        stock = self._yard.stock
        large: Flags = (stock.cpu_size >= want.cpu_milli) & (stock.host_size >= want.host_bytes)
        return large

    def _on_device(self, want: PlacementRequest) -> Flags:
        """The same of the Device alone."""
        stock = self._yard.stock
        could: Flags = self._yard.ask(want.kind).memory[stock.lane_of] <= stock.size_bytes
        if want.link:
            could &= self._yard.teams(want.link) >= 0
        labelled = self._labelled(want.selector)
        return could if labelled is None else could & labelled[stock.node_of]

    def _labelled(self, selector: Selector) -> Flags | None:
        """[nodes]: those with these labels; None: all."""
        return self._yard.where_it_may(NodeConstraints(selector, EVERYTHING, ())) if selector else None

    def _kinds(self, selector: Selector) -> tuple[SliceId, ...]:
        """One of each kind of Slice, with those labels and without."""
        if selector not in self._samples:
            labelled, stock = self._labelled(selector), self._yard.stock
            kinds = 2 * stock.lane_of + (0 if labelled is None else labelled[stock.node_of])
            first = np.unique(kinds, return_index=True)[1]
            self._samples[selector] = tuple(self._yard.id_of(int(at)) for at in sorted(first))
        return self._samples[selector]

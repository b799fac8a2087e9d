"""Array index of evictable replicas: for many slices at once, a lower bound of the eviction cost and the freed room.

Has a row for each evictable replica on each slice, and the room free or coming on each slice. It is reused between
packer calls: only changed slices are read again, on demand. Invariant: results equal those of
`autoscaler.placement.model.predicates.can_evict` for every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.index.residual_waste_tables import Ints
from autoscaler.placement.model.types import Bin, EvictionLevel, Occupant, PlacementRequest, RestartCosts

K = TypeVar("K")
Floats = NDArray[np.float64]
_LANE, _PRIORITY, _BUSY, _KEPT, _ROOM = range(5)
_FIELDS: Final = _ROOM + 3
"""Integer fields of a row: the four above, and the three amounts of its room."""


class EvictionCost(NamedTuple):
    """Eviction costs for the slices on which a request may evict, as arrays over these lanes, in order."""

    lanes: Ints
    rooms: Ints
    """[3, lanes]: memory, compute and places held by all evictable replicas together."""
    busy: Ints
    priority: Ints
    restart_s: Floats
    """`busy`, `priority`, `restart_s`: minimum over the replicas (`autoscaler.placement.eviction.eviction_cost`)."""
    cost: Ints
    """Rank in lexicographic order of these three."""


class EvictionCostIndex:
    """`lanes`: number of lanes, numbered as in `NodeArrays`."""

    def __init__(self, lanes: int) -> None:
        self.soon: Ints = np.zeros((3, lanes), np.int64)
        """[3, lanes]: per slice, the memory, compute and replica places that are free, or will be when leaving replicas
        are gone.
        """
        self.few: Ints = np.zeros(lanes, np.int64)
        """[lanes]: number of places that a replica takes there, 1 or 0."""
        self._stale = set(range(lanes))
        self._restart_costs: RestartCosts | None = None
        self._rows: Ints = np.full((_FIELDS, 0), -1, np.int64)
        self._until_s: Floats = np.zeros(0)
        self._restart_s: Floats = np.zeros(0)
        self._who: list[Occupant | None] = []
        """Occupant by row; None: the row is free."""
        self._unused: list[int] = []
        self._on: dict[int, list[int]] = {}
        self._of_model: dict[ModelName, set[int]] = {}
        self._of_replica: dict[ReplicaId, set[int]] = {}
        """`_on`, `_of_model`, `_of_replica`: rows by lane, model and replica."""
        self._order: Ints = np.zeros(0, np.int64)
        """Rows in use, sorted by lane."""
        self._at: Ints = np.zeros(0, np.int64)
        """Position of a row in `_order`."""
        self._ranks: Ints = np.zeros((2, 0), np.int64)
        """In order of `_order`: ranks of priority and restart cost."""

    @property
    def rows(self) -> int:
        """Number of allocated rows."""
        return len(self._who)

    def put(self, lane: int, shelf: Bin) -> None:
        """Update a slice's room; its occupants are read later."""
        soon = shelf.free.plus(shelf.coming)
        self.soon[:, lane] = soon.memory_bytes, soon.compute_percent, soon.places
        self.few[lane] = shelf.slice.holders_max > 0
        self._stale.add(lane)

    def stir(self, lanes: Iterable[int]) -> None:
        """Mark the occupants of these lanes as possibly changed."""
        self._stale.update(lanes)

    def look(self, shelf: Callable[[int], Bin], restart_costs: RestartCosts) -> None:
        """Read the slices that changed. If `restart_costs` is another one, restart costs are computed again first."""
        if restart_costs is not self._restart_costs:
            self._restart_costs = restart_costs
            known = {one.model: restart_costs.restart_s(one.model) for one in self._who if one is not None}
            self._restart_s[:] = [0.0 if one is None else known[one.model] for one in self._who]
        elif not self._stale:
            return
        lanes, self._stale = sorted(self._stale), set()
        for lane in lanes:
            self._clear(lane)
        found = [(lane, one) for lane in lanes for one in shelf(lane).incumbents if not one.leaving]
        self._write(self._take(len(found)), found, restart_costs)
        used = np.flatnonzero(self._rows[_LANE] >= 0)
        self._order = used[np.argsort(self._rows[_LANE, used], kind="stable")]
        self._at = np.zeros(len(self._who), np.int64)
        self._at[self._order] = np.arange(len(self._order))
        values = self._rows[_PRIORITY, self._order], self._restart_s[self._order]
        self._ranks = np.array([np.unique(one, return_inverse=True)[1] for one in values], np.int64).reshape(2, -1)

    def next_s(self, now_s: float) -> float | None:
        """Return the time at which the next residency after `now_s` ends."""
        until_s = self._until_s[self._order]
        later = until_s[until_s > now_s]
        return float(later.min()) if len(later) else None

    def grade(self, want: PlacementRequest, now_s: float, gone: Iterable[ReplicaId] = ()) -> EvictionCost:
        """Return the eviction costs for a request, as of the last `look`. `gone`: replicas evicted already."""
        rows, order = self._rows[:, self._order], self._order
        priority, force = want.urgency.priority, want.urgency.force
        lower, same = rows[_PRIORITY] < priority, rows[_PRIORITY] == priority
        may = same & (rows[_KEPT] == 0) & ((rows[_BUSY] == 0) | (force >= EvictionLevel.BUSY))
        may = lower | may if force >= EvictionLevel.IDLE else lower & (force >= EvictionLevel.LOWER)
        may &= now_s >= self._until_s[order]
        for rows_of in (self._of_model.get(want.model, ()), *(self._of_replica.get(one, ()) for one in gone)):
            may[self._at[list(rows_of)]] = False
        at = np.flatnonzero(may)
        lane = rows[_LANE, at]
        first = np.flatnonzero(np.diff(lane, prepend=-1))
        if not len(at):
            none = np.zeros(0, np.int64)
            return EvictionCost(none, np.zeros((3, 0), np.int64), none, none, np.zeros(0), none)
        busy = np.minimum.reduceat(rows[_BUSY, at], first)
        ranks = np.minimum.reduceat(self._ranks[:, at], first, axis=1)
        cost = (busy * (self._ranks[0].max() + 1) + ranks[0]) * (self._ranks[1].max() + 1) + ranks[1]
        return EvictionCost(
            lanes=lane[first],
            rooms=np.add.reduceat(rows[_ROOM:, at], first, axis=1),
            busy=busy,
            priority=np.minimum.reduceat(rows[_PRIORITY, at], first),
            restart_s=np.minimum.reduceat(self._restart_s[order][at], first),
            cost=np.unique(cost, return_inverse=True)[1],
        )

    def _clear(self, lane: int) -> None:
        """Remove all rows of a lane."""
        for row in self._on.pop(lane, ()):
            one, self._who[row] = self._who[row], None
            if one is not None:
                _drop(self._of_model, one.model, row)
                _drop(self._of_replica, one.replica, row)
            self._rows[_LANE, row] = -1
            self._unused.append(row)

    def _take(self, many: int) -> list[int]:
        """Return this many unused rows, allocating more if needed."""
        short = many - len(self._unused)
        if short > 0:
            more = max(short, len(self._who) // 4)
            self._unused += range(len(self._who) + more - 1, len(self._who) - 1, -1)
            self._who += [None] * more
            self._rows = np.pad(self._rows, ((0, 0), (0, more)), constant_values=-1)
            self._until_s, self._restart_s = np.pad(self._until_s, (0, more)), np.pad(self._restart_s, (0, more))
        return [self._unused.pop() for _ in range(many)]

    def _write(self, rows: list[int], found: Sequence[tuple[int, Occupant]], restart_costs: RestartCosts) -> None:
        if not rows:
            return
        values = [(lane, one.priority, one.busy, one.kept, *one.room) for lane, one in found]
        self._rows[:, rows] = np.array(values, np.int64).T
        self._until_s[rows] = [one.evictable_s for _, one in found]
        self._restart_s[rows] = [restart_costs.restart_s(one.model) for _, one in found]
        for row, (lane, one) in zip(rows, found, strict=True):
            self._who[row] = one
            self._on.setdefault(lane, []).append(row)
            self._of_model.setdefault(one.model, set()).add(row)
            self._of_replica.setdefault(one.replica, set()).add(row)


def _drop(rows: dict[K, set[int]], key: K, row: int) -> None:
    rows[key].discard(row)
    if not rows[key]:
        del rows[key]

"""The packer: which Replica goes to which Slice, and who makes room for it.

Owns the choice of Slices and victims, for production, what-if questions and simulation alike. Promises: no Slice is
over-committed; nobody of higher priority, within residency, or awaited makes room; one Want takes victims on one Slice
only (several Devices: of one node), and none while room is coming; the same input in any order gives the same answer.
Placement is best fit in memory, then compute. It never starts or drains anything: `autoscaler.plan` does.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from autoscaler.packing import Force, Incumbent, Missing, Outlook, Packing, Placement, Room, Shelf, Victim, Want
from autoscaler.rulings import evictable, need, product_rank, unmet_reason
from autoscaler.world import Copy, NodeId, SliceId

FREE, LOCKED, COMING, EVICT = range(4)
"""Rungs, cheapest first: room now; room now, but another Replica is starting there; room soon; room by victims."""

Key = tuple[float | int | str, ...]


class Option(NamedTuple):
    """One way to place a Want on one Slice; the smallest `key` is the best."""

    rung: int
    key: Key
    shelf: Shelf
    need: Room
    victims: tuple[Incumbent, ...] = ()


def pack(wanted: Sequence[Want], slices: Sequence[Shelf], copies: Set[Copy], outlook: Outlook, now_s: float) -> Packing:
    """Places what fits, in order of priority, then longest unserved, then name; names victims for what does not.

    A Want with victims is in `unmet` too: it is placed by a later call, when they are gone.
    """
    bench = _Bench(slices, copies, outlook, now_s)
    placements: list[Placement] = []
    victims: list[Victim] = []
    unmet: list[Missing] = []
    hopeless: dict[Want, Missing] = {}
    for want in sorted(wanted, key=_order):
        alike = want._replace(ordinal=0)
        if alike in hopeless:
            unmet.append(hopeless[alike]._replace(want=want))
            continue
        options = bench.best(want)
        if options is None:
            reason, never = unmet_reason(want, slices, list(bench.shelves.values()), now_s)
            hopeless[alike] = Missing(want, reason, never)
            unmet.append(hopeless[alike])
        elif max((option.rung for option in options), default=FREE) == FREE:
            placements.append(bench.place(want, options))
        else:
            unmet.append(Missing(want, bench.wait(options)))
            victims += (Victim(v.replica, v.model, want) for v in bench.evict(options))
    return Packing(tuple(placements), tuple(victims), tuple(unmet))


def _order(want: Want) -> Key:
    return (-want.priority, want.unserved_since_s, want.model, want.ordinal)


def _face(shelf: Shelf) -> Key:
    """What `need` and `product_rank` look at: equal for equal Devices, so that they are asked once."""
    s = shelf.slice
    return (s.memory_bytes, s.compute_percent, s.isolation, s.shared, shelf.whole, s.product)


class _Bench:
    """The Shelves while one call works on them."""

    def __init__(self, slices: Sequence[Shelf], copies: Set[Copy], outlook: Outlook, now_s: float) -> None:
        healthy = sorted((shelf for shelf in slices if shelf.slice.healthy), key=lambda shelf: shelf.slice.id)
        self.shelves: dict[SliceId, Shelf] = {shelf.slice.id: shelf.copy() for shelf in healthy}
        self._faces: dict[Key, list[Shelf]] = {}
        for shelf in self.shelves.values():
            self._faces.setdefault(_face(shelf), []).append(shelf)
        self._now_s = now_s
        self._outlook = outlook
        self._nodes: dict[str, set[NodeId]] = {}
        for copy in copies:
            self._nodes.setdefault(copy.artifact, set()).add(copy.node)

    def best(self, want: Want) -> tuple[Option, ...] | None:
        """The Options to take, one per Device; empty for a Want without Devices; None: there is no way now."""
        if want.devices == 0:
            return ()
        if want.devices > 1:
            return self._node(want)
        free = self._free(want)
        if free is not None:
            return (free,)
        room_soon = self._cheapest(want, victims=False)
        if room_soon is not None:
            return (room_soon,)
        option = self._cheapest(want, victims=True) if want.force > Force.NONE else None
        return None if option is None else (option,)

    def _free(self, want: Want) -> Option | None:
        """The best Slice with room now and nobody starting; the same choice as `_cheapest`, many times faster."""
        near = self._nodes.get(want.artifact, ())
        best: tuple[Key, Shelf, Room] | None = None
        for alike in self._faces.values():
            room, rank = need(want, alike[0]), product_rank(want, alike[0].slice.product)
            if room is None or rank is None:
                continue
            memory_bytes, compute_percent = room
            for shelf in alike:
                free = shelf.free
                if free.memory_bytes < memory_bytes or free.compute_percent < compute_percent or shelf.locked:
                    continue
                away, left = shelf.slice.node not in near, free.memory_bytes - memory_bytes
                key = (
                    rank,
                    away,
                    left,
                    free.compute_percent - compute_percent,
                    shelf.slice.memory_bytes,
                    shelf.slice.id,
                )
                if best is None or key < best[0]:
                    best = (key, shelf, room)
        return None if best is None else Option(FREE, best[0], best[1], best[2])

    def _cheapest(self, want: Want, *, victims: bool) -> Option | None:
        options = (self._option(want, shelf, victims=victims) for shelf in self.shelves.values())
        return min((option for option in options if option is not None), key=lambda o: o.key, default=None)

    def _node(self, want: Want) -> tuple[Option, ...] | None:
        """The node whose `devices` cheapest Devices are the cheapest together."""
        by_node: dict[NodeId, list[Option]] = {}
        for shelf in self.shelves.values():
            option = self._option(want, shelf, victims=True)
            if option is not None:
                by_node.setdefault(shelf.slice.node, []).append(option)
        teams = [
            tuple(sorted(options, key=lambda o: o.key)[: want.devices])
            for options in by_node.values()
            if len(options) >= want.devices
        ]
        return min(teams, key=lambda team: (team[-1].rung, *(o.key for o in reversed(team))), default=None)

    def _option(self, want: Want, shelf: Shelf, *, victims: bool) -> Option | None:
        """The cheapest way to use this Slice, `victims` or not; None: none now."""
        room = need(want, shelf)
        if room is None:
            return None
        rank = product_rank(want, shelf.slice.product)
        if rank is None:
            return None
        chosen: tuple[Incumbent, ...] = ()
        soon = shelf.free.plus(shelf.coming)
        if shelf.free.holds(room):
            rung = LOCKED if shelf.locked else FREE
        elif soon.holds(room):
            rung = COMING
        elif victims:
            chosen = self._victims(want, shelf, room.less(soon))
            rung = EVICT
        if not chosen and not soon.holds(room):
            return None
        away = shelf.slice.node not in self._nodes.get(want.artifact, ())
        after = soon.less(room)
        tie = (shelf.slice.memory_bytes, shelf.slice.id)
        key = (rung, *self._cost(chosen), shelf.locked, rank, away, after.memory_bytes, after.compute_percent, *tie)
        return Option(rung, key, shelf, room, chosen)

    def _cost(self, victims: Sequence[Incumbent]) -> Key:
        """(busy ones, highest priority, seconds to start them again, how many)."""
        if not victims:
            return (0, 0, 0.0, 0)
        restart_s = sum(self._outlook.restart_s(v.model) for v in victims)
        return (sum(v.busy for v in victims), max(v.priority for v in victims), restart_s, len(victims))

    def _victims(self, want: Want, shelf: Shelf, lack: Room) -> tuple[Incumbent, ...]:
        """The cheapest incumbents that make at least `lack`, the best one alone or the cheapest few; empty: none do."""

        def cost(incumbent: Incumbent) -> Key:
            return (*self._cost((incumbent,)), incumbent.replica)

        candidates = sorted((i for i in shelf.incumbents if evictable(want, i, self._now_s)), key=cost)
        few: list[Incumbent] = []
        for incumbent in candidates:
            if sum_of(few).holds(lack):
                break
            few.append(incumbent)
        if not few or not sum_of(few).holds(lack):
            return ()
        for incumbent in reversed(few[:-1]):
            fewer = [other for other in few if other is not incumbent]
            if sum_of(fewer).holds(lack):
                few = fewer
        alone = next(([i] for i in candidates if i.room.holds(lack)), few)
        return tuple(alone if self._cost(alone) < self._cost(few) else few)

    def place(self, want: Want, options: Sequence[Option]) -> Placement:
        """Takes the room, and locks the Devices: a Replica is about to start there."""
        devices = {option.shelf.slice.device for option in options}
        for option in options:
            option.shelf.reserve(option.need)
        for shelf in self.shelves.values():
            shelf.locked = shelf.locked or shelf.slice.device in devices
        claims = [option.need.memory_bytes for option in options if want.memory_bytes == 0 or option.shelf.slice.shared]
        memory_bytes = min(claims, default=want.memory_bytes)
        return Placement(want, tuple(option.shelf.slice.id for option in options), memory_bytes)

    def evict(self, options: Sequence[Option]) -> tuple[Incumbent, ...]:
        """Promises the room to the Want, so that no later one counts on it; gives the victims, each once."""
        victims = {victim.replica: victim for option in options for victim in option.victims}
        for replica, victim in victims.items():
            for shelf in self.shelves.values() if victim.others else (option.shelf for option in options):
                shelf.evict(replica)
        for option in options:
            option.shelf.reserve(option.need)
        return tuple(victims.values())

    def wait(self, options: Sequence[Option]) -> str:
        """Why a Want that has room promised is not placed yet."""
        worst = max(options, key=lambda option: option.rung)
        where = worst.shelf.slice.id
        if worst.rung == EVICT:
            return f"makes room on {where}: {_names(worst.victims)} {_verb(worst.victims)} to leave"
        leaving = tuple(i for i in worst.shelf.incumbents if i.leaving)
        if worst.rung == COMING and leaving:
            return f"waits on {where} until {_names(leaving)} {_verb(leaving, 'has', 'have')} left"
        if worst.rung == COMING:
            return f"waits on {where} for room that is promised"
        return f"waits on {where} until the Replica that is starting there is ready: one starts at a time"


def sum_of(incumbents: Sequence[Incumbent]) -> Room:
    """Their rooms together."""
    return Room(sum(i.room.memory_bytes for i in incumbents), sum(i.room.compute_percent for i in incumbents))


def _names(incumbents: Sequence[Incumbent]) -> str:
    return ", ".join(sorted({incumbent.model for incumbent in incumbents}))


def _verb(incumbents: Sequence[Incumbent], one: str = "is", many: str = "are") -> str:
    return one if len({incumbent.model for incumbent in incumbents}) == 1 else many

"""The packer: which Replica goes to which Slice, and who makes room for it.

Owns the choice of Slices and victims, for production, what-if questions and simulation alike. Promises: no Slice is
over-committed; nobody of higher priority, within residency, or awaited makes room; one Want takes victims on one Slice
only (several Devices: of one node), and none while room is coming; the same input in any order gives the same answer.
Placement is best fit in memory, then compute. It never starts or drains anything: `autoscaler.plan` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.packing import Choice, Incumbent, Missing, Outlook, Packing, Placement, Room, Shelf, Victim, Want
from autoscaler.rulings import admits, barred, evictable, need, product_rank, unmet_reason
from autoscaler.world import Copy, DeviceId, NodeId, SliceId

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
    bench = _Bench(wanted, slices, copies, outlook, now_s)
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


def face(shelf: Shelf, choices: Sequence[Choice] = ()) -> Key:
    """What `need` and `product_rank` look at: equal for equal Devices, so that they are asked once."""
    s = shelf.slice
    alike = (s.memory_bytes, s.compute_percent, s.isolation, s.shared, shelf.whole, s.product)
    if not choices:
        return alike
    return (*alike, *(admits(one.selector, s) for one in choices), *(not barred(one, s) for one in choices))


def choices_of(wanted: Iterable[Want], shelves: Iterable[Shelf]) -> tuple[Choice, ...]:
    """By what these Wants choose among these nodes, if at all: for `face`."""
    tainted = any(shelf.slice.taints for shelf in shelves)
    choosy = (want for want in wanted if tainted or want.selector or want.avoids)
    return tuple(dict.fromkeys(want.choice for want in choosy))


class _Bench:
    """The Shelves while one call works on them, and what was worked out about those that did not change since."""

    def __init__(
        self, wanted: Sequence[Want], slices: Sequence[Shelf], copies: Set[Copy], outlook: Outlook, now_s: float
    ) -> None:
        self._choices = choices_of(wanted, slices)
        usable = (shelf for shelf in slices if shelf.slice.healthy and not shelf.closed)
        usable_sorted = sorted(usable, key=lambda shelf: shelf.slice.id)
        self.shelves: dict[SliceId, Shelf] = {shelf.slice.id: shelf.copy() for shelf in usable_sorted}
        self._devices: dict[DeviceId, list[Shelf]] = {}
        self._open: dict[Key, list[tuple[int, int, SliceId]]] = {}
        """Per face: (free memory, free compute, Slice) of those where nobody starts, sorted."""
        for shelf in self.shelves.values():
            self._devices.setdefault(shelf.slice.device, []).append(shelf)
            if not shelf.locked:
                self._open.setdefault(self._face(shelf), []).append((*shelf.free, shelf.slice.id))
        for entries in self._open.values():
            entries.sort()
        self._now_s = now_s
        self._outlook = outlook
        self._models = {incumbent.model for shelf in self.shelves.values() for incumbent in shelf.incumbents}
        self._nodes: dict[str, set[NodeId]] = {}
        for copy in copies:
            self._nodes.setdefault(copy.artifact, set()).add(copy.node)
        self._known: dict[Want, dict[SliceId, Option | None]] = {}
        """Options by everything of a Want that they depend on."""

    def _face(self, shelf: Shelf) -> Key:
        return face(shelf, self._choices)

    def best(self, want: Want) -> tuple[Option, ...] | None:
        """The Options to take, one per Device; empty for a Want without Devices; None: there is no way now."""
        if want.devices == 0:
            return ()
        if want.devices > 1:
            return self._node(want)
        option = self._free(want)
        if option is None:
            option = min(self._options(want), key=lambda o: o.key, default=None)
        return None if option is None else (option,)

    def _free(self, want: Want) -> Option | None:
        """The best Slice with room now and nobody starting: the same choice as the best of `_options`, much faster."""
        near = self._nodes.get(want.artifact, set())
        best: tuple[Key, Shelf, Room] | None = None
        for entries in self._open.values():
            alike = self.shelves[entries[0][2]] if entries else None
            room = need(want, alike) if alike is not None else None
            rank = product_rank(want, alike.slice.product) if alike is not None else None
            if alike is None or room is None or rank is None or barred(want.choice, alike.slice):
                continue
            for i in range(bisect_left(entries, room), len(entries)):
                memory_bytes, compute_percent, id = entries[i]
                if compute_percent < room.compute_percent:
                    continue
                shelf = self.shelves[id]
                away, left = shelf.slice.node not in near, memory_bytes - room.memory_bytes
                spare = compute_percent - room.compute_percent
                key = (rank, away, left, spare, shelf.slice.memory_bytes, id)
                if best is None or key < best[0]:
                    best = (key, shelf, room)
                if not (near and away):
                    break
        return None if best is None else Option(FREE, best[0], best[1], best[2])

    def _options(self, want: Want) -> Iterator[Option]:
        """The cheapest Option of each Slice that has one."""
        model = want.model if want.model in self._models else ModelName("")
        artifact = want.artifact if want.artifact in self._nodes else ""
        alike = want._replace(model=model, artifact=artifact, ordinal=0, unserved_since_s=0.0, reason="")
        known = self._known.setdefault(alike, {})
        for id, shelf in self.shelves.items():
            if id not in known:
                known[id] = self._option(want, shelf)
            option = known[id]
            if option is not None:
                yield option

    def _moved(self, shelf: Shelf, before: Room) -> None:
        """Something of the Shelf changed: what was worked out about it is void. `before` is what was free."""
        id = shelf.slice.id
        for known in self._known.values():
            known.pop(id, None)
        entries, entry = self._open.get(self._face(shelf), []), (*before, id)
        at = bisect_left(entries, entry)
        if at < len(entries) and entries[at] == entry:
            del entries[at]
            if not shelf.locked:
                insort(entries, (*shelf.free, id))

    def _node(self, want: Want) -> tuple[Option, ...] | None:
        """The node whose `devices` cheapest Devices are the cheapest together."""
        by_node: dict[NodeId, list[Option]] = {}
        for option in self._options(want):
            by_node.setdefault(option.shelf.slice.node, []).append(option)
        teams = [
            tuple(sorted(options, key=lambda o: o.key)[: want.devices])
            for options in by_node.values()
            if len(options) >= want.devices
        ]
        return min(teams, key=lambda team: (team[-1].rung, *(o.key for o in reversed(team))), default=None)

    def _option(self, want: Want, shelf: Shelf) -> Option | None:
        """The cheapest way to use this Slice; None: none now."""
        room, rank = need(want, shelf), product_rank(want, shelf.slice.product)
        if room is None or rank is None or barred(want.choice, shelf.slice):
            return None
        chosen: tuple[Incumbent, ...] = ()
        soon = shelf.free.plus(shelf.coming)
        if shelf.free.holds(room):
            rung = LOCKED if shelf.locked else FREE
        elif soon.holds(room):
            rung = COMING
        else:
            chosen, rung = self._victims(want, shelf, room.less(soon)), EVICT
            if not chosen:
                return None
        away = shelf.slice.node not in self._nodes.get(want.artifact, ())
        after = (shelf.free if rung <= LOCKED else soon).less(room)
        tie = (shelf.slice.memory_bytes, shelf.slice.id)
        key = (rung, *self._cost(chosen), shelf.locked, rank, away, after.memory_bytes, after.compute_percent, *tie)
        return Option(rung, key, shelf, room, chosen)

    def _cost(self, victims: Sequence[Incumbent]) -> Key:
        """(busy ones, highest priority, seconds to start them again, how many)."""
        if not victims:
            return (0, 0, 0.0, 0)
        restart_s = sum(self._outlook.restart_s(v.model) for v in victims)
        return (sum(v.busy for v in victims), max(v.priority for v in victims), restart_s, len(victims))

    def _price(self, incumbent: Incumbent) -> Key:
        """`_cost` of one alone; its id breaks ties."""
        restart_s = self._outlook.restart_s(incumbent.model)
        return (incumbent.busy, incumbent.priority, restart_s, incumbent.replica)

    def _victims(self, want: Want, shelf: Shelf, lack: Room) -> tuple[Incumbent, ...]:
        """The cheapest incumbents that make at least `lack`, the best one alone or the cheapest few; empty: none do."""
        willing = [i for i in shelf.incumbents if evictable(want, i, self._now_s)]
        if not sum_of(willing).holds(lack):
            return ()
        candidates = sorted(willing, key=self._price)
        few: list[Incumbent] = []
        for incumbent in candidates:
            few.append(incumbent)
            if sum_of(few).holds(lack):
                break
        if len(few) == 1:
            return tuple(few)
        for incumbent in reversed(few[:-1]):
            fewer = [other for other in few if other is not incumbent]
            if sum_of(fewer).holds(lack):
                few = fewer
        alone = next(([i] for i in candidates if i.room.holds(lack)), few)
        return tuple(alone if self._cost(alone) < self._cost(few) else few)

    def place(self, want: Want, options: Sequence[Option]) -> Placement:
        """Takes the room, and locks the Devices: a Replica is about to start there."""
        for option in options:
            before = option.shelf.free
            option.shelf.reserve(option.need)
            for shelf in self._devices[option.shelf.slice.device]:
                shelf.locked = True
                self._moved(shelf, before if shelf is option.shelf else shelf.free)
        claims = [option.need.memory_bytes for option in options if want.memory_bytes == 0 or option.shelf.slice.shared]
        memory_bytes = min(claims, default=want.memory_bytes)
        return Placement(want, tuple(option.shelf.slice.id for option in options), memory_bytes)

    def evict(self, options: Sequence[Option]) -> tuple[Incumbent, ...]:
        """Promises the room to the Want, so that no later one counts on it; gives the victims, each once."""
        victims = {victim.replica: victim for option in options for victim in option.victims}
        for replica, victim in victims.items():
            for shelf in tuple(self.shelves.values()) if victim.others else (option.shelf for option in options):
                shelf.evict(replica)
                self._moved(shelf, shelf.free)
        for option in options:
            before = option.shelf.free
            option.shelf.reserve(option.need)
            self._moved(option.shelf, before)
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
    memory_bytes = compute_percent = 0
    for incumbent in incumbents:
        memory_bytes += incumbent.room.memory_bytes
        compute_percent += incumbent.room.compute_percent
    return Room(memory_bytes, compute_percent)


def _names(incumbents: Sequence[Incumbent]) -> str:
    return ", ".join(sorted({incumbent.model for incumbent in incumbents}))


def _verb(incumbents: Sequence[Incumbent], one: str = "is", many: str = "are") -> str:
    return one if len({incumbent.model for incumbent in incumbents}) == 1 else many

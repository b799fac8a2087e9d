"""Capacity that costs, once the surge is over: who is on it goes home, and nobody stands idle in his place. Pure.

Owns who that is. A Lease is rented where it costs and its provider's `keepSeconds` is `auto`; home is whatever else
there is. While somebody is on such a Lease, Models with `idleSeconds: auto` keep nothing idle for longer than a start
is worth, on it and wherever one of its guests could be (`autoscaler.demand`); and while nobody lacks room its guests
move home, one after the other, the Lease first that the fewest keep. Promises, beside those of every move
(`autoscaler.moves`): nobody moves for whom and for all others on that Lease no room is free at home, nor to a product
that its Model likes less. When the last has left, the ledger gives the Lease back (`autoscaler.deficits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.draft import Draft
from autoscaler.drain import complete
from autoscaler.leased import is_of
from autoscaler.leases import Lease, LeaseId
from autoscaler.moves import Ground, Step, home, movable, settled, under_way
from autoscaler.packing import Force, Want
from autoscaler.providers import keeps
from autoscaler.rulings import admits, barred
from autoscaler.shelves import want_of
from autoscaler.states import ReplicaState as S
from autoscaler.world import Move, Rented, Replica, Slice, SliceId, World

NOBODY = Rented()
LEASES_MAX = 8
"""Leases for whose guests a way home is looked for in one Plan."""


class Homeward(NamedTuple):
    """The move that begins now, if any; when time alone may allow one."""

    step: Step | None = None
    next_s: float = inf


def look(draft: Draft) -> None:
    """Who is on what costs, as things are now."""
    world, before = draft.world, draft.before
    same = world.capacity is before.capacity and world.slices is before.slices and world.models is before.models
    if same and draft.replicas.now is before.replicas and world.settings is before.settings:
        return
    now = rented(world, draft.replicas.now) if world.capacity.leases else NOBODY
    if now != world.rented:
        draft.change(rented=now)


def rented(world: World, replicas: Mapping[ReplicaId, Replica]) -> Rented:
    """See Rented."""
    guests = {one.id: one for those in _by_lease(world, replicas).values() for one in those}
    if not guests:
        return NOBODY
    wants = [*{want for one in guests.values() if (want := _want(world, one)) is not None}]
    sized: dict[tuple[str, int], list[Want]] = {}
    """By product and memory of a Slice: who could be there as far as these tell."""
    idlers = {one.model for one in guests.values()}
    for replica in replicas.values() if wants else ():
        if replica.model in idlers or replica.state is not S.READY:
            continue
        for slice_ in (world.slices[id] for id in replica.slices if id in world.slices):
            key = slice_.product, slice_.memory_bytes
            if key not in sized:
                sized[key] = [one for one in wants if _has_size(one, slice_)]
            if any(admits(one.selector, slice_) and not barred(one.choice, slice_) for one in sized[key]):
                idlers.add(replica.model)
    return Rented(frozenset(guests), frozenset(idlers))


def _by_lease(world: World, replicas: Mapping[ReplicaId, Replica]) -> dict[LeaseId, list[Replica]]:
    """Leases that cost, and who is on each that anybody is on."""
    there: dict[str, list[Lease]] = {}
    for lease in world.capacity.leases.values():
        if _costs(world, lease) and lease.listed is not None:
            there.setdefault(lease.listed.node, []).append(lease)
    found: dict[LeaseId, list[Replica]] = {}
    for replica in replicas.values() if there else ():
        slices = [world.slices[id] for id in replica.slices if id in world.slices]
        leases = {lease.id for one in slices for lease in there.get(one.node, ()) if is_of(lease, one)}
        for id in leases:
            found.setdefault(id, []).append(replica)
    return found


def _costs(world: World, lease: Lease) -> bool:
    here = lease.here_s is not None and not lease.leaving
    return here and lease.offer.price_per_hour > 0 and keeps(world.settings.capacity, lease.id.provider) == "auto"


def _want(world: World, guest: Replica) -> Want | None:
    """What it would be at home; None: it stays where it is until it goes."""
    model = world.models.get(guest.model)
    if model is None or not movable(world, model, guest):
        return None
    return want_of(model, 0, inf, Force.NONE, "", world.settings.pod)


def _has_size(want: Want, slice_: Slice) -> bool:
    return want.memory_bytes <= slice_.memory_bytes and want.kind.rank(slice_.product) is not None


def homeward(ground: Ground) -> Homeward:
    """Of the guests whose leaving gives a Lease back the first that moves now."""
    world = ground.world
    if not world.rented.guests or under_way(world, ground.going) is not None or not complete(world, ground.now_s):
        return Homeward()
    by_lease, next_s = _by_lease(world, world.replicas), inf
    ids = sorted(by_lease, key=lambda one: _order(world.capacity.leases[one], by_lease[one]))
    for id in ids[:LEASES_MAX]:
        lease, guests = world.capacity.leases[id], by_lease[id]
        if _stays(world, lease, guests):
            continue
        rests = [settled(ground, one) for one in guests]
        if not all(one.may for one in rests):
            next_s = min(next_s, *(one.next_s for one in rests))
        elif steps := _all_home(ground, lease, guests):
            return Homeward(steps[0])
    return Homeward(None, next_s)


def _order(lease: Lease, guests: Sequence[Replica]) -> tuple[int, float, LeaseId]:
    return len(guests), -lease.offer.price_per_hour * lease.devices, lease.id


def _stays(world: World, lease: Lease, guests: Iterable[Replica]) -> bool:
    """Whether it would not go even when these have left."""
    ids, listed = {one.id for one in guests}, lease.listed
    if listed is None:
        return True
    there = [one for one in world.slices.values() if one.node == listed.node and (listed.alone or is_of(lease, one))]
    if any(world.others.get(one.counted, 0) for one in there):
        return True
    return any(id not in ids for one in there for id in world.by_slice.get(one.id, ()))


def _all_home(ground: Ground, lease: Lease, guests: Iterable[Replica]) -> tuple[Step, ...]:
    """A place for each; none: there is not one for all."""
    world, yard = ground.world, ground.yard
    steps: list[Step] = []
    yard.stock.mark()
    try:
        yard.set_aside(_dear(world))
        for guest in sorted(guests, key=lambda one: (-len(one.slices), -one.memory_bytes, one.id)):
            there = home(ground, guest, f"move {guest.model}: there is room without {lease.id.provider}, which costs")
            if there is None or _rank(world, there.want, there.slices) > _rank(world, there.want, guest.slices):
                return ()
            steps.append(Step(Move(replica=guest.id), there))
    finally:
        yard.stock.rewind()
    return tuple(steps)


def _dear(world: World) -> Iterator[SliceId]:
    """Slices of what costs."""
    leases = [one for one in world.capacity.leases.values() if one.listed is not None and one.offer.price_per_hour > 0]
    nodes = {one.listed.node for one in leases if one.listed is not None}
    there = [one for one in world.slices.values() if one.node in nodes]
    return (one.id for one in there if any(is_of(lease, one) for lease in leases))


def _rank(world: World, want: Want, ids: Iterable[SliceId]) -> int:
    """How well its Model likes these; less is better."""
    ranks = (want.kind.rank(world.slices[id].product) for id in ids if id in world.slices)
    return max((rank for rank in ranks if rank is not None), default=0)

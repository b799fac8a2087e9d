"""Which Device is cut where when a MIG profile is wanted, so that the profiles that will be wanted still fit.

Owns a Fleet: MIG Devices with the cuts on them, in use or idle, and the choice of one more: the place whose price is
least. The price is what the Fleet loses by it, in two parts. The room of each profile (how many more of it would fit),
which is worth the share of demand that it has, times its work, the more the less of it is left. And the filling of that
Device: the work that would be done on it if profiles came as they are wanted until none fits.

Promises: no cut in use is touched or overlapped, the same Fleet gives the same answer whatever its history, and one
more Device never makes an answer a refusal. An idle cut may be undone for another, so it is room like any; where that
costs no more, one is used as it is. Must not know how a Device is cut anew, nor when: its caller says what was done.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import NamedTuple

from autoscaler.slicing.mig_geometry import (
    MEMO_MAX,
    Cut,
    Geometry,
    Layout,
    MigError,
    MigUsage,
    build_layout,
    compute_usage,
    count_free_cuts_by_profile,
    free_slices,
    has_conflict,
    list_starts,
)
from autoscaler.state.world import DeviceId

NOW = 16
"""Room now counts as much as so much that any one of the Device's cuts gives when it ends."""
FILLING_LEAST, FILLING_EACH = 3, 1 / 12
"""Filling is worth what room is of which so much is left: for 3 more, and for one more on a twelfth of the Devices."""
SHARE_MAX = 2**53
WORK = 1.3
"""The power of compute slices that is the work of a filling: what is large is harder to place."""
# These, and the square in `Fleet._weights`, were chosen on nine mixes, those of bench/packing/mig.py among them, with
# other seeds than it shows; those near by do as well.


class MigPlacement(NamedTuple):
    """Where a profile is to be had."""

    device: DeviceId
    profile: str
    start: int
    undo: tuple[Cut, ...] = ()
    """Idle cuts that must be undone first."""
    there: bool = False
    """The very cut is there, idle: nothing is to be made."""

    @property
    def cut(self) -> Cut:
        """What is had."""
        return Cut(self.profile, self.start)


class MigRefusal(NamedTuple):
    """It is not to be had now."""

    profile: str
    reason: str


class _Move(NamedTuple):
    """One more cut on a layout."""

    start: int
    after: Layout
    cost: tuple[tuple[str, int], ...]
    """What it takes of the room of which profiles, in 1/NOW of a cut; below 0: it gives."""
    free: int
    """Memory slices free before."""


@dataclass(slots=True)
class _Device:
    geometry: Geometry
    used: Layout
    idle: Layout
    closed: str


class Fleet:
    """MIG Devices, and what may be had of them. `shares`: see `learn`."""

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._devices: dict[DeviceId, _Device] = {}
        self._alike: dict[tuple[Geometry, Layout], dict[Layout, list[DeviceId]]] = {}
        """Open Devices by what is in use, then by what is idle; in order of their ids."""
        self._room: dict[str, int] = {}
        """By profile: how many more of it alone would fit on all open Devices."""
        self._kinds: dict[Geometry, int] = {}
        """How many Devices of each there are, open or not."""
        self._open = 0
        self._shares: dict[str, float] = {}
        self._fillings: dict[tuple[Geometry, MigUsage], float] = {}
        """Remembered while shares and geometries stay; as many as there are layouts."""
        self.learn(shares or {})

    def learn(self, shares: Mapping[str, float]) -> None:
        """How often each profile is wanted, in any unit; those not named never. Empty: all alike, but for media.

        What is new costs the next `find` about 0.1 s for each geometry.
        """
        for profile, share in shares.items():
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= SHARE_MAX:
                raise MigError(f"the share of {profile!r} is {share!r}; expected a number from 0 to 2^53")
        total = fsum(shares.values())
        self._shares = {profile: share / total for profile, share in shares.items()} if total else {}
        self._fillings.clear()

    def add(
        self,
        device: DeviceId,
        geometry: Geometry,
        used: Iterable[tuple[str, int]] = (),
        idle: Iterable[tuple[str, int]] = (),
        closed: str = "",
    ) -> None:
        """A Device as it is seen. MigError where it is there already or its cuts cannot be."""
        if not isinstance(device, str) or not device:
            raise MigError(f"a Device has a name, not {device!r}")
        if device in self._devices:
            raise MigError(f"{device} is there already")
        used, idle = tuple(used), tuple(idle)
        build_layout(geometry, (*used, *idle))
        self._kind(geometry, 1)
        self._devices[device] = _Device(geometry, build_layout(geometry, used), build_layout(geometry, idle), closed)
        self._enter(device)

    def remove(self, device: DeviceId) -> None:
        """It is gone, with all that was on it."""
        self._leave(device)
        self._kind(self._devices.pop(device).geometry, -1)

    def close(self, device: DeviceId, why: str) -> None:
        """Nothing new goes there, and it is no room; empty: it does again."""
        self._leave(device)
        self._devices[device].closed = why
        self._enter(device)

    def used(self, device: DeviceId) -> Layout:
        """Its cuts in use: none of these may be undone, and while there is one its Device is not laid out anew."""
        return self._known(device).used

    def idle(self, device: DeviceId) -> Layout:
        """Its cuts that may be undone."""
        return self._known(device).idle

    def find(self, profile: str, among: Collection[DeviceId] | None = None) -> MigPlacement | MigRefusal:
        """Where one more is to be had at the least cost. `among`: only on these. Changes nothing."""
        best, ties = (0.0, 0), list[tuple[dict[Layout, list[DeviceId]], _Move]]()
        shares = self._wanted()
        weights, worth = self._weights(shares), 1 / (1 + FILLING_LEAST + FILLING_EACH * self._open) ** 2
        for (geometry, used), alike in self._alike.items():
            if among is not None and not any(id in among for ids in alike.values() for id in ids):
                continue
            for move in _moves(geometry, used, profile):
                has, then = compute_usage(geometry, used), compute_usage(geometry, move.after)
                lost = self._filling(geometry, has, shares) - self._filling(geometry, then, shares)
                price = (fsum([worth * lost, *(weights[name] * less for name, less in move.cost)]), move.free)
                if not ties or price < best:
                    best, ties = price, [(alike, move)]
                elif price == best:
                    ties.append((alike, move))
        if not ties:
            return MigRefusal(profile, self._reason(profile, among))
        _, _, start, device = min(each for alike, move in ties for each in self._exact(alike, profile, move, among))
        undo, there = self._undone(device, Cut(profile, start))
        return MigPlacement(device, profile, start, undo, there)

    def start(self, profile: str, among: Collection[DeviceId] | None = None) -> MigPlacement | MigRefusal:
        """As `find`, and what is found is in use from now on."""
        found = self.find(profile, among)
        if isinstance(found, MigPlacement):
            self.use(found.device, found.cut)
        return found

    def use(self, device: DeviceId, cut: Cut) -> None:
        """The cut is in use from now on, made or as it was; idle ones in its way are gone. MigError: one in use is."""
        seen = self._known(device)
        used = build_layout(seen.geometry, (*seen.used, cut))
        undo, _ = self._undone(device, cut)
        self._leave(device)
        seen.used, seen.idle = used, tuple(each for each in seen.idle if each not in {*undo, cut})
        self._enter(device)

    def stop(self, device: DeviceId, cut: Cut) -> None:
        """The cut is idle from now on."""
        seen = self._known(device)
        if cut not in seen.used:
            raise MigError(f"{device} has no {cut.profile} at {cut.start} in use")
        self._leave(device)
        seen.used, seen.idle = tuple(each for each in seen.used if each != cut), tuple(sorted((*seen.idle, cut)))
        self._enter(device)

    def undo(self, device: DeviceId, cut: Cut) -> None:
        """The cut is gone. MigError while it is in use."""
        seen = self._known(device)
        if cut not in seen.idle:
            state = "is in use" if cut in seen.used else "is not there"
            raise MigError(f"{cut.profile} at {cut.start} of {device} {state}: only an idle cut may be undone")
        self._leave(device)
        seen.idle = tuple(each for each in seen.idle if each != cut)
        self._enter(device)

    def _wanted(self) -> dict[str, float]:
        """The share of each profile; they sum to 1."""
        if self._shares:
            return self._shares
        plain = {one.name for geometry in self._kinds for one in geometry.profiles if not one.media}
        return dict.fromkeys(plain, 1 / len(plain)) if plain else {}

    def _weights(self, shares: Mapping[str, float]) -> dict[str, float]:
        """What 1/NOW of the room for one more of each profile is worth."""
        works = {one.name: one.compute for geometry in self._kinds for one in geometry.profiles}
        return {
            profile: shares.get(profile, 0.0) * work / (1 + self._room.get(profile, 0)) ** 2 / NOW
            for profile, work in works.items()
        }

    def _filling(self, geometry: Geometry, has: MigUsage, shares: Mapping[str, float]) -> float:
        """Work done beside what is taken if profiles come as they are wanted, each at its best start, until none fits.
        Of 2,319 layouts of eight slices fewer than 512 differ in what they take.
        """
        known = self._fillings.get((geometry, has))
        if known is not None:
            return known
        works, chances = list[float](), list[float]()
        for one in geometry.profiles:
            share = shares.get(one.name, 0.0)
            fillings = [self._filling(geometry, then, shares) for _, then in has.places(one)] if share else []
            if fillings:
                works.append(share * (one.compute**WORK + max(fillings)))
                chances.append(share)
        filling = fsum(works) / fsum(chances) if chances else 0.0
        self._fillings[geometry, has] = filling
        return filling

    def _kind(self, geometry: Geometry, more: int) -> None:
        """So many more Devices of a geometry."""
        before = self._kinds.get(geometry, 0)
        self._kinds[geometry] = before + more
        if not before + more:
            del self._kinds[geometry]
        if not self._shares and not (before and before + more):  # who is wanted is who is there
            self._fillings.clear()

    def _exact(
        self, alike: Mapping[Layout, list[DeviceId]], profile: str, move: _Move, among: Collection[DeviceId] | None
    ) -> Iterator[tuple[int, bool, int, DeviceId]]:
        """Of Devices that cost the same, by what is idle on them: those where the least is to be undone or made."""
        for ids in alike.values():
            device = next((id for id in ids if among is None or id in among), None)
            if device is not None:
                undo, there = self._undone(device, Cut(profile, move.start))
                yield len(undo), not there, move.start, device

    def _undone(self, device: DeviceId, cut: Cut) -> tuple[tuple[Cut, ...], bool]:
        """Idle cuts in the way of this one, and whether it is there."""
        seen = self._devices[device]
        if cut in seen.idle:
            return (), True
        return tuple(each for each in seen.idle if has_conflict(seen.geometry, cut, each)), False

    def _known(self, device: DeviceId) -> _Device:
        if device not in self._devices:
            raise MigError(f"no MIG Device is named {device!r}")
        return self._devices[device]

    def _enter(self, device: DeviceId) -> None:
        """It is room from now on, unless it is closed."""
        seen = self._devices[device]
        if not seen.closed:
            insort(self._alike.setdefault((seen.geometry, seen.used), {}).setdefault(seen.idle, []), device)
            self._count(seen, 1)

    def _leave(self, device: DeviceId) -> None:
        """It is no room any more."""
        seen = self._known(device)
        if seen.closed:
            return
        alike = self._alike[seen.geometry, seen.used]
        ids = alike[seen.idle]
        del ids[bisect_left(ids, device)]
        if not ids:
            del alike[seen.idle]
        if not alike:
            del self._alike[seen.geometry, seen.used]
        self._count(seen, -1)

    def _count(self, seen: _Device, sign: int) -> None:
        self._open += sign
        for profile, more in zip(
            seen.geometry.profiles, count_free_cuts_by_profile(seen.geometry, seen.used), strict=True
        ):
            self._room[profile.name] = self._room.get(profile.name, 0) + sign * more

    def _reason(self, profile: str, among: Collection[DeviceId] | None) -> str:
        """Why it is not to be had."""
        asked = [seen for id, seen in self._devices.items() if among is None or id in among]
        having = [seen for seen in asked if seen.geometry.has(profile)]
        if not having:
            kinds = sorted({seen.geometry.name for seen in asked})
            return f"no Device has MIG profile {profile}; there are {', '.join(kinds) or 'none'}"
        closed = sorted(seen.closed for seen in having if seen.closed)
        shut = f", {len(closed)} closed ({closed[0]})" if closed else ""
        return f"of {len(having)} with {profile} {len(having) - len(closed)} have no room for it{shut}"


@lru_cache(maxsize=MEMO_MAX)
def _moves(geometry: Geometry, on: Layout, profile: str) -> tuple[_Move, ...]:
    """All ways to have one more of a profile beside what is in use; none where the Device has no such."""
    if not geometry.has(profile):
        return ()
    before, moves = _hopes(geometry, on), []
    for start in list_starts(geometry, on, profile):
        after = tuple(sorted((*on, Cut(profile, start))))
        hopes = zip(geometry.profiles, before, _hopes(geometry, after), strict=True)
        cost = tuple((one.name, had - has) for one, had, has in hopes if had != has)
        moves.append(_Move(start, after, cost, free_slices(geometry, on)))
    return tuple(moves)


@lru_cache(maxsize=MEMO_MAX)
def _hopes(geometry: Geometry, on: Layout) -> tuple[int, ...]:
    """Room for each profile, in 1/NOW of a cut: what there is, and a little of what there will be when one cut ends."""
    now = count_free_cuts_by_profile(geometry, on)
    hopes = [NOW * each for each in now]
    for gone in on:
        then = count_free_cuts_by_profile(geometry, tuple(each for each in on if each != gone))
        hopes = [hope + (later - sooner) for hope, later, sooner in zip(hopes, then, now, strict=True)]
    return tuple(hopes)

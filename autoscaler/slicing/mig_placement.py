"""Chooses the device and position for a new MIG device, so that the profiles expected next still fit.

A Fleet holds MIG devices and their cuts, in use or idle, and places one more cut where its price is least. The price is
what the fleet loses, in two parts. First, the room of each profile (how many more would fit), weighted by the profile's
share of demand and its compute; the less room is left, the higher the weight. Second, the filling of that device: the
expected work placed on it if profiles arrive by their shares until none fits.

Invariants: cuts in use are never changed or overlapped; the answer depends on the fleet, not on its history; an added
device never turns a placement into a refusal. An idle cut may be deleted for another, so it counts as room; at equal
cost an existing one is reused. When and how devices are repartitioned is left to the caller, who reports what was done.
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
"""Weight of room that exists now, relative to room that appears when any one cut of the device ends."""
FILLING_LEAST, FILLING_EACH = 3, 1 / 12
"""A filling has the weight of a profile of which this many more would fit: 3, plus 1/12 per device."""
SHARE_MAX = 2**53
WORK = 1.3
"""Exponent of compute slices in the work of a filling: large profiles are harder to place."""
# These values, and the square in `Fleet._weights`, were tuned on nine mixes, including those of bench/packing/mig.py
# with other seeds; nearby values perform as well.


class MigPlacement(NamedTuple):
    """Where to place a profile."""

    device: DeviceId
    profile: str
    start: int
    undo: tuple[Cut, ...] = ()
    """Idle cuts to delete first."""
    there: bool = False
    """The exact cut exists and is idle: nothing needs to be created."""

    @property
    def cut(self) -> Cut:
        """The placed cut."""
        return Cut(self.profile, self.start)


class MigRefusal(NamedTuple):
    """The profile cannot be placed now."""

    profile: str
    reason: str


class _Move(NamedTuple):
    """One more cut on a layout."""

    start: int
    after: Layout
    cost: tuple[tuple[str, int], ...]
    """Loss of room per profile, in 1/NOW of a cut; negative for a gain."""
    free: int
    """Number of free memory slices before."""


@dataclass(slots=True)
class _Device:
    geometry: Geometry
    used: Layout
    idle: Layout
    closed: str


class Fleet:
    """MIG devices and the choice of placements on them. `shares`: see `learn`."""

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._devices: dict[DeviceId, _Device] = {}
        self._alike: dict[tuple[Geometry, Layout], dict[Layout, list[DeviceId]]] = {}
        """Open devices by cuts in use, then by idle cuts; sorted by id."""
        self._room: dict[str, int] = {}
        """By profile: how many more of it alone would fit on all open devices."""
        self._kinds: dict[Geometry, int] = {}
        """Number of devices per geometry, open or closed."""
        self._open = 0
        self._shares: dict[str, float] = {}
        self._fillings: dict[tuple[Geometry, MigUsage], float] = {}
        """Cache, valid until shares or geometries change; bounded by the number of layouts."""
        self.learn(shares or {})

    def learn(self, shares: Mapping[str, float]) -> None:
        """Set the demand share of each profile, in any unit; 0 for others. Empty: equal shares, but 0 for `media` ones.

        After a change, the next `find` takes about 0.1 s more per geometry.
        """
        for profile, share in shares.items():
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= SHARE_MAX:
                raise MigError(f"the relative demand for {profile!r} is {share!r}; expected a number from 0 to 2^53")
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
        """Add a device in its observed state. Raises MigError if it exists already or its cuts are impossible."""
        if not isinstance(device, str) or not device:
            raise MigError(f"a Device needs a name, not {device!r}")
        if device in self._devices:
            raise MigError(f"{device} exists already")
        used, idle = tuple(used), tuple(idle)
        build_layout(geometry, (*used, *idle))
        self._kind(geometry, 1)
        self._devices[device] = _Device(geometry, build_layout(geometry, used), build_layout(geometry, idle), closed)
        self._enter(device)

    def remove(self, device: DeviceId) -> None:
        """Remove a device and all its cuts."""
        self._leave(device)
        self._kind(self._devices.pop(device).geometry, -1)

    def close(self, device: DeviceId, why: str) -> None:
        """Exclude a device from placement and from room; an empty reason reopens it."""
        self._leave(device)
        self._devices[device].closed = why
        self._enter(device)

    def used(self, device: DeviceId) -> Layout:
        """Return its cuts in use, which must not be deleted; while there is one, the device is not repartitioned."""
        return self._known(device).used

    def idle(self, device: DeviceId) -> Layout:
        """Return its cuts that may be deleted."""
        return self._known(device).idle

    def find(self, profile: str, among: Collection[DeviceId] | None = None) -> MigPlacement | MigRefusal:
        """Find the cheapest placement for a profile, optionally only on devices in `among`. Changes nothing."""
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
        """Like `find`, and mark the placement as in use."""
        found = self.find(profile, among)
        if isinstance(found, MigPlacement):
            self.use(found.device, found.cut)
        return found

    def use(self, device: DeviceId, cut: Cut) -> None:
        """Mark a cut as in use and drop idle cuts that conflict. Raises MigError if it conflicts with a cut in use."""
        seen = self._known(device)
        used = build_layout(seen.geometry, (*seen.used, cut))
        undo, _ = self._undone(device, cut)
        self._leave(device)
        seen.used, seen.idle = used, tuple(each for each in seen.idle if each not in {*undo, cut})
        self._enter(device)

    def stop(self, device: DeviceId, cut: Cut) -> None:
        """Mark a cut as idle."""
        seen = self._known(device)
        if cut not in seen.used:
            raise MigError(f"no MIG slice {cut.profile} at memory slice {cut.start} of {device} is in use")
        self._leave(device)
        seen.used, seen.idle = tuple(each for each in seen.used if each != cut), tuple(sorted((*seen.idle, cut)))
        self._enter(device)

    def undo(self, device: DeviceId, cut: Cut) -> None:
        """Delete an idle cut. Raises MigError if it is in use or does not exist."""
        seen = self._known(device)
        if cut not in seen.idle:
            state = "is in use" if cut in seen.used else "does not exist"
            where = f"MIG slice {cut.profile} at memory slice {cut.start} of {device}"
            raise MigError(f"{where} {state}: only an idle MIG slice can be deleted")
        self._leave(device)
        seen.idle = tuple(each for each in seen.idle if each != cut)
        self._enter(device)

    def _wanted(self) -> dict[str, float]:
        """Return the demand share of each profile; the shares sum to 1."""
        if self._shares:
            return self._shares
        plain = {one.name for geometry in self._kinds for one in geometry.profiles if not one.media}
        return dict.fromkeys(plain, 1 / len(plain)) if plain else {}

    def _weights(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return, for each profile, the value of one unit of room; the room for one more cut is NOW units."""
        works = {one.name: one.compute for geometry in self._kinds for one in geometry.profiles}
        return {
            profile: shares.get(profile, 0.0) * work / (1 + self._room.get(profile, 0)) ** 2 / NOW
            for profile, work in works.items()
        }

    def _filling(self, geometry: Geometry, has: MigUsage, shares: Mapping[str, float]) -> float:
        """Return the expected work if profiles arrive by their shares, each at its best start, until none fits.
        The 2,319 layouts of eight slices have fewer than 512 different usages.
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
        """Add `more` to the device count of a geometry."""
        before = self._kinds.get(geometry, 0)
        self._kinds[geometry] = before + more
        if not before + more:
            del self._kinds[geometry]
        if not self._shares and not (before and before + more):  # the default shares depend on the geometries present
            self._fillings.clear()

    def _exact(
        self, alike: Mapping[Layout, list[DeviceId]], profile: str, move: _Move, among: Collection[DeviceId] | None
    ) -> Iterator[tuple[int, bool, int, DeviceId]]:
        """Yield, of devices with equal cost, those that need the fewest deletions or no creation."""
        for ids in alike.values():
            device = next((id for id in ids if among is None or id in among), None)
            if device is not None:
                undo, there = self._undone(device, Cut(profile, move.start))
                yield len(undo), not there, move.start, device

    def _undone(self, device: DeviceId, cut: Cut) -> tuple[tuple[Cut, ...], bool]:
        """Return the idle cuts that conflict with this one, and whether it exists already."""
        seen = self._devices[device]
        if cut in seen.idle:
            return (), True
        return tuple(each for each in seen.idle if has_conflict(seen.geometry, cut, each)), False

    def _known(self, device: DeviceId) -> _Device:
        if device not in self._devices:
            raise MigError(f"no MIG Device is named {device!r}")
        return self._devices[device]

    def _enter(self, device: DeviceId) -> None:
        """Count the device as room, unless it is closed."""
        seen = self._devices[device]
        if not seen.closed:
            insort(self._alike.setdefault((seen.geometry, seen.used), {}).setdefault(seen.idle, []), device)
            self._count(seen, 1)

    def _leave(self, device: DeviceId) -> None:
        """Stop counting the device as room."""
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
        """Explain why the profile cannot be placed."""
        asked = [seen for id, seen in self._devices.items() if among is None or id in among]
        having = [seen for seen in asked if seen.geometry.has(profile)]
        if not having:
            kinds = sorted({seen.geometry.name for seen in asked})
            return f"no device has MIG profile {profile}; there are {', '.join(kinds) or 'none'}"
        closed = sorted(seen.closed for seen in having if seen.closed)
        accepts = "accepts" if len(closed) == 1 else "accept"
        shut = f", and {len(closed)} {accepts} no new replicas ({closed[0]})" if closed else ""
        full = len(having) - len(closed)
        return f"{full} of {len(having)} devices with {profile} {'has' if full == 1 else 'have'} no room for it{shut}"


@lru_cache(maxsize=MEMO_MAX)
def _moves(geometry: Geometry, on: Layout, profile: str) -> tuple[_Move, ...]:
    """Return all ways to add one cut of a profile to the cuts in use; empty if the device lacks the profile."""
    if not geometry.has(profile):
        return ()
    before, moves = _expected_room(geometry, on), []
    for start in list_starts(geometry, on, profile):
        after = tuple(sorted((*on, Cut(profile, start))))
        rooms = zip(geometry.profiles, before, _expected_room(geometry, after), strict=True)
        cost = tuple((one.name, had - has) for one, had, has in rooms if had != has)
        moves.append(_Move(start, after, cost, free_slices(geometry, on)))
    return tuple(moves)


@lru_cache(maxsize=MEMO_MAX)
def _expected_room(geometry: Geometry, on: Layout) -> tuple[int, ...]:
    """Return the room for each profile in 1/NOW of a cut: what is free now, plus what one ending cut would add."""
    now = count_free_cuts_by_profile(geometry, on)
    rooms = [NOW * each for each in now]
    for gone in on:
        then = count_free_cuts_by_profile(geometry, tuple(each for each in on if each != gone))
        rooms = [room + (later - sooner) for room, later, sooner in zip(rooms, then, now, strict=True)]
    return tuple(rooms)

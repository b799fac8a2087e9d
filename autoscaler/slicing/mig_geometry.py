"""MIG as the hardware has it: the profiles of each Device, where on it each may start, and what still fits.

Owns the table of geometries, which of them a product name means, and the arithmetic of one Device. A cut is a profile
at a start, counted in memory slices; a layout is all cuts on a Device, sorted. Promises exact answers, found by search
and remembered within a bound, and one error that names the cut for a layout that no Device can have. Must not choose
(`autoscaler.slicing.mig_placement` does) nor guess: a product that is not known has no geometry.

Names and counts: NVIDIA's MIG User Guide ("Supported MIG Profiles") and the default configuration of mig-parted. Starts
and sizes: what `nvidia-smi mig -lgipp` prints on A30, A100 and H100 NVL; H200 and the Blackwells are taken to be as
those, which have the same names and counts. Memory: see Profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

MEMO_MAX = 1 << 15
"""Answers remembered by each question; the least recently asked is forgotten. A Device of eight slices has 2,319
layouts."""
_GIB, _GB = 1 << 30, 10**9
_UNSEEN_PERCENT = 95
"""What a profile surely has of the gigabytes in its name, where no driver's own figure is known."""


class MigError(ValueError):
    """A layout, profile or Device that cannot be; says which and why."""


class Cut(NamedTuple):
    """A part of a Device, made or to be made (in NVIDIA's words a GI, with one CI that is all of it)."""

    profile: str
    start: int
    """Its first memory slice."""


Layout = tuple[Cut, ...]
"""Sorted."""


class MigProfile(NamedTuple):
    """One size of cut."""

    name: str
    """As NVIDIA writes it: `1g.10gb`, `1g.10gb+me`."""
    compute: int
    """Compute slices: the work that it can do."""
    size: int
    """Memory slices, which nobody else can have."""
    memory_bytes: int
    """The least that a driver was seen to report, or the gigabytes of its name less 5 %. A Device's own is righter."""
    starts: tuple[int, ...]
    media: bool = False
    """It has the media engines that a Device has once, so there is one such cut at most (`+me`)."""


@dataclass(frozen=True, eq=False, slots=True)
class Geometry:
    """What every Device of one kind is like. There is one object for each kind, so equal is the same."""

    name: str
    compute: int
    size: int
    """Memory slices."""
    profiles: tuple[MigProfile, ...]

    def has(self, profile: str) -> bool:
        """Whether a Device has the profile."""
        return any(one.name == profile for one in self.profiles)

    def profile(self, name: str) -> MigProfile:
        """By its name; MigError where a Device has none such."""
        for one in self.profiles:
            if one.name == name:
                return one
        raise MigError(f"{self.name} has no MIG profile {name!r}; it has {', '.join(p.name for p in self.profiles)}")


def _memory_bytes(gb: int, seen_gib: float | None) -> int:
    return gb * _GB * _UNSEEN_PERCENT // 100 if seen_gib is None else int(seen_gib * _GIB)


def _eight(name: str, names_gb: Sequence[int], seen_gib: Sequence[float | None] = (None,) * 4) -> Geometry:
    """Seven compute and eight memory slices: an eighth, a quarter, a half and all of the memory."""
    eighth, quarter, half, all_ = names_gb
    bytes_ = [_memory_bytes(gb, seen) for gb, seen in zip(names_gb, seen_gib, strict=True)]
    anywhere = tuple(range(7))
    return Geometry(
        name=name,
        compute=7,
        size=8,
        profiles=(
            MigProfile(f"1g.{eighth}gb", 1, 1, bytes_[0], anywhere),
            MigProfile(f"1g.{eighth}gb+me", 1, 1, bytes_[0], anywhere, media=True),
            MigProfile(f"1g.{quarter}gb", 1, 2, bytes_[1], (0, 2, 4, 6)),
            MigProfile(f"2g.{quarter}gb", 2, 2, bytes_[1], (0, 2, 4)),
            MigProfile(f"3g.{half}gb", 3, 4, bytes_[2], (0, 4)),
            MigProfile(f"4g.{half}gb", 4, 4, bytes_[2], (0,)),
            MigProfile(f"7g.{all_}gb", 7, 8, bytes_[3], (0,)),
        ),
    )


def _four(name: str, names_gb: Sequence[int], seen_gib: Sequence[float | None]) -> Geometry:
    """Four compute and four memory slices."""
    quarter, half, all_ = names_gb
    bytes_ = [_memory_bytes(gb, seen) for gb, seen in zip(names_gb, seen_gib, strict=True)]
    return Geometry(
        name=name,
        compute=4,
        size=4,
        profiles=(
            MigProfile(f"1g.{quarter}gb", 1, 1, bytes_[0], (0, 1, 2, 3)),
            MigProfile(f"1g.{quarter}gb+me", 1, 1, bytes_[0], (0, 1, 2, 3), media=True),
            MigProfile(f"2g.{half}gb", 2, 2, bytes_[1], (0, 2)),
            MigProfile(f"2g.{half}gb+me", 2, 2, bytes_[1], (0, 2), media=True),
            MigProfile(f"4g.{all_}gb", 4, 4, bytes_[2], (0,)),
        ),
    )


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        _four("A30", (6, 12, 24), (5.81, 11.69, 23.44)),
        _eight("A100-40", (5, 10, 20, 40), (4.75, 9.75, 19.62, 39.38)),
        _eight("A100-80", (10, 20, 40, 80), (9.5, 19.5, 39.25, 78.5)),
        _eight("H100-80", (10, 20, 40, 80), (9.75, 19.62, 39.5, 79.25)),
        _eight("H100-94", (12, 24, 47, 94), (10.62, 21.5, 46.12, 92.62)),
        _eight("H200", (18, 35, 71, 141), (16.0, 32.5, None, 140.0)),
        _eight("B200", (23, 45, 90, 180)),
        _eight("GB200", (23, 47, 93, 186)),
        _eight("B300", (34, 67, 135, 269)),
    )
}
"""By name."""

_PRODUCTS = tuple(
    (re.compile(pattern), GEOMETRIES[name])
    for pattern, name in (
        (r"A30(-24GB)?", "A30"),
        (r"A[18]00-((SXM4|PCIE)-)?40GB(-(PCIE|ACTIVE))?", "A100-40"),
        (r"A[18]00-((SXM4|PCIE)-)?80GB(-PCIE)?", "A100-80"),
        (r"H[18]00-((SXM5|PCIE)-)?80GB(-(HBM3|HBM2E|PCIE))?|H[18]00-PCIE|H800", "H100-80"),
        (r"H[18]00-NVL(-94GB)?|H[18]00-((SXM5|PCIE)-)?94GB(-(HBM3|HBM2E))?", "H100-94"),
        (r"H200(-NVL|-SXM5?)?(-141GB)?(-HBM3E)?", "H200"),
        (r"B200(-SXM6?)?(-(AC|LC|\d+GB))?", "B200"),
        (r"GB200(-NVL\d*)?", "GB200"),
        (r"B300(-SXM6?)?(-(AC|LC))?", "B300"),
    )
)
_SUFFIX = re.compile(r"(-MIG-\dG\.\d+GB(\+ME|\.ME)?)?(-SHARED)?$")
"""What GPU feature discovery adds to a product: the profile of the `single` strategy, and that it is shared."""


def geometry_of(product: str) -> Geometry | None:
    """The geometry of a product, as NVML (`NVIDIA H100 80GB HBM3`) or the label `nvidia.com/gpu.product`
    (`NVIDIA-H100-80GB-HBM3`) names it; None: it has no MIG, or one that is not known here.
    """
    plain = re.sub(r"[\s_-]+", "-", product.strip().upper()).removeprefix("NVIDIA-")
    plain = _SUFFIX.sub("", plain)
    return next((geometry for pattern, geometry in _PRODUCTS if pattern.fullmatch(plain)), None)


def build_layout(geometry: Geometry, cuts: Iterable[tuple[str, int]]) -> Layout:
    """The cuts as a layout. MigError names the first that the Device cannot have, alone or beside those before it."""
    found: Layout = ()
    for name, start in sorted(_cut(geometry, cut) for cut in cuts):
        profile = geometry.profile(name)
        if start not in profile.starts:
            raise MigError(f"{name} cannot start at {start} on {geometry.name}, only at {_listed(profile.starts)}")
        cut = Cut(name, start)
        for other in found:
            if has_conflict(geometry, cut, other):
                raise MigError(f"{_told(cut)} cannot be beside {_told(other)} on {geometry.name}")
        found = (*found, cut)
    return found


def has_conflict(geometry: Geometry, one: Cut, other: Cut) -> bool:
    """Whether a Device cannot have both: they overlap, or both want its media engines."""
    if geometry.profile(one.profile).media and geometry.profile(other.profile).media:
        return True
    return bool(_slices(geometry, one) & _slices(geometry, other))


class MigUsage(NamedTuple):
    """What cuts leave to others: all that decides what still fits beside them, whichever they are."""

    slices: int = 0
    """Memory slices that are taken, as bits."""
    media: bool = False
    """And so are the media engines."""

    def places(self, one: MigProfile) -> Iterator[tuple[int, MigUsage]]:
        """Where one more cut of a profile may start, ascending, and what is taken then."""
        bits = (1 << one.size) - 1
        for start in one.starts if not (one.media and self.media) else ():
            if not bits << start & self.slices:
                yield start, MigUsage(self.slices | bits << start, self.media or one.media)


@lru_cache(maxsize=MEMO_MAX)
def compute_usage(geometry: Geometry, on: Layout) -> MigUsage:
    """By all cuts of a layout."""
    slices = 0
    for cut in on:
        slices |= _slices(geometry, cut)
    return MigUsage(slices, any(geometry.profile(cut.profile).media for cut in on))


def free_slices(geometry: Geometry, on: Layout) -> int:
    """Memory slices that no cut has."""
    return geometry.size - compute_usage(geometry, on).slices.bit_count()


@lru_cache(maxsize=MEMO_MAX)
def list_starts(geometry: Geometry, on: Layout, profile: str) -> tuple[int, ...]:
    """Where one more cut of `profile` may start beside those in `on`, ascending. MigError where there is no such."""
    has = compute_usage(geometry, on)
    return tuple(start for start, _ in has.places(geometry.profile(profile)))


@lru_cache(maxsize=MEMO_MAX)
def count_free_cuts_by_profile(geometry: Geometry, on: Layout) -> tuple[int, ...]:
    """For each profile, in the geometry's order, how many more of it alone fit beside those in `on` at most."""
    return tuple(count_free_cuts(geometry, on, profile.name) for profile in geometry.profiles)


def count_free_cuts(geometry: Geometry, on: Layout, profile: str) -> int:
    """How many more cuts of `profile` fit beside those in `on` at most."""
    possible = list_starts(geometry, on, profile)
    one = geometry.profile(profile)
    return min(1, len(possible)) if one.media else _most(possible, one.size)


@lru_cache(maxsize=MEMO_MAX)
def _most(possible: tuple[int, ...], size: int) -> int:
    """How many of these starts, ascending, can be had at once: the first is taken or left."""
    if not possible:
        return 0
    beyond = tuple(start for start in possible if start >= possible[0] + size)
    return max(1 + _most(beyond, size), _most(possible[1:], size))


def _slices(geometry: Geometry, cut: Cut) -> int:
    """Its memory slices, as bits."""
    return ((1 << geometry.profile(cut.profile).size) - 1) << cut.start


def _cut(geometry: Geometry, cut: tuple[str, int]) -> Cut:
    """What is given as a cut, if it is one."""
    name, start = cut
    if not isinstance(name, str) or not isinstance(start, int) or isinstance(start, bool):
        raise MigError(f"a cut of {geometry.name} is the name of a profile and a whole number, not {cut!r}")
    return Cut(name, start)


def _told(cut: Cut) -> str:
    return f"{cut.profile} at {cut.start}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)

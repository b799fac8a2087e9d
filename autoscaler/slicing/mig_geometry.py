"""MIG geometry: the profiles of each GPU model, where each may start, and what still fits.

Contains the table of geometries, the mapping from product names, and the arithmetic of one device. A cut is a profile
at a start, in memory slices; a layout is the sorted tuple of all cuts on a device. Answers are exact, found by search
and cached within a bound. An impossible layout raises MigError, which names the cut. Unknown products have no geometry.

Sources: names and counts from NVIDIA's MIG User Guide ("Supported MIG Profiles") and the default configuration of
mig-parted; starts and sizes from `nvidia-smi mig -lgipp` on A30, A100 and H100 NVL. H200 and Blackwell GPUs are assumed
to be equal to those, as they have the same names and counts. Memory: see MigProfile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

MEMO_MAX = 1 << 15
"""Maximum cache entries per function (LRU). A device of eight slices has 2,319 layouts."""
_GIB, _GB = 1 << 30, 10**9
_UNSEEN_PERCENT = 95
"""Percent of the gigabytes in a profile's name that it surely has, if no driver's figure is known."""


class MigError(ValueError):
    """An invalid layout, profile or device; the message names it and the reason."""


class Cut(NamedTuple):
    """A MIG device, existing or planned (in NVIDIA's terms a GPU instance with one compute instance that spans it)."""

    profile: str
    start: int
    """Its first memory slice."""


Layout = tuple[Cut, ...]
"""Sorted."""


class MigProfile(NamedTuple):
    """One size of cut."""

    name: str
    """In NVIDIA's notation: `1g.10gb`, `1g.10gb+me`."""
    compute: int
    """Number of compute slices."""
    size: int
    """Number of memory slices, for its exclusive use."""
    memory_bytes: int
    """The least that a driver reported, or the gigabytes of the name less 5 %. A device's own figure is better."""
    starts: tuple[int, ...]
    media: bool = False
    """It has the media engines, which a device has once; so at most one such cut per device (`+me`)."""


@dataclass(frozen=True, eq=False, slots=True)
class Geometry:
    """The MIG geometry of one GPU model. One object per model, so equality is identity."""

    name: str
    compute: int
    size: int
    """Memory slices."""
    profiles: tuple[MigProfile, ...]

    def has(self, profile: str) -> bool:
        """Return whether a device has the profile."""
        return any(one.name == profile for one in self.profiles)

    def profile(self, name: str) -> MigProfile:
        """Return the profile of that name. Raises MigError if there is none."""
        for one in self.profiles:
            if one.name == name:
                return one
        raise MigError(f"{self.name} has no MIG profile {name!r}; it has {', '.join(p.name for p in self.profiles)}")


def _memory_bytes(gb: int, seen_gib: float | None) -> int:
    return gb * _GB * _UNSEEN_PERCENT // 100 if seen_gib is None else int(seen_gib * _GIB)


def _eight(name: str, names_gb: Sequence[int], seen_gib: Sequence[float | None] = (None,) * 4) -> Geometry:
    """Seven compute and eight memory slices: profiles with an eighth, a quarter, half and all of the memory."""
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
"""Suffixes added by GPU feature discovery: the profile of the `single` strategy, and `-SHARED`."""


def geometry_of(product: str) -> Geometry | None:
    """Return the geometry of a product; None if it has no MIG or is unknown. The name is that of NVML (`NVIDIA H100
    80GB HBM3`) or the label `nvidia.com/gpu.product` (`NVIDIA-H100-80GB-HBM3`).
    """
    plain = re.sub(r"[\s_-]+", "-", product.strip().upper()).removeprefix("NVIDIA-")
    plain = _SUFFIX.sub("", plain)
    return next((geometry for pattern, geometry in _PRODUCTS if pattern.fullmatch(plain)), None)


def build_layout(geometry: Geometry, cuts: Iterable[tuple[str, int]]) -> Layout:
    """Build a layout. MigError names the first cut that is impossible, alone or next to the cuts before it."""
    found: Layout = ()
    for name, start in sorted(_cut(geometry, cut) for cut in cuts):
        profile = geometry.profile(name)
        if start not in profile.starts:
            starts = ", ".join(map(str, profile.starts))
            raise MigError(f"{name} cannot start at memory slice {start} of {geometry.name}, only at {starts}")
        cut = Cut(name, start)
        for other in found:
            if has_conflict(geometry, cut, other):
                raise MigError(f"{_format_cut(cut)} conflicts with {_format_cut(other)} on {geometry.name}")
        found = (*found, cut)
    return found


def has_conflict(geometry: Geometry, one: Cut, other: Cut) -> bool:
    """Return whether two cuts exclude each other: they overlap, or both need the media engines."""
    if geometry.profile(one.profile).media and geometry.profile(other.profile).media:
        return True
    return bool(_slices(geometry, one) & _slices(geometry, other))


class MigUsage(NamedTuple):
    """The resources of a device that its partitions occupy. They determine which partitions still fit."""

    slices: int = 0
    """Occupied memory slices, as a bit mask."""
    media: bool = False
    """Whether the media engines are in use."""

    def places(self, one: MigProfile) -> Iterator[tuple[int, MigUsage]]:
        """Yield each possible start of one more cut of a profile, ascending, with the resulting usage."""
        bits = (1 << one.size) - 1
        for start in one.starts if not (one.media and self.media) else ():
            if not bits << start & self.slices:
                yield start, MigUsage(self.slices | bits << start, self.media or one.media)


@lru_cache(maxsize=MEMO_MAX)
def compute_usage(geometry: Geometry, on: Layout) -> MigUsage:
    """Return the usage of all cuts of a layout."""
    slices = 0
    for cut in on:
        slices |= _slices(geometry, cut)
    return MigUsage(slices, any(geometry.profile(cut.profile).media for cut in on))


def free_slices(geometry: Geometry, on: Layout) -> int:
    """Return the number of memory slices that no cut has."""
    return geometry.size - compute_usage(geometry, on).slices.bit_count()


@lru_cache(maxsize=MEMO_MAX)
def list_starts(geometry: Geometry, on: Layout, profile: str) -> tuple[int, ...]:
    """Return where one more cut of `profile` may start in layout `on`, ascending. Raises MigError for an unknown
    profile.
    """
    has = compute_usage(geometry, on)
    return tuple(start for start, _ in has.places(geometry.profile(profile)))


@lru_cache(maxsize=MEMO_MAX)
def count_free_cuts_by_profile(geometry: Geometry, on: Layout) -> tuple[int, ...]:
    """Return for each profile of the geometry how many more partitions of only this profile fit into layout `on`."""
    return tuple(count_free_cuts(geometry, on, profile.name) for profile in geometry.profiles)


def count_free_cuts(geometry: Geometry, on: Layout, profile: str) -> int:
    """Return the maximum number of further cuts of `profile` in layout `on`."""
    possible = list_starts(geometry, on, profile)
    one = geometry.profile(profile)
    return min(1, len(possible)) if one.media else _most(possible, one.size)


@lru_cache(maxsize=MEMO_MAX)
def _most(possible: tuple[int, ...], size: int) -> int:
    """Return how many of these starts (ascending) can be used together: take or skip the first, recursively."""
    if not possible:
        return 0
    beyond = tuple(start for start in possible if start >= possible[0] + size)
    return max(1 + _most(beyond, size), _most(possible[1:], size))


def _slices(geometry: Geometry, cut: Cut) -> int:
    """Return its memory slices as a bit mask."""
    return ((1 << geometry.profile(cut.profile).size) - 1) << cut.start


def _cut(geometry: Geometry, cut: tuple[str, int]) -> Cut:
    """Validate and convert a cut."""
    name, start = cut
    if not isinstance(name, str) or not isinstance(start, int) or isinstance(start, bool):
        raise MigError(
            f"a MIG slice of {geometry.name} is given by the name of its profile and its first memory slice, "
            f"a whole number, not by {cut!r}"
        )
    return Cut(name, start)


def _format_cut(cut: Cut) -> str:
    return f"{cut.profile} at {cut.start}"

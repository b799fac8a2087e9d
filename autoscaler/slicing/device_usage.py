"""Usage of devices by other pods, and the slices that a replica's pod actually got. Pure.

Subtracts what other pods use of cards and of ResourceSlice entries from the slices, where the exact slice is known.
Where only a count per resource name is known, `World.nodes.others` holds it instead.

Compares the slices that a pod got with the chosen ones: cards by HAMi's annotation on the pod, DRA devices by the
claim's allocation, all others by the node that the pod is bound to. A device plugin may assign any device of the node,
so for it only the node matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.slicing.dra import Got, dra_device_name
from autoscaler.slicing.hami import HamiAllocation
from autoscaler.state.world import Slice

FULL = "other pods use all of it"


class DeviceUsage(NamedTuple):
    """The usage of a slice's device by one pod or claim."""

    memory_bytes: int | None
    """None means all of it."""
    compute_percent: int = 0
    ours: bool = False
    """It belongs to one of our pods, whose replica does not report it yet."""


def list_card_usage(node: str, held: Iterable[HamiAllocation]) -> list[tuple[str, DeviceUsage]]:
    """Return usage keyed by `Slice.counted`."""
    return [(f"{node} {one.uuid}", DeviceUsage(one.memory_bytes, one.cores)) for one in held]


def list_dra_usage(slices: Iterable[Slice], got: Iterable[Got], *, ours: bool = False) -> list[tuple[str, DeviceUsage]]:
    """Return usage keyed by `Slice.counted`, for the entries that are slices."""
    known = {dra_device_name(one): one.counted for one in slices if one.kind == "dra"}
    return [(known[one.entry], DeviceUsage(one.memory_bytes, ours=ours)) for one in got if one.entry in known]


def subtract_usage(
    slices: Sequence[Slice], taken: Iterable[tuple[str, DeviceUsage]]
) -> tuple[tuple[Slice, ...], dict[str, int]]:
    """Reduce shared slices by their usage; for all others return, by `counted`, how many are taken."""
    found: dict[str, list[DeviceUsage]] = {}
    for counted, one in taken:
        found.setdefault(counted, []).append(one)
    if not found:
        return tuple(slices), {}
    gone = {
        one.counted: sum(_parts(one, each) for each in found[one.counted])
        for one in slices
        if one.counted in found and not one.shared
    }
    parts = Counter(one.counted for one in slices if one.counted in found)
    return tuple(_less(_with_other_users(one, found, parts), found) for one in slices), gone


def _with_other_users(slice_: Slice, found: Mapping[str, Sequence[DeviceUsage]], parts: Mapping[str, int]) -> Slice:
    """Set `theirs`, the number of other pods on the slice, if `counted` identifies this slice alone."""
    theirs = sum(not one.ours for one in found.get(slice_.counted, ())) if parts.get(slice_.counted) == 1 else 0
    return replace(slice_, theirs=theirs) if theirs else slice_


def _parts(slice_: Slice, taken: DeviceUsage) -> int:
    """Convert usage to a number of slices of this size, rounded up."""
    return 1 if taken.memory_bytes is None else -(-taken.memory_bytes // slice_.memory_bytes)


def _less(slice_: Slice, found: Mapping[str, Sequence[DeviceUsage]]) -> Slice:
    taken = found.get(slice_.counted, ())
    if not taken or not slice_.shared:
        return slice_
    all_bytes = slice_.memory_bytes
    memory_bytes = all_bytes - sum(all_bytes if one.memory_bytes is None else one.memory_bytes for one in taken)
    percent = slice_.compute_percent - sum(one.compute_percent for one in taken)
    full = memory_bytes <= 0 or (percent <= 0 and slice_.compute_percent > 0)
    full |= 0 < slice_.holders_max <= len(taken)
    return replace(
        slice_, memory_bytes=max(1, memory_bytes), compute_percent=max(0, percent), device_bytes=all_bytes,
        closed=slice_.closed or (FULL if full else ""),
    )  # fmt: skip

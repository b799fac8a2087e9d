"""What others have of cards and of ResourceSlices' entries, and what that leaves of the Slices that these are. Pure.

Owns that arithmetic, for Slices of which it is known who has which one. Where only a number is known, of a resource's
name, it is not here (`World.others`).

What a pod of ours really has, where that is not what was chosen for it. Pure.

Owns that comparison: of cards by what HAMi wrote onto the pod, of claims by what was allocated, and else by the node
that it is bound to: a device plug-in gives any device of a node, and which one is nobody's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.slicing.dra_claims import Got, dra_device_name, dra_slice_id
from autoscaler.slicing.hami import HamiAllocation
from autoscaler.state.world import Slice, SliceId

FULL = "others have all of it"


class DeviceUsage(NamedTuple):
    """What one of others has of a Slice's Device."""

    memory_bytes: int | None
    """None: all."""
    compute_percent: int = 0
    ours: bool = False
    """It is a pod's of ours, of which it is not known yet that it has that."""


def list_card_usage(node: str, held: Iterable[HamiAllocation]) -> list[tuple[str, DeviceUsage]]:
    """By `Slice.counted`."""
    return [(f"{node} {one.uuid}", DeviceUsage(one.memory_bytes, one.cores)) for one in held]


def list_dra_usage(slices: Iterable[Slice], got: Iterable[Got], *, ours: bool = False) -> list[tuple[str, DeviceUsage]]:
    """By `Slice.counted`, of those that are Slices."""
    known = {dra_device_name(one): one.counted for one in slices if one.kind == "dra"}
    return [(known[one.entry], DeviceUsage(one.memory_bytes, ours=ours)) for one in got if one.entry in known]


def subtract_usage(
    slices: Sequence[Slice], taken: Iterable[tuple[str, DeviceUsage]]
) -> tuple[tuple[Slice, ...], dict[str, int]]:
    """The Slices, of those that are shared what is left; and of the others, by `counted`, how many are gone."""
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
    return tuple(_less(_beside(one, found, parts), found) for one in slices), gone


def _beside(slice_: Slice, found: Mapping[str, Sequence[DeviceUsage]], parts: Mapping[str, int]) -> Slice:
    """With how many others have it, where it alone is what they are known by."""
    theirs = sum(not one.ours for one in found.get(slice_.counted, ())) if parts.get(slice_.counted) == 1 else 0
    return replace(slice_, theirs=theirs) if theirs else slice_


def _parts(slice_: Slice, taken: DeviceUsage) -> int:
    """How many Slices of that size it is."""
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


def resolve_actual_slices(
    chosen: Sequence[SliceId],
    node: str,
    known: Mapping[SliceId, Slice],
    held: Callable[[], Collection[SliceId]] = tuple,
    *,
    cards: Sequence[HamiAllocation] = (),
    got: Sequence[Got] = (),
) -> tuple[SliceId, ...]:
    """Empty: it has what was chosen, or nobody can say yet. A device that is no Slice has the id that it would have.
    `held`: what others of ours have, asked for only where it matters: where it is one among several that are alike, it
    is none of these.
    """
    if not chosen or not node:
        return ()
    if got:
        there = tuple(dict.fromkeys(dra_slice_id(one.entry, node) for one in got))
    elif cards:
        there = _cards(chosen, node, known, held, [one.uuid for one in cards])
    elif all(one.partition("/")[0] == node for one in chosen):
        return ()
    else:
        there = _elsewhere(chosen, node, known, held())
    return () if set(there) == set(chosen) else there


def _cards(
    chosen: Sequence[SliceId],
    node: str,
    known: Mapping[SliceId, Slice],
    held: Callable[[], Collection[SliceId]],
    uuids: Iterable[str],
) -> tuple[SliceId, ...]:
    """By UUID. A card may be several Slices, of which it is one."""
    mine = {known[one].handle: one for one in chosen if one in known and known[one].node == node}
    found = dict[SliceId, None]()
    for uuid in dict.fromkeys(uuids):
        parts = [] if uuid in mine else [one.id for one in known.values() if (one.node, one.handle) == (node, uuid)]
        first = mine.get(uuid)
        if first is None and parts:
            first = _free(parts, held())
        found[SliceId(first or f"{node}/{uuid}")] = None
    return tuple(found)


def _free(parts: Sequence[SliceId], held: Collection[SliceId]) -> SliceId:
    """The first that nobody has, as far as there is one."""
    return next((one for one in parts if one not in held), parts[0])


def _elsewhere(
    chosen: Sequence[SliceId], node: str, known: Mapping[SliceId, Slice], held: Collection[SliceId]
) -> tuple[SliceId, ...]:
    """On a node that was not chosen: as many of what they are there, which nobody has as far as there are such."""
    found = dict[SliceId, None]()
    for one in chosen:
        same = SliceId(f"{node}/{one.partition('/')[2]}")
        kind = known[one].handle if one in known else None
        alike = [same, *(other.id for other in known.values() if (other.node, other.handle) == (node, kind))]
        found[next((id for id in alike if id in known and id not in held and id not in found), same)] = None
    return tuple(found)

"""The slices that a pod actually got, as device plug-ins, HAMi or claims report them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from autoscaler.slicing.dra import Got, dra_slice_id
from autoscaler.slicing.hami import HamiAllocation
from autoscaler.state.world import Slice, SliceId


def resolve_actual_slices(
    chosen: Sequence[SliceId],
    node: str,
    known: Mapping[SliceId, Slice],
    held: Callable[[], Collection[SliceId]] = tuple,
    *,
    cards: Sequence[HamiAllocation] = (),
    got: Sequence[Got] = (),
) -> tuple[SliceId, ...]:
    """Return the slices that a pod actually has; empty if they are the chosen ones or not known yet.

    A device that is not a slice gets the id that it would have. `held` returns the slices of our other replicas, and is
    called only if needed: among identical slices, one that is not held is preferred.
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
    """Resolve cards by UUID. A card may have several slices; choose one of them."""
    mine = {known[one].handle: one for one in chosen if one in known and known[one].node == node}
    found = dict[SliceId, None]()
    for uuid in dict.fromkeys(uuids):
        parts = [] if uuid in mine else [one.id for one in known.values() if (one.node, one.handle) == (node, uuid)]
        first = mine.get(uuid)
        if first is None and parts:
            taken = held()
            first = next((one for one in parts if one not in taken), parts[0])
        found[SliceId(first or f"{node}/{uuid}")] = None
    return tuple(found)


def _elsewhere(
    chosen: Sequence[SliceId], node: str, known: Mapping[SliceId, Slice], held: Collection[SliceId]
) -> tuple[SliceId, ...]:
    """Return the same number of equivalent slices on `node`, which is not the chosen node. Slices that are not held are
    preferred.
    """
    found = dict[SliceId, None]()
    for one in chosen:
        same = SliceId(f"{node}/{one.partition('/')[2]}")
        kind = known[one].handle if one in known else None
        alike = [same, *(other.id for other in known.values() if (other.node, other.handle) == (node, kind))]
        found[next((id for id in alike if id in known and id not in held and id not in found), same)] = None
    return tuple(found)

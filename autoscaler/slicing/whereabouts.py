"""What a pod of ours really has, where that is not what was chosen for it. Pure.

Owns that comparison: of cards by what HAMi wrote onto the pod, of claims by what was allocated, and else by the node
that it is bound to: a device plug-in gives any device of a node, and which one is nobody's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from autoscaler.slicing.dra_claims import Got, id_called
from autoscaler.slicing.hami import Held
from autoscaler.state.world import Slice, SliceId


def really(
    chosen: Sequence[SliceId],
    node: str,
    known: Mapping[SliceId, Slice],
    held: Callable[[], Collection[SliceId]] = tuple,
    *,
    cards: Sequence[Held] = (),
    got: Sequence[Got] = (),
) -> tuple[SliceId, ...]:
    """Empty: it has what was chosen, or nobody can say yet. A device that is no Slice has the id that it would have.
    `held`: what others of ours have, asked for only where it matters: where it is one among several that are alike, it
    is none of these.
    """
    if not chosen or not node:
        return ()
    if got:
        there = tuple(dict.fromkeys(id_called(one.entry, node) for one in got))
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

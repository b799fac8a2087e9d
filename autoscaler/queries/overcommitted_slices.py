"""Detects slices overcommitted by others, and selects the replicas that must go. Pure.

The planner never overcommits a slice. But a scheduler may allocate another device to a pod than the planner chose, and
pods of others may use any device. Then the actual allocation counts: nothing new is placed on an overcommitted slice,
and the oldest replicas stay, as far as there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autoscaler.contract import ReplicaId
from autoscaler.state.lifecycle import LEAVING
from autoscaler.state.resources import ResourceAmount
from autoscaler.state.world import Replica, Slice, SliceId, World

CROWDED = "it is overcommitted: {} on it, placed by another scheduler"


def room_of(replica: Replica, slice_: Slice) -> ResourceAmount:
    """Return the amount that it holds of one of its slices."""
    place = 1 if slice_.holders_max else 0
    if _alone(replica, slice_):
        return ResourceAmount(slice_.memory_bytes, slice_.compute_percent, place)
    return ResourceAmount(replica.resources.memory_bytes, replica.resources.compute_percent, place)


def compute_usable_resources(slice_: Slice) -> ResourceAmount:
    """Return the amount of a slice that replicas may use. Its memory and compute are already reduced by those of pods
    of others.
    """
    return ResourceAmount(slice_.memory_bytes, slice_.compute_percent, max(0, slice_.holders_max - slice_.theirs))


def list_crowded_slices(world: World) -> dict[SliceId, str]:
    """Return the overcommitted slices -> why nothing is placed there."""
    found: dict[SliceId, str] = {}
    for id in _suspects(world):
        there = [world.replicas[one] for one in world.by_slice.get(id, ())]
        if _over(world.nodes.slices[id], there):
            names: list[str] = sorted({one.model for one in there})
            names += ["pods that this installation does not manage"] if world.nodes.slices[id].theirs else []
            found[id] = CROWDED.format(", ".join(names) + (" is" if names == [there[0].model] else " are"))
    return found


def list_excess_replicas(world: World, anyway: Collection[ReplicaId] = ()) -> dict[ReplicaId, str]:
    """Return the replicas to drain -> why, by slice, and the youngest on a slice first. `anyway`: replicas that end
    anyway.
    """
    going: dict[ReplicaId, str] = {}
    for id in _suspects(world):
        there = [world.replicas[one] for one in world.by_slice.get(id, ()) if one not in anyway]
        stay = sorted((one for one in there if one.state not in LEAVING and one.id not in going), key=_age)
        while stay and _over(world.nodes.slices[id], stay):
            last = stay.pop()
            going[last.id] = _reason(world.nodes.slices[id], last, stay)
    return going


def explain_misplacement(replica: Replica) -> str:
    """Explain that it is on other slices than chosen; empty if it is on the chosen ones."""
    if not replica.resources.chosen:
        return ""
    return f"it was allocated {', '.join(replica.resources.slices)} instead of {', '.join(replica.resources.chosen)}"


def is_on_chosen_devices(world: World, replica: Replica) -> bool:
    """Return whether the replica is on the chosen devices. Claims cannot always name a part of a device. If a claim
    took a part of a slice that was chosen as a whole, that slice no longer exists.
    """
    there, chosen = (
        [world.nodes.slices.get(id) for id in ids] for ids in (replica.resources.slices, replica.resources.chosen)
    )
    if len(there) == 1 and there[0] is not None and chosen == [None]:
        part, (was,) = there[0], replica.resources.chosen
        return part.kind == "dra" and part.device_bytes > 0 and was.partition("/")[0] == part.node
    return [one and one.device for one in there] == [one and one.device for one in chosen] and all(there)


def _suspects(world: World) -> list[SliceId]:
    """Return the slices with pods or replicas that the planner did not place there, in order."""
    given = {
        id
        for one in world.replicas.values()
        if one.resources.chosen
        for id in one.resources.slices
        if id in world.nodes.slices
    }
    theirs = {id for id in world.by_slice if id in world.nodes.slices and world.nodes.slices[id].theirs}
    return sorted(given | theirs)


def _over(slice_: Slice, holders: Sequence[Replica]) -> bool:
    """Whether they hold more than the slice has. The size of a shared slice is already reduced by the use of pods of
    others.
    """
    if not holders:
        return False
    many = len(holders) + slice_.theirs
    if many > 1 and any(_alone(one, slice_) for one in holders):
        return True
    if 0 < slice_.holders_max < many:
        return True
    memory_bytes = sum(one.resources.memory_bytes for one in holders)
    percent = sum(one.resources.compute_percent for one in holders)
    return memory_bytes > slice_.memory_bytes or percent > max(slice_.compute_percent, 0)


def _alone(replica: Replica, slice_: Slice) -> bool:
    return not slice_.shared or len(replica.resources.slices) > 1 or replica.resources.memory_bytes == 0


def _age(replica: Replica) -> tuple[float, ReplicaId]:
    return replica.times.created_s, replica.id


def _reason(slice_: Slice, replica: Replica, stay: Iterable[Replica]) -> str:
    others = [
        *sorted({one.model for one in stay}),
        *(["pods that this installation does not manage"] if slice_.theirs else []),
    ]
    occupied = f"{' and '.join(others)} {'are' if len(others) > 1 or slice_.theirs else 'is'} there" if others else ""
    no_room = f"{slice_.id} has no room for it" + (f": {occupied}" if occupied else "")
    return "; ".join(filter(None, (explain_misplacement(replica), no_room)))

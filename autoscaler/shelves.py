"""The World as Shelves: every Slice with what is on it, what is free, and from when who may be evicted.

Owns the translation from the World into the packer's words: Shelves, the start lock of Devices, and Wants.
Promises: what is not proven clean is not free, and unknown is busy. It chooses nothing; `autoscaler.packer` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.demand import (
    BEGINNING,
    LIVE,
    NO_HISTORY,
    NO_LOAD,
    held_until_s,
    live,
    refused_until_s,
    residency_s,
    used,
)
from autoscaler.drain import complete, in_use
from autoscaler.model import Model, Start
from autoscaler.nodes import shut
from autoscaler.operators import closed
from autoscaler.packing import Force, Incumbent, Room, Shelf, Want
from autoscaler.podspec import Pod
from autoscaler.states import ReplicaState as S
from autoscaler.taints import tolerations
from autoscaler.world import DeviceId, Isolation, NodeId, Replica, Slice, SliceId, World

STUCK_S = 60.0
"""Stopping or scrubbing for longer than that is not counted on any more: a Want may take another victim."""
SERVE_FIRST_S = 1.0
"""A new Replica stays for who waits until a Call is seen on it, or so long: a start serves, however short residency."""
EXCLUSIVE_S = Start().exclusive_seconds
"""The start lock of a Replica whose Model has no document any more."""
ISOLATION = {"any": Isolation.NONE, "memory": Isolation.MEMORY, "hardware": Isolation.HARDWARE}
ENDING = frozenset({S.STOPPING, S.SCRUBBING, S.FAILED})
LEAVING = ENDING | {S.DRAINING}


def want_of(  # noqa: PLR0917  in the order of a Want
    model: Model,
    ordinal: int,
    unserved_since_s: float,
    force: Force,
    reason: str,
    defaults: Pod | None = None,
    avoids: tuple[NodeId, ...] = (),
) -> Want:
    """One Replica of `model` as the packer is asked for it. `defaults`: what the Settings say of pods. `avoids`: nodes
    that the Model shuns now.
    """
    gpu, own = model.spec.gpu, model.spec.pod.node_selector
    labels = own if defaults is None or not defaults.node_selector else {**defaults.node_selector, **own}
    return Want(
        model=model.name,
        ordinal=ordinal,
        devices=gpu.count,
        memory_bytes=model.memory_bytes,
        compute_percent=gpu.compute_percent or 0,
        isolation=ISOLATION[gpu.isolation],
        products=gpu.models,
        priority=model.spec.priority,
        unserved_since_s=unserved_since_s,
        force=force,
        artifact=model.spec.artifact or "",
        reason=reason,
        selector=tuple(sorted(labels.items())) if labels else (),
        tolerations=tolerations(defaults, model.spec.pod),
        avoids=avoids,
    )


def locks(world: World, now_s: float) -> dict[DeviceId, float]:
    """Devices on which a Replica starts or wakes, and until when that keeps others from starting there."""
    ends: dict[DeviceId, float] = {}
    for replica in world.replicas.values():
        came_from = replica.drain.came_from if replica.drain is not None else None
        if replica.state not in BEGINNING and not (replica.state == S.DRAINING and came_from == S.STARTING):
            continue
        model = world.models.get(replica.model)
        last_s = max(replica.since_s, replica.started_s or 0.0, replica.grown_s or 0.0)
        end_s = last_s + (EXCLUSIVE_S if model is None else model.spec.start.exclusive_seconds)
        for id in replica.slices if end_s > now_s else ():
            slice_ = world.slices.get(id)
            if slice_ is not None:
                ends[slice_.device] = max(end_s, ends.get(slice_.device, 0.0))
    return ends


def stuck_s(replica: Replica) -> float:
    """From when on the Replica should long be gone; infinite while it may still serve."""
    return replica.since_s + STUCK_S if replica.state in ENDING else inf


def evictable_s(world: World, replica: Replica, model: Model, calls: int) -> float:
    """When its residency ends; `calls` are on it. One that starts stays for who waits or was refused, and so does
    one that is ready and not called yet; one that nobody used stays as it is held.
    """
    load, history = world.loads.get(model.name, NO_LOAD), world.histories.get(model.name, NO_HISTORY)
    if replica.state in BEGINNING:
        return inf if load.waiting else max(history.hold_until_s, refused_until_s(history))
    ready_s = replica.since_s if replica.ready_s is None else replica.ready_s
    if load.waiting or load.running or used(history, ready_s):
        stays_s = residency_s(model, history)
        return ready_s + (max(stays_s, SERVE_FIRST_S) if load.waiting and not calls else stays_s)
    return held_until_s(model, history, replica)


class _Look(NamedTuple):
    """What all Shelves of one tick are made with."""

    world: World
    now_s: float
    calls: Mapping[ReplicaId, int]
    told: bool
    whole: Collection[DeviceId]
    locked: Collection[DeviceId]
    leaving: Collection[ReplicaId]
    staying: Collection[ReplicaId]
    shut: Mapping[SliceId, str]


def shelves(
    world: World, now_s: float, leaving: Collection[ReplicaId] = (), staying: Collection[ReplicaId] = ()
) -> tuple[Shelf, ...]:
    """All Slices in order of their ids. `leaving` and `staying`: Replicas that this tick drains and revives."""
    look = _Look(
        world=world,
        now_s=now_s,
        calls=in_use(world),
        told=complete(world, now_s),
        whole=_alone(world.slices.values()),
        locked=locks(world, now_s),
        leaving=leaving,
        staying=staying,
        shut=shut(world, now_s),
    )
    return tuple(_shelf(look, world.slices[id]) for id in sorted(world.slices))


def empty_shelves(world: World) -> tuple[Shelf, ...]:
    """All Slices in order of their ids, as if nobody were on them."""
    whole, nothing = _alone(world.slices.values()), Room(0, 0)
    return tuple(
        Shelf(
            slice=slice_,
            whole=slice_.device in whole,
            incumbents=(),
            free=Room(slice_.memory_bytes, slice_.compute_percent),
            coming=nothing,
            locked=False,
        )
        for _, slice_ in sorted(world.slices.items())
    )


def _shelf(look: _Look, slice_: Slice) -> Shelf:
    on_it = (look.world.replicas[id] for id in look.world.by_slice.get(slice_.id, ()))
    incumbents = tuple(_incumbent(look, replica, slice_) for replica in on_it)
    free, coming = Room(slice_.memory_bytes, slice_.compute_percent), Room(0, 0)
    for incumbent in incumbents:
        free = free.less(incumbent.room)
        if incumbent.leaving and not incumbent.stuck:
            coming = coming.plus(incumbent.room)
    device = slice_.device
    return Shelf(
        slice=slice_,
        whole=device in look.whole,
        incumbents=incumbents,
        free=free,
        coming=coming,
        locked=device in look.locked,
        closed=closed(look.world, slice_) or look.shut.get(slice_.id, ""),
    )


def _alone(slices: Collection[Slice]) -> set[DeviceId]:
    """Devices that are one Slice."""
    counts: dict[DeviceId, int] = {}
    for slice_ in slices:
        counts[slice_.device] = counts.get(slice_.device, 0) + 1
    return {device for device, count in counts.items() if count == 1}


def _incumbent(look: _Look, replica: Replica, slice_: Slice) -> Incumbent:
    world, model = look.world, look.world.models.get(replica.model)
    load = world.loads.get(replica.model, NO_LOAD)
    alone = not slice_.shared or len(replica.slices) > 1 or replica.memory_bytes == 0
    calls = look.calls.get(replica.id, 0)
    everything, claim = Room(slice_.memory_bytes, slice_.compute_percent), replica.memory_bytes
    leaving = (replica.state in LEAVING or model is None or replica.id in look.leaving) and (
        replica.id not in look.staying
    )
    stays = model is None or leaving or replica.state not in LIVE
    return Incumbent(
        replica=replica.id,
        model=replica.model,
        state=replica.state,
        room=everything if alone else Room(claim, replica.compute_percent),
        priority=0 if model is None else model.spec.priority,
        busy=not look.told or load.waiting > 0 or calls > 0,
        kept=model is not None and 0 < model.spec.replicas.min >= len(live(world, model.name)),
        evictable_s=inf if model is None or stays else evictable_s(world, replica, model, calls),
        leaving=leaving,
        stuck=look.now_s >= stuck_s(replica),
        others=len(replica.slices) - 1,
    )

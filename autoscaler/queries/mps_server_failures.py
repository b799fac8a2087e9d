"""Failed MPS servers: several replicas of one device that fail together. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from autoscaler.slicing.nvidia_device_plugin import MPS
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import Isolation
from autoscaler.state.world import (
    DeviceId,
    MpsServerFailure,
    NodeId,
    Replica,
    Slice,
    SliceId,
    World,
)

TOGETHER_S = 5.0
"""Replicas that fail within this time after the first one belong to the same failure of an MPS server."""


TOGETHER = 2
"""Minimum number of replicas that fail together; a single failure is assumed to have another cause."""


PAUSE_S, PAUSE_S_MAX = 5.0, 300.0
"""Pause after the first failure, doubled with each failed trial start; and its maximum."""


FELL = "all replicas on its MPS server failed at once"


_BEGINNING = frozenset({S.PENDING, S.STARTING})


_LIVING = frozenset({S.STARTING, S.READY, S.UNREADY, S.WAKING, S.DRAINING})


Falls = dict[tuple[NodeId, DeviceId | None], MpsServerFailure]


def find_mps_domain(slice_: Slice) -> tuple[NodeId, DeviceId | None] | None:
    """Return the domain of its MPS server: (node, device), or (node, None) for all MPS slices of it. None: no MPS."""
    if slice_.kind == MPS:
        return slice_.node, None
    if slice_.kind == "dra" and slice_.shared and slice_.isolation is Isolation.MEMORY:
        return slice_.node, slice_.device
    return None


def record_replica_failure(world: World, others: Iterable[Replica], replica: Replica, now_s: float) -> Falls:
    """Return the MPS server failures, updated with the failure of this replica. `others`: the other replicas. Old
    single failures expire.
    """
    falls = {at: one for at, one in world.nodes.mps_failures.items() if one.times or now_s < one.first_s + TOGETHER_S}
    for at in _domains(world, replica):
        fall = falls.get(at, MpsServerFailure(first_s=now_s))
        before = replica.times.ready_s is not None and replica.times.created_s < fall.first_s
        gone = fall.replicas | ({replica.id} if before else set())
        times = fall.times
        if times:
            times += replica.times.created_s >= fall.first_s
        elif len(gone) >= TOGETHER:
            times = int(not any(one.state in _LIVING for one in others if at in _domains(world, one)))
        until_s = fall.until_s if times == fall.times else now_s + min(PAUSE_S * 2.0 ** min(times - 1, 16), PAUSE_S_MAX)
        falls[at] = MpsServerFailure(first_s=fall.first_s, replicas=gone, times=times, until_s=until_s)
    return falls


def record_replica_ready(world: World, replica: Replica) -> Falls:
    """Return the MPS server failures without those that are over, since this replica was ordered later and became
    ready.
    """
    there = _domains(world, replica)
    known = world.nodes.mps_failures
    return {at: one for at, one in known.items() if at not in there or replica.times.created_s < one.first_s}


def list_mps_failed_slices(world: World, now_s: float) -> dict[SliceId, str]:
    """Return the slices on which nothing new is placed because their MPS server failed -> why."""
    falls = {at: one for at, one in world.nodes.mps_failures.items() if one.times}
    if not falls:
        return {}
    tried = {
        at for one in world.replicas.values() if one.state in _BEGINNING
        for at in _domains(world, one) if at in falls and one.times.created_s >= falls[at].first_s
    }  # fmt: skip
    found: dict[SliceId, str] = {}
    for id, one in world.nodes.slices.items():
        at = find_mps_domain(one)
        if at in tried:
            found[id] = f"{FELL}, and a trial start there is in progress"
        elif at in falls and now_s < falls[at].until_s:
            found[id] = f"{FELL}, and starts there are paused"
    return found


def _domains(world: World, replica: Replica) -> set[tuple[NodeId, DeviceId | None]]:
    """Return its MPS domains; most replicas have none or one."""
    there = (find_mps_domain(world.nodes.slices[id]) for id in replica.resources.slices if id in world.nodes.slices)
    return {at for at in there if at is not None}

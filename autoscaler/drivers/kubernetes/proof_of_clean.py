"""Decides when a pod that is gone has left nothing on its devices (the proof of CLEAN), and waits for it. I/O.

A kubelet releases a pod's object once it has reported how its processes ended. GPU memory that may be left is then
*measured* to be free, if the node has an agent that reports it, or *assumed* to be free after a while. A pod deleted by
force is gone at once, while its processes may run until its kubelet ends them, which it does within the pod's grace
period: they are assumed ended only after that period plus `FORCED_S`, during all of which the kubelet was heard from,
unless the node is gone or was rebooted. A pod without slices needs no wait. A pod with ResourceClaims is not clean
while one of them is reserved for it. If its kubelet released the object, that suffices: it does so once all claims are
*unprepared*, except shared claims, about which it hears nothing before the last user. The caller supplies the
measurement; this module knows no reports and no claims.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects.node_facts import NodeSeen
from autoscaler.drivers.kubernetes.objects.replica_pod import PodSeen

ASSUME_AFTER_S = 30.0
"""A GPU may keep memory of a process that is gone (docs/reference/replica-states.md, proof `assumed`)."""
FORCED_S = 300.0
"""Time beyond the grace period of a pod deleted by force. Its kubelet kills what it runs for a deleted pod, perhaps
late (it checks all pods every 2 s, and its runtime may be busy). Without an agent nothing else ever reports it."""
LOOK_S = 0.1
ASSUMED, MEASURED, EXITED, UNPREPARED = "assumed", "measured", "exited", "unprepared"
FORCED = (
    "its pod was deleted by force, so its processes may run on: its devices are free once the agent of its node has "
    "measured that, the node was started anew, or its kubelet has had the time of the pod's grace and "
    f"{FORCED_S / 60:.0f} min more"
)

Measured = Callable[[ReplicaId, float], bool]
"""(replica, time since which its pod is gone) -> whether its devices' memory was measured to be free since then."""


def is_force_deleted(pod: PodSeen) -> bool:
    """Return whether a pod that is gone, given its last state, was deleted by force: no end was reported."""
    return bool(pod.slices) and pod.started_unix_s is not None and not pod.ended


Reserved = Callable[[PodSeen], bool]
"""(pod that is gone) -> whether a claim is still reserved for it."""


def nothing_measured(_: ReplicaId, __: float) -> bool:
    """The `Measured` of a cluster without agents."""
    return False


class Clearing:
    """Waits until a pod is clean. `node` returns the current state of a node; None: no node of that name exists."""

    def __init__(
        self, clock: Callable[[], float], node: Callable[[str], NodeSeen | None], measured: Measured,
        assume_after_s: float, reserved: Reserved = lambda _: False,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._node = node
        self._measured = measured
        self._assume_after_s = assume_after_s
        self._reserved = reserved

    async def prove(self, pod: PodSeen, *, by_force: bool) -> str:
        """Wait, then return the proof. Call it as soon as the pod's object is gone."""
        if not pod.slices:
            return EXITED if pod.ended else ASSUMED
        gone_s, began_as = self._clock(), self._node(pod.node)
        heard_s = gone_s
        while True:
            waits = self._reserved(pod)
            if not waits and self._measured(pod.replica, gone_s):
                return MEASURED
            if not waits and pod.claims_alone and not by_force:
                return UNPREPARED
            left_s = gone_s + self._assume_after_s - self._clock()
            node = self._node(pod.node)
            if node is not None and node.lost:
                heard_s = self._clock()  # a kubelet that is not heard from may not have killed anything
            runs_on = by_force and node is not None and began_as is not None and _same(node, began_as)
            if not waits and left_s <= 0 and (not runs_on or self._clock() >= heard_s + pod.grace_s + FORCED_S):
                return ASSUMED
            await asyncio.sleep(min(LOOK_S, left_s) if left_s > 0 else LOOK_S)


def _same(one: NodeSeen, other: NodeSeen) -> bool:
    """Return whether the node was not rebooted in between."""
    return one.boot == other.boot

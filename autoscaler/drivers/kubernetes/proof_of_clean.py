"""Decides when the devices of a deleted pod are free (the proof of CLEAN), and waits for that. I/O.

A kubelet releases a pod's object once its processes have ended. The proofs:

- *measured*: the node's agent reports that the devices' memory is free.
- *assumed*: no agent reports, and `ASSUME_AFTER_S` have passed.
- *unprepared*: the pod had only ResourceClaims of its own, which its kubelet unprepares before it releases the object.
- *exited*: the pod has no slices, and its containers have ended.

A force-deleted pod is gone at once, while its processes may run until its kubelet ends them, within the pod's grace
period. They are assumed to have ended once the kubelet has reported for that period plus `FORCED_S` without a gap, or
once the node is gone or rebooted. No pod is clean while a ResourceClaim is reserved for it. The caller supplies the
measurements and reservations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen

ASSUME_AFTER_S = 30.0
"""A GPU may keep memory of a process that is gone (docs/reference/replica-states.md, proof `assumed`)."""
FORCED_S = 300.0
"""Time beyond the grace period of a force-deleted pod. Its kubelet kills the containers of a deleted pod, but may be
late (it checks all pods every 2 s, and its runtime may be busy). Without an agent nothing reports their end."""
LOOK_S = 0.1
ASSUMED, MEASURED, EXITED, UNPREPARED = "assumed", "measured", "exited", "unprepared"
FORCED = (
    "its pod was deleted by force, and its processes may still run; its devices count as free when the agent of "
    f"its node measures them as free, when the node reboots, or {FORCED_S / 60:.0f} min after the pod's grace period"
)

Measured = Callable[[ReplicaId, float], bool]
"""(replica, time at which its pod was gone) -> whether its devices' memory was measured to be free after that."""


def is_force_deleted(pod: PodSeen) -> bool:
    """Return whether a pod that is gone was deleted by force: its last state reported no end of its container."""
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
                heard_s = self._clock()  # a kubelet that does not report may not have killed the processes
            runs_on = by_force and node is not None and began_as is not None and node.boot == began_as.boot
            if not waits and left_s <= 0 and (not runs_on or self._clock() >= heard_s + pod.grace_s + FORCED_S):
                return ASSUMED
            await asyncio.sleep(min(LOOK_S, left_s) if left_s > 0 else LOOK_S)

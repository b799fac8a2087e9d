"""Whether anything of a pod that is gone is left on its devices, and how that is known: the proof of clean. I/O: waits.

Owns the patience. A kubelet lets a pod's object go once it has told how its processes ended: then what a GPU may still
keep is *measured* to be gone, where the node has an agent that says so, or *assumed* to be after a while. A pod that
was deleted by force is gone at once, and its processes may run on until their kubelet has ended them, which it does
within the pod's own grace: nothing is assumed of those before that and FORCED_S more, all of which their kubelet was
heard, unless their node is gone or was started anew. What held no Slice has nothing to be cleared, and is not waited
for. What has ResourceClaims is not clean before none of them is reserved for it; where its kubelet let its object go,
that is all: it lets it go once all is *unprepared*, but for a claim that others have, too, of which it is told nothing
before the last of them. Measuring is given to it; it knows no report and no claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects.node import NodeSeen
from autoscaler.drivers.kubernetes.objects.pod import PodSeen

ASSUME_AFTER_S = 30.0
"""A GPU may keep memory of a process that is gone (architecture, section 5: *assumed*)."""
FORCED_S = 300.0
"""Beyond the grace of a pod that was deleted by force. Its kubelet kills what it runs for a pod that is no more; it may
be late (it looks at all pods every 2 s, and its runtime may be busy). Without an agent nothing else ever tells."""
LOOK_S = 0.1
ASSUMED, MEASURED, EXITED, UNPREPARED = "assumed", "measured", "exited", "unprepared"
FORCED = (
    "its pod was deleted by force, so its processes may run on: its devices are free once the agent of its node has "
    "measured that, the node was started anew, or its kubelet has had the time of the pod's grace and "
    f"{FORCED_S / 60:.0f} min more"
)

Measured = Callable[[ReplicaId, float], bool]
"""(Replica, since when its pod is gone) -> whether its devices' memory was measured to be free since."""


def is_force_deleted(pod: PodSeen) -> bool:
    """Whether a pod whose object is gone, and which was this last, was deleted by force: nobody told of its end."""
    return bool(pod.slices) and pod.started_unix_s is not None and not pod.ended


Reserved = Callable[[PodSeen], bool]
"""A pod that is gone -> whether a claim is still reserved for it."""


def nothing_measured(_: ReplicaId, __: float) -> bool:
    """Where there are no agents."""
    return False


class Clearing:
    """`reserved`: see there. `node` gives what is known of a node now; None: there is none of that name."""

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
        """Returns the proof. The pod's object went just now."""
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
                heard_s = self._clock()  # who is not heard may kill nothing
            runs_on = by_force and node is not None and began_as is not None and _same(node, began_as)
            if not waits and left_s <= 0 and (not runs_on or self._clock() >= heard_s + pod.grace_s + FORCED_S):
                return ASSUMED
            await asyncio.sleep(min(LOOK_S, left_s) if left_s > 0 else LOOK_S)


def _same(one: NodeSeen, other: NodeSeen) -> bool:
    """It was not started anew since."""
    return one.boot == other.boot

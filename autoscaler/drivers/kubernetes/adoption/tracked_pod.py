"""One pod of an adopted workload: its replica, its annotations, and its observations. Pure.

Builds the observations of the pod's replica, and the id of a replica without an order. `workload` makes the
decisions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from autoscaler import text
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.kubernetes.adoption.objects import AdoptedPodSeen
from autoscaler.drivers.kubernetes.objects.pod_state import StartTiming
from autoscaler.spec.document_names import format_replica_id
from autoscaler.spec.model import ADOPTED_HASH
from autoscaler.state.events import ReplicaSeen, Seen

EXITED = "exited"
"""Proof of CLEAN: its kubelet reports that all containers have ended. It holds none of our slices."""
RELEASED = "released"
"""Proof of CLEAN for a replica that is no longer ours; its pod may still run."""
_INTENT = re.compile(r"[0-9a-f]{10}")
"""The key of a start decision (`planner.plan.build_intent_key`)."""


class PodMark(NamedTuple):
    """Annotations to write on a pod: the ID of its replica, and whether the controller deletes this pod first."""

    pod: str
    uid: str
    replica: ReplicaId
    intent: str
    goes_first: bool


@dataclass(slots=True)
class TrackedPod:
    """A pod that exists."""

    seen: AdoptedPodSeen
    since_s: float
    answers: bool = False
    replica: ReplicaId | None = None
    intent: str = ""
    slots: int = 1
    reported: tuple[Seen, str, str, int] | None = None
    """Its last report: state, reason for waiting, address, rank."""
    going: bool = False
    """Its stop was ordered."""
    spent: set[str] = field(default_factory=set)
    """Ids of its ended replicas: a mark with one of them is ignored."""
    finds: int = 0
    """Number of its replicas that were named after the pod."""
    marked: PodMark | None = None
    """The mark written last."""
    begun: StartTiming = field(default_factory=StartTiming)
    """Timestamps of the start of its current replica."""

    stuck_s: float | None = None
    """Start of a wait that has a limit; None: there is no such wait."""
    stuck_for: tuple[float, str] | None = None
    """The limit of that wait in seconds, and the running init container."""
    failed_s: float | None = None
    """When that wait exceeded its limit; None: it has not."""

    def wait(self, now_s: float) -> None:
        """Check whether its wait has exceeded the limit."""
        if self.seen.patience_s is None or self.seen.leaving:
            self.stuck_s = self.failed_s = None
            return
        if self.stuck_s is None or self.stuck_for != (self.seen.patience_s, self.seen.waits_for):
            self.stuck_s, self.stuck_for = now_s, (self.seen.patience_s, self.seen.waits_for)
        if self.failed_s is None and now_s >= self.stuck_s + self.seen.patience_s:
            self.failed_s = now_s

    @property
    def wait_deadline_s(self) -> float | None:
        """When its wait will exceed the limit; None: no limit applies, or the limit was exceeded."""
        waits = self.stuck_s is not None and self.seen.patience_s is not None and self.failed_s is None
        return (self.stuck_s or 0.0) + (self.seen.patience_s or 0.0) if waits else None

    @property
    def ended(self) -> str:
        """How its container ended, or why it cannot start; empty if neither applies."""
        return self.seen.ended or ("" if self.failed_s is None else self.seen.waits)

    @property
    def stays(self) -> bool:
        """Whether the workload's controller counts the pod as one of its replicas."""
        return not self.seen.leaving and not self.seen.over


def find_missing_mark(pod: TrackedPod, *, ours: bool) -> PodMark | None:
    """Return the mark to write, or None. A replica named after its pod needs none. `ours`: we order deletions."""
    goes_first = pod.going and ours
    mark = PodMark(pod.seen.name, pod.seen.uid, pod.replica or ReplicaId(""), pod.intent, goes_first)
    stands = (pod.seen.replica, pod.seen.goes_first) == (mark.replica, goes_first)
    needless = not pod.seen.replica and not goes_first and mark.replica == derive_replica_id(pod.seen, 0)
    return None if stands or needless or pod.marked == mark else mark


def derive_replica_state(pod: TrackedPod) -> Seen:
    """Return the state of its replica."""
    seen = pod.seen
    if pod.ended:
        return Seen.EXITED
    if seen.leaving:
        return Seen.LEAVING
    if pod.answers:
        return Seen.READY
    was_ready = pod.reported is not None and pod.reported[0] in {Seen.READY, Seen.UNREADY}
    return Seen.UNREADY if was_ready else Seen.STARTING


def format_pod_address(pod: AdoptedPodSeen) -> str:
    """Return the address for requests to its engine."""
    return text.format_host_port(pod.ip, pod.port) if pod.ip else ""


def derive_replica_id(pod: AdoptedPodSeen, finds: int) -> ReplicaId:
    """Return the id of a replica without an order; `finds`: the number of earlier ones of this pod. The uid separates
    pods of the same name, which a StatefulSet creates repeatedly.
    """
    return ReplicaId(f"{pod.name}-{pod.uid[:5]}" + (f"-{finds + 1}" if finds else ""))


def is_own_mark(pod: AdoptedPodSeen, model: ModelName) -> bool:
    """Whether the replica that the pod's mark names may belong to the pod: a leader ordered it for the pod's model, or
    it is named after the pod. The pod's owner can write any mark, so the id of another model's replica is no proof.
    """
    if _INTENT.fullmatch(pod.intent) and pod.replica == format_replica_id(model, ADOPTED_HASH, pod.intent):
        return True
    return re.fullmatch(re.escape(derive_replica_id(pod, 0)) + "(-[0-9]{1,9})?", pod.replica) is not None


def build_observation(
    pod: TrackedPod, model: ModelName, zero_unix_s: float, seen: Seen, rank: int, *, reason: str = "", waits: str = "",
    proof: str = "",
) -> ReplicaSeen:  # fmt: skip
    """Build an observation of the pod's replica. `zero_unix_s`: Unix time at 0 of the observations' clock. `rank`: the
    replica with the highest rank is deleted first.
    """
    of, started_s = pod.seen, pod.begun.started_s
    if started_s is None and of.started_unix_s is not None:
        started_s = of.started_unix_s - zero_unix_s
    return ReplicaSeen(
        id=pod.replica or ReplicaId(""), model=model, spec_hash=ADOPTED_HASH, intent=pod.intent, slices=(),
        memory_bytes=0, slots=pod.slots, seen=seen, address=format_pod_address(of), rank=rank,
        started_s=started_s, placing=pod.begun.placing,
        reason=reason, waits=waits, proof=proof,
    )  # fmt: skip

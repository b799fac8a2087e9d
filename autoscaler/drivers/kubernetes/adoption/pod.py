"""One pod of an adopted workload: which Replica it is, what stands on it, and what is said of it. Pure.

Owns the form of what is observed of such a Replica, with or without a pod, and the name of one that nobody ordered.
What follows from it for the workload is `workload`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.kubernetes.adoption.objects import AdoptedPodSeen
from autoscaler.drivers.kubernetes.objects.start_timing import StartTiming
from autoscaler.spec.model import ADOPTED_HASH
from autoscaler.state.events import ReplicaSeen, Seen

EXITED = "exited"
"""The proof of clean: its kubelet says that nothing runs any more. It holds no Slice of ours."""
RELEASED = "released"
"""The same of one that is no longer ours, whatever runs."""


class PodMark(NamedTuple):
    """What shall stand on a pod: which Replica it is, and whether it goes first."""

    pod: str
    uid: str
    replica: ReplicaId
    intent: str
    goes_first: bool


@dataclass(slots=True)
class TrackedPod:
    """One that is there."""

    seen: AdoptedPodSeen
    since_s: float
    answers: bool = False
    replica: ReplicaId | None = None
    intent: str = ""
    slots: int = 1
    told: tuple[Seen, str, str, int] | None = None
    """What was last said of it: the state, what it waits for, its address, its rank."""
    going: bool = False
    """Its stop was ordered."""
    spent: set[str] = field(default_factory=set)
    """Replicas that it was: a mark that names one of them says nothing any more."""
    finds: int = 0
    """How often it became a Replica of its own name."""
    marked: PodMark | None = None
    """What was last written on it."""
    begun: StartTiming = field(default_factory=StartTiming)
    """As the Replica that it is."""

    stuck_s: float | None = None
    """Since when it waits for what may last only `stuck_for_s`; None: it does not."""
    stuck_for_s: float | None = None
    failed_s: float | None = None
    """Since when it has waited for that too long; None: it has not."""

    def wait(self, now_s: float) -> None:
        """It may have waited long enough."""
        if self.seen.patience_s is None or self.seen.leaving:
            self.stuck_s = self.failed_s = None
            return
        if self.stuck_s is None or self.stuck_for_s != self.seen.patience_s:
            self.stuck_s, self.stuck_for_s = now_s, self.seen.patience_s
        if self.failed_s is None and now_s >= self.stuck_s + self.seen.patience_s:
            self.failed_s = now_s

    @property
    def hopeless_s(self) -> float | None:
        """When it will have waited too long; None: that is not to be expected, or so already."""
        waits = self.stuck_s is not None and self.seen.patience_s is not None and self.failed_s is None
        return (self.stuck_s or 0.0) + (self.seen.patience_s or 0.0) if waits else None

    @property
    def ended(self) -> str:
        """How its container ended, or why it cannot start; empty: neither."""
        return self.seen.ended or ("" if self.failed_s is None else self.seen.waits)

    @property
    def stays(self) -> bool:
        """The workload's controller counts it."""
        return not self.seen.leaving and not self.seen.over


def find_missing_mark(pod: TrackedPod, *, ours: bool) -> PodMark | None:
    """What it lacks; a Replica of the pod's own name is known by that. `ours`: we choose who goes first."""
    goes_first = pod.going and ours
    mark = PodMark(pod.seen.name, pod.seen.uid, pod.replica or ReplicaId(""), pod.intent, goes_first)
    stands = (pod.seen.replica, pod.seen.goes_first) == (mark.replica, goes_first)
    needless = not pod.seen.replica and not goes_first and mark.replica == derive_replica_id(pod.seen, 0)
    return None if stands or needless or pod.marked == mark else mark


def derive_replica_state(pod: TrackedPod) -> Seen:
    """How its Replica is."""
    seen = pod.seen
    if pod.ended:
        return Seen.EXITED
    if seen.leaving:
        return Seen.LEAVING
    if pod.answers:
        return Seen.READY
    was_ready = pod.told is not None and pod.told[0] in {Seen.READY, Seen.UNREADY}
    return Seen.UNREADY if was_ready else Seen.STARTING


def format_pod_address(pod: AdoptedPodSeen) -> str:
    """Where its engine takes Calls."""
    return probes.format_host_port(pod.ip, pod.port) if pod.ip else ""


def derive_replica_id(pod: AdoptedPodSeen, finds: int) -> ReplicaId:
    """Of the Replica that it becomes when nobody ordered one, for the n-th time. The uid tells namesakes apart, which a
    StatefulSet makes again and again.
    """
    return ReplicaId(f"{pod.name}-{pod.uid[:5]}" + (f"-{finds + 1}" if finds else ""))


def build_observation(
    pod: TrackedPod, model: ModelName, zero_unix_s: float, seen: Seen, rank: int, *, reason: str = "", waits: str = "",
    proof: str = "",
) -> ReplicaSeen:  # fmt: skip
    """What is observed of its Replica. `zero_unix_s`: what a calendar said when the clock of observations was 0.
    `rank`: the highest goes first.
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

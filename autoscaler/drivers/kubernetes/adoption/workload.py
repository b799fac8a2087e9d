"""One adopted workload: which of its pods is which Replica, what its scale shall be, and what is seen of it. Pure.

A Deployment's pods have no names that we choose, so the driver's orders are a level: as many Replicas as are wanted,
and pods that come are given to those that wait. Promises: no pod is two Replicas; pods that nobody ordered (a person's,
a rollout's) become Replicas only up to the scale, so that what surges is not taken for too many, but for those of the
newest template that answer: they are there before the older ones end, and those go first; what is stopped goes first
(its deletion costs less); and what really ended is told, whichever that was: who was to go and stays, because another
went, is told as gone and found anew. Nothing is written where the scale is not ours. Times are `now_s`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.adoption.objects import AdoptedPodSeen, WorkloadSeen
from autoscaler.drivers.kubernetes.adoption.pod import (
    EXITED,
    RELEASED,
    PodMark,
    TrackedPod,
    build_observation,
    derive_replica_id,
    derive_replica_state,
    find_missing_mark,
    format_pod_address,
)
from autoscaler.drivers.kubernetes.objects.replica_events import build_podless_observation, with_finalizers
from autoscaler.drivers.kubernetes.objects.start_timing import StartTiming
from autoscaler.drivers.kubernetes.pending_starts import REFUSED_S
from autoscaler.spec.model import Model
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.world import Placing, Replica

UNORDERED_S = 1.0
"""A pod without a mark may be one that the leader just ordered: it becomes a Replica of its own name only then."""


class Mode(Enum):
    """Whose the scale is."""

    LEVEL = "ours"
    TOGGLE = "another autoscaler's, but for zero"
    HELD = "a person's, for a while"
    RELEASED = "its owner's again"


class FailedStart(NamedTuple):
    """A start that could not have succeeded: no image, a missing Secret, a failed mount."""

    reason: str
    at_s: float
    template: str


class Workload:
    """One Deployment or StatefulSet. After each call `take` has what is to be observed."""

    def __init__(self, seen: WorkloadSeen, model: Model, mode: Mode, zero_unix_s: float = 0.0) -> None:
        self._zero_unix_s = zero_unix_s
        """What a calendar said when `now_s` was 0."""
        self.seen = seen
        self.model = model
        self.mode = mode
        self._pods: dict[str, TrackedPod] = {}
        self._orders: dict[ReplicaId, Replica] = {}
        """Replicas that wait for a pod, oldest first."""
        self._told: list[ReplicaSeen] = []
        self._leads = False
        """Orders are given to us: only then anything is written."""
        self._begun = False
        self._due = False
        """The scale may have to be written."""
        self._version = 0
        """Of the workload as we last wrote it: what is older says nothing about what came of it."""
        self._failed: FailedStart | None = None

    def obstacle(self, now_s: float) -> str:
        """Why the last start failed, which the next one of the same template would, too; empty: nothing is known."""
        failed = self._failed
        if failed is None or failed.template != self.seen.template or now_s >= failed.at_s + REFUSED_S:
            return ""
        return failed.reason

    def take(self) -> tuple[ReplicaSeen, ...]:
        """What there is to observe since the last time."""
        told, self._told = tuple(self._told), []
        return told

    def knows(self, replica: ReplicaId) -> bool:
        """Whether it is one of this workload's."""
        return replica in self._orders or self._pod_of(replica) is not None

    @property
    def empty(self) -> bool:
        """Nothing of it is known to anybody."""
        return not self._orders and not any(pod.replica for pod in self._pods.values())

    def end_all(self, reason: str) -> None:
        """Every Replica is over, whatever runs."""
        for pod in self._pods.values():
            self._end(pod, reason, RELEASED)

    # --- leadership ---------------------------------------------------------------------------------------------------

    def lead(self, now_s: float) -> None:
        """Nothing is ordered yet; all there is is told again."""
        self._forget_orders()
        self._leads = True
        for pod in self._pods.values():
            pod.told = pod.marked = None
            pod.since_s = min(pod.since_s, now_s - UNORDERED_S)
        self._look(now_s)

    def follow(self) -> None:
        """Somebody else orders from now on."""
        self._forget_orders()
        self._leads = False

    def _forget_orders(self) -> None:
        self._orders.clear()
        self._due = False
        for pod in self._pods.values():
            pod.going = False

    # --- what is seen -------------------------------------------------------------------------------------------------

    def see(self, seen: WorkloadSeen, model: Model, mode: Mode, now_s: float) -> None:
        """It, what is made of it, or whose its scale is, has changed."""
        renamed = model.name != self.model.name
        self.seen, self.mode = seen, mode
        if renamed:
            self.end_all("its workload serves another Model now")
        self.model = model
        self._look(now_s)

    def see_pod(self, uid: str, new: AdoptedPodSeen | None, now_s: float) -> None:
        """A pod came, changed or went (None)."""
        known = self._pods.get(uid)
        if new is None:
            if known is not None:
                self._end(known, known.seen.ended or "stopped", EXITED)
                del self._pods[uid]
        elif known is None:
            known = self._pods[uid] = TrackedPod(new, now_s)
        else:
            if new.replica not in ("", known.seen.replica, known.replica, *known.spent):
                self._end(known, "another leader gave its pod to another Replica", RELEASED)
            if (new.replica, new.goes_first) != (known.seen.replica, known.seen.goes_first):
                known.marked = None  # what we wrote has come, or another wrote later: what stands there now counts
            known.seen = new
            known.answers = known.answers and bool(new.ip) and not new.ended
        if new is not None and known is not None:
            known.begun.see(now_s, bound=new.bound, prepared=new.prepared, runs=new.started_unix_s is not None)
        self._look(now_s)

    def answered(self, uid: str, answers: bool, now_s: float) -> None:
        """Whether a pod's engine takes Calls."""
        pod = self._pods.get(uid)
        if pod is not None and pod.answers is not answers:
            pod.answers = answers
            self._look(now_s)

    def begin(self, now_s: float) -> None:
        """All pods that were there have been seen: from now on they are Replicas."""
        self._begun = True
        for pod in self._pods.values():
            pod.since_s = now_s - UNORDERED_S
        self._look(now_s)

    def look(self, now_s: float) -> None:
        """Time has passed."""
        self._look(now_s)

    def due_s(self) -> float | None:
        """When time alone makes a Replica of a pod, or ends one; None: only observations can."""
        begins = [pod.since_s + UNORDERED_S for pod in self._free() if self._fits(pod)]
        ends = [at_s for pod in self._pods.values() if pod.replica and (at_s := pod.hopeless_s) is not None]
        return min((*begins, *ends), default=None)

    # --- orders -------------------------------------------------------------------------------------------------------

    def start(self, replica: Replica, now_s: float) -> None:
        """One more is wanted; of one that is there its state is told again."""
        self._leads = True
        pod = self._pod_of(replica.id)
        if pod is not None:
            pod.told = None
        elif replica.id not in self._orders:
            self._orders[replica.id] = replica
            self._due = True
        self._look(now_s)

    def stop(self, replica: Replica, now_s: float) -> None:
        """One less. Of one that is not there nothing is left."""
        self._leads = True
        pod = self._pod_of(replica.id)
        if pod is None:
            self._due = self._orders.pop(replica.id, None) is not None or self._due
            self._told.append(build_podless_observation(replica, Seen.CLEAN, proof=EXITED))
        elif self.mode is Mode.RELEASED:
            self._end(pod, "its workload is no longer ours", RELEASED)
        elif not pod.going:
            pod.going = self._due = True
        self._look(now_s)

    # --- what is to be written ----------------------------------------------------------------------------------------

    def level(self) -> int | None:
        """The scale that is to be written now; None: none is."""
        alive = self._alive()
        surging = min(max(len(alive) - self.seen.replicas, 0), len(self._replaced(alive)))
        count = len(alive) - surging + len(self._orders)
        if not self._leads or not self._due or (count == self.seen.replicas and self._settled()):
            return None
        if self.mode is Mode.LEVEL:
            return count
        if self.mode is Mode.TOGGLE and (not count or not self.seen.replicas):
            return min(count, 1)
        return None

    @property
    def version(self) -> int:
        """Of the workload that `level` is right for: who writes later than others does not undo what they wrote."""
        return max(self.seen.version, self._version)

    def wrote(self, level: int, version: int, now_s: float) -> None:
        """The scale is `level` as of `version`."""
        self._version = max(self._version, version)
        self._due = level != self.level()
        for id, replica in self._orders.items():
            if replica.placing.asked_s is None:
                self._orders[id] = replace(replica, placing=Placing(asked_s=now_s))
        if not self._due:
            self._look(now_s)

    def nothing_to_write(self, now_s: float) -> None:
        """The scale is right, or not ours."""
        self._due = False
        self._look(now_s)

    def refused(self, reason: str, now_s: float) -> None:
        """The scale cannot be written: who waits for a pod has failed, who was to go stays."""
        for replica in self._orders.values():
            self._told += (
                build_podless_observation(replica, Seen.EXITED, reason=reason),
                build_podless_observation(replica, Seen.CLEAN, proof=EXITED),
            )
        self._orders.clear()
        self._due = False
        self._look(now_s)

    def marks(self, *, going: bool) -> list[PodMark]:
        """What is to be written on pods: before the scale on those that go, after it on the others."""
        replicas = [pod for pod in self._pods.values() if pod.replica and pod.stays and pod.going is going]
        wanted = [find_missing_mark(pod, ours=self.mode is Mode.LEVEL) for pod in replicas if self._leads]
        return [mark for mark in wanted if mark is not None]

    def marked(self, mark: PodMark) -> None:
        """It is being written."""
        pod = self._pods.get(mark.uid)
        if pod is not None:
            pod.marked = mark

    def unmarked(self, mark: PodMark) -> None:
        """Nobody knows whether it was."""
        pod = self._pods.get(mark.uid)
        if pod is not None:
            pod.marked = None

    # --- which pod is which Replica -----------------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        """Everything that follows from what is known."""
        if not self._begun:
            return
        for pod in self._pods.values():
            pod.wait(now_s)
            self._tell(pod)
        self._rescue()
        self._bind(now_s)
        for replica in self._orders.values():
            if self.seen.trouble != replica.waits:
                self._orders[replica.id] = replace(replica, waits=self.seen.trouble)
                self._told.append(build_podless_observation(replica, Seen.STARTING, waits=self.seen.trouble))

    def _bind(self, now_s: float) -> None:
        """Pods to Replicas: by their marks, then to those that wait, then by their own names while there is room."""
        for pod in self._free():
            mark = pod.seen.replica
            if mark and mark not in pod.spent and self._pod_of(ReplicaId(mark)) is None:
                order = self._orders.pop(ReplicaId(mark), None)
                slots = self.model.slots if order is None else order.slots
                self._take(pod, ReplicaId(mark), pod.seen.intent, slots, order)
        for pod, id in zip(self._free(), tuple(self._orders), strict=False):
            order = self._orders.pop(id)
            self._take(pod, id, order.intent, order.slots, order)
        for pod in self._free():
            if self._fits(pod) and now_s >= pod.since_s + UNORDERED_S:
                self._take(pod, derive_replica_id(pod.seen, pod.finds), pod.seen.uid[:8], self.model.slots)
                pod.finds += 1

    def _take(self, pod: TrackedPod, replica: ReplicaId, intent: str, slots: int, order: Replica | None = None) -> None:
        """`order`: what it came of, where it was ordered."""
        pod.replica, pod.intent, pod.slots, pod.told, pod.going = replica, intent, slots, None, False
        if order is not None:
            pod.begun.ask(order.placing.asked_s)
        self._tell(pod)

    def _free(self) -> list[TrackedPod]:
        """Pods that are no Replica and could be: those that answer first, then the oldest."""
        if self.mode is Mode.RELEASED:
            return []
        free = [pod for pod in self._pods.values() if pod.replica is None and pod.stays and not pod.ended]
        return sorted(free, key=lambda pod: (not pod.answers, pod.seen.rank, pod.seen.created, pod.seen.name))

    def _alive(self) -> list[TrackedPod]:
        """Replicas that are to stay."""
        return [pod for pod in self._pods.values() if pod.replica and pod.stays and not pod.going]

    def _fits(self, pod: TrackedPod) -> bool:
        """Whether it may be one that nobody ordered: up to the scale, or in the place of one that a rollout ends."""
        if not self._settled() or (self._due and self.mode is Mode.LEVEL):
            return False
        alive = self._alive()
        surge = len(self._replaced(alive)) if pod.answers and not self._replaced([pod]) else 0
        return len(alive) < self.seen.replicas + surge

    def _replaced(self, pods: list[TrackedPod]) -> list[TrackedPod]:
        """Those of them that a rollout will end: one of a newer template is there and answers."""
        answering = [pod for pod in self._pods.values() if pod.stays and pod.answers]
        newest = max(answering, key=lambda pod: (pod.seen.created, pod.since_s), default=None)
        return [] if newest is None else [pod for pod in pods if pod.seen.template != newest.seen.template]

    def _rank(self, pod: TrackedPod) -> int:
        """Who goes first: the highest of a StatefulSet, what a rollout will end of a Deployment."""
        return pod.seen.rank or len(self._replaced([pod]))

    def _settled(self) -> bool:
        """What is known of the workload is not older than our last write."""
        return self.seen.version >= self._version

    def _pod_of(self, replica: ReplicaId) -> TrackedPod | None:
        return next((pod for pod in self._pods.values() if pod.replica == replica), None)

    # --- what is told -------------------------------------------------------------------------------------------------

    def _tell(self, pod: TrackedPod) -> None:
        """What is new of a Replica."""
        if pod.replica is None:
            return
        seen, before = derive_replica_state(pod), None if pod.told is None else pod.told[0]
        if seen is Seen.EXITED or before is Seen.EXITED:  # its pod goes; what its kubelet starts there is not it
            if before is not Seen.EXITED:
                self._say(pod, seen, reason=pod.ended)
                if pod.failed_s is not None and not pod.seen.ended:
                    self._failed = FailedStart(pod.ended, pod.failed_s, self.seen.template)
            self._crashed(pod)
        elif seen is Seen.LEAVING:
            if before is not Seen.LEAVING and not pod.going:
                self._say(pod, seen, reason="its pod is being deleted")
        elif pod.told != (seen, pod.seen.waits, format_pod_address(pod.seen), self._rank(pod)):
            self._say(pod, seen, waits=pod.seen.waits)

    def _crashed(self, pod: TrackedPod) -> None:
        """Its engine has ended. Its pod goes, too, where only it would; else what its kubelet starts is found anew."""
        if pod.seen.leaving and pod.seen.over:
            self._end(pod, pod.ended, with_finalizers(EXITED, pod.seen.finalizers))
        if pod.seen.leaving or pod.going or not self._leads:
            return
        ranks = [other.seen.rank for other in self._pods.values() if other.stays]
        lowers = self.mode is Mode.LEVEL or (self.mode is Mode.TOGGLE and self._alive() == [pod])
        if pod.seen.over or not lowers or pod.seen.rank < max(ranks):
            self._end(pod, pod.ended, EXITED)
        else:
            pod.going = self._due = True

    def _rescue(self) -> None:
        """Who was to go and stays, because another went or nothing was written, is a Replica anew."""
        staying = [pod for pod in self._pods.values() if pod.stays]
        if self._due or not self._settled() or len(staying) > self.seen.replicas:
            return
        for pod in staying:
            if pod.going:
                self._end(pod, "its pod stays", RELEASED)

    def _end(self, pod: TrackedPod, reason: str, proof: str) -> None:
        """Its Replica is over; the pod may become another."""
        if pod.replica is None:
            return
        before = None if pod.told is None else pod.told[0]
        if before is not Seen.EXITED:
            if before is not Seen.LEAVING and not pod.going:
                self._say(pod, Seen.LEAVING, reason=reason)  # which is no failure of its engine
            self._say(pod, Seen.EXITED, reason=reason)
        self._say(pod, Seen.CLEAN, proof=proof)
        pod.spent |= {pod.seen.replica, pod.replica}
        pod.replica, pod.told, pod.going, pod.begun = None, None, False, StartTiming()

    def _say(self, pod: TrackedPod, seen: Seen, *, reason: str = "", waits: str = "", proof: str = "") -> None:
        of, rank = self.model.name, self._rank(pod)
        said = build_observation(pod, of, self._zero_unix_s, seen, rank, reason=reason, waits=waits, proof=proof)
        pod.told = (seen, waits, said.address, rank)
        self._told.append(said)

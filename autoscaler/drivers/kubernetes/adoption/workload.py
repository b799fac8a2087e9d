"""One adopted workload: maps its pods to replicas, computes its scale, and builds its observations. Pure.

We cannot choose the names of a Deployment's pods. Orders therefore set a level, the number of desired replicas, and
each new pod is bound to a waiting replica. Times are `now_s`. Nothing is written while others control the scale.
Invariants:

- A pod is at most one replica at a time.
- Pods without an order (created by a person or a rollout) become replicas only up to the scale, so that surge pods do
  not count. Exception: ready pods of the newest template, which exist before the older ones end.
- Pods of stopped replicas are deleted first (lower deletion cost), as are pods of older templates.
- The pod that actually ended is reported. If a replica was to stop but another pod ended instead, the replica is
  reported as gone, and its pod becomes a new replica.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.adoption.objects import AdoptedPodSeen, WorkloadSeen
from autoscaler.drivers.kubernetes.adoption.tracked_pod import (
    EXITED,
    RELEASED,
    PodMark,
    TrackedPod,
    build_observation,
    derive_replica_id,
    derive_replica_state,
    find_missing_mark,
    format_pod_address,
    is_own_mark,
)
from autoscaler.drivers.kubernetes.blocked_starts import REFUSED_S, is_temporary
from autoscaler.drivers.kubernetes.objects.pod_state import IMAGE_S_MAX, StartTiming
from autoscaler.drivers.kubernetes.objects.replica_observations import build_podless_observation, with_finalizers
from autoscaler.spec.model import Model
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.world import Placing, Replica

UNORDERED_S = 1.0
"""Delay before a pod without a mark becomes a replica named after the pod: the leader may be about to mark it."""


class Mode(Enum):
    """The controller of the scale."""

    LEVEL = "Pilotlight"
    TOGGLE = "another autoscaler, except that Pilotlight scales to and from zero"
    HELD = "a person, for a limited time"
    RELEASED = "its owner"


class FailedStart(NamedTuple):
    """A failed start that would fail again: no image, a missing Secret, a failed mount, a rejected pod or scale."""

    reason: str
    at_s: float
    template: str


class Workload:
    """One Deployment or StatefulSet. After each call `take` returns the new observations."""

    def __init__(self, seen: WorkloadSeen, model: Model, mode: Mode, zero_unix_s: float = 0.0) -> None:
        self._zero_unix_s = zero_unix_s
        """Unix time when `now_s` was 0."""
        self.seen = seen
        self.model = model
        self.mode = mode
        self._pods: dict[str, TrackedPod] = {}
        self._orders: dict[ReplicaId, Replica] = {}
        """Replicas that wait for a pod, oldest first."""
        self._observations: list[ReplicaSeen] = []
        self._leads = False
        """This process leads: it receives orders and writes."""
        self._begun = False
        self._due = False
        """The scale may have to be written."""
        self._version = 0
        """The workload's version after our last write: older observations do not reflect it."""
        self._failed: FailedStart | None = None
        self._blocked_s: float | None = None
        """Since when the pods of waiting replicas are rejected; None: they are not, or the condition is temporary."""

    def obstacle(self, now_s: float) -> str:
        """Return why the last start failed if the next one of this template would fail, too; else an empty text."""
        failed = self._failed
        if failed is None or failed.template != self.seen.template or now_s >= failed.at_s + REFUSED_S:
            return ""
        return failed.reason

    def take(self) -> tuple[ReplicaSeen, ...]:
        """Return the observations since the last call."""
        observations, self._observations = tuple(self._observations), []
        return observations

    def knows(self, replica: ReplicaId) -> bool:
        """Return whether the replica belongs to this workload."""
        return replica in self._orders or self._pod_of(replica) is not None

    @property
    def empty(self) -> bool:
        """Whether it has neither orders nor replicas."""
        return not self._orders and not any(pod.replica for pod in self._pods.values())

    def end_all(self, reason: str) -> None:
        """End every replica, whether or not its pod runs."""
        for pod in self._pods.values():
            self._end(pod, reason, RELEASED)

    # --- leadership ---------------------------------------------------------------------------------------------------

    def lead(self, now_s: float) -> None:
        """Become the leader: forget all orders and report everything again."""
        self._forget_orders()
        self._leads = True
        for pod in self._pods.values():
            pod.reported = pod.marked = None
            pod.since_s = min(pod.since_s, now_s - UNORDERED_S)
        self._update(now_s)

    def follow(self) -> None:
        """Stop leading: another process gives the orders."""
        self._forget_orders()
        self._leads = False

    def _forget_orders(self) -> None:
        self._orders.clear()
        self._due = False
        for pod in self._pods.values():
            pod.going = False

    # --- observations -------------------------------------------------------------------------------------------------

    def see(self, seen: WorkloadSeen, model: Model, mode: Mode, now_s: float) -> None:
        """Record that the workload, its model or its mode has changed."""
        renamed = model.name != self.model.name
        self.seen, self.mode = seen, mode
        if renamed:
            self.end_all("its workload now serves another Model")
        self.model = model
        self._update(now_s)

    def see_pod(self, uid: str, new: AdoptedPodSeen | None, now_s: float) -> None:
        """Record that a pod was added, changed or removed (None)."""
        known = self._pods.get(uid)
        if new is None:
            if known is not None:
                self._end(known, known.seen.ended or "stopped", EXITED)
                del self._pods[uid]
        elif known is None:
            known = self._pods[uid] = TrackedPod(new, now_s)
        else:
            if new.replica not in ("", known.seen.replica, known.replica, *known.spent) and self._accepts(new):
                self._end(known, "another leader assigned its pod to another replica", RELEASED)
            if (new.replica, new.goes_first) != (known.seen.replica, known.seen.goes_first):
                known.marked = None  # our write or a later one by others arrived: its annotations apply
            known.seen = new
            known.answers = known.answers and bool(new.ip) and not new.ended
        if new is not None and known is not None:
            known.begun.see(now_s, bound=new.bound, prepared=new.prepared, runs=new.started_unix_s is not None)
        self._update(now_s)

    def answered(self, uid: str, answers: bool, now_s: float) -> None:
        """Record whether a pod's engine accepts requests."""
        pod = self._pods.get(uid)
        if pod is not None and pod.answers is not answers:
            pod.answers = answers
            self._update(now_s)

    def begin(self, now_s: float) -> None:
        """Start mapping pods to replicas; all existing pods have been observed."""
        self._begun = True
        for pod in self._pods.values():
            pod.since_s = now_s - UNORDERED_S
        self._update(now_s)

    def look(self, now_s: float) -> None:
        """Re-evaluate after time has passed."""
        self._update(now_s)

    def due_s(self) -> float | None:
        """Return the next time at which `look` may change something; None: only observations can."""
        begins = [pod.since_s + UNORDERED_S for pod in self._free() if self._fits(pod)]
        ends = [at_s for pod in self._pods.values() if pod.replica and (at_s := pod.wait_deadline_s) is not None]
        blocked = [] if self._blocked_s is None else [self._blocked_s + IMAGE_S_MAX]
        return min((*begins, *ends, *blocked), default=None)

    # --- orders -------------------------------------------------------------------------------------------------------

    def start(self, replica: Replica, now_s: float) -> None:
        """Request one more replica; one that exists is reported again."""
        self._leads = True
        pod = self._pod_of(replica.id)
        if pod is not None:
            pod.reported = None
        elif replica.id not in self._orders:
            self._orders[replica.id] = replica
            self._due = True
        self._update(now_s)

    def stop(self, replica: Replica, now_s: float) -> None:
        """Request one replica less. One that does not exist is clean."""
        self._leads = True
        pod = self._pod_of(replica.id)
        if pod is None:
            self._due = self._orders.pop(replica.id, None) is not None or self._due
            self._observations.append(build_podless_observation(replica, Seen.CLEAN, proof=EXITED))
        elif self.mode is Mode.RELEASED:
            self._end(pod, "Pilotlight no longer scales its workload", RELEASED)
        elif not pod.going:
            pod.going = self._due = True
        self._update(now_s)

    # --- writes -------------------------------------------------------------------------------------------------------

    def level(self) -> int | None:
        """Return the scale to write now; None: no write."""
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
        """The workload's version to which `level` applies: a late write must not undo another client's write."""
        return max(self.seen.version, self._version)

    def wrote(self, level: int, version: int, now_s: float) -> None:
        """Record that the scale is `level` as of `version`."""
        self._version = max(self._version, version)
        self._due = level != self.level()
        for id, replica in self._orders.items():
            if replica.times.placing.asked_s is None:
                self._orders[id] = replace(replica, times=replace(replica.times, placing=Placing(asked_s=now_s)))
        if not self._due:
            self._update(now_s)

    def nothing_to_write(self, now_s: float) -> None:
        """Record that the scale is up to date, or that others control it."""
        self._due = False
        self._update(now_s)

    def see_scale(self, uid: str, replicas: int, version: int) -> None:
        """Record a fresh read of the scale: if it is the known one, a write may rely on this version."""
        if (uid, replicas) == (self.seen.uid, self.seen.replicas):
            self.seen = self.seen._replace(version=max(self.seen.version, version))

    def refused(self, reason: str, now_s: float, *, lasts: bool = False) -> None:
        """Record that the scale cannot be written: waiting replicas fail, and stopping replicas continue to run.
        `lasts`: the next start would fail, too.
        """
        if lasts:
            self._failed = FailedStart(reason, now_s, self.seen.template)
        self._fail_orders(reason)
        self._due = False
        self._update(now_s)

    def _fail_orders(self, reason: str) -> None:
        """Report the waiting replicas as failed."""
        for replica in self._orders.values():
            self._observations += (
                build_podless_observation(replica, Seen.EXITED, reason=reason),
                build_podless_observation(replica, Seen.CLEAN, proof=EXITED),
            )
        self._orders.clear()

    def marks(self, *, going: bool) -> list[PodMark]:
        """Return the marks to write: on stopping pods before the scale, on the others after it."""
        replicas = [pod for pod in self._pods.values() if pod.replica and pod.stays and pod.going is going]
        wanted = [find_missing_mark(pod, ours=self.mode is Mode.LEVEL) for pod in replicas if self._leads]
        return [mark for mark in wanted if mark is not None]

    def marked(self, mark: PodMark) -> None:
        """Record that these annotations of the pod are being written."""
        pod = self._pods.get(mark.uid)
        if pod is not None:
            pod.marked = mark

    def unmarked(self, mark: PodMark) -> None:
        """Record that the result of writing the mark is unknown."""
        pod = self._pods.get(mark.uid)
        if pod is not None:
            pod.marked = None

    # --- mapping of pods to replicas ----------------------------------------------------------------------------------

    def _update(self, now_s: float) -> None:
        """Derive bindings and observations from the known facts."""
        if not self._begun:
            return
        for pod in self._pods.values():
            pod.wait(now_s)
            self._report(pod)
        self._rescue()
        self._bind(now_s)
        for replica in self._orders.values():
            if self.seen.trouble != replica.runtime.waits:
                self._orders[replica.id] = replace(replica, runtime=replace(replica.runtime, waits=self.seen.trouble))
                self._observations.append(build_podless_observation(replica, Seen.STARTING, waits=self.seen.trouble))
        self._limit_blocked_starts(now_s)

    def _limit_blocked_starts(self, now_s: float) -> None:
        """Fail the waiting replicas and lower the scale if their pods are rejected for IMAGE_S_MAX. An exhausted quota
        has no limit, as for our own pods. The messages of two attempts may differ, since each names its pod.
        """
        if not self._orders or not self.seen.trouble or is_temporary(self.seen.trouble):
            self._blocked_s = None
        elif self._blocked_s is None:
            self._blocked_s = now_s
        elif now_s >= self._blocked_s + IMAGE_S_MAX:
            self._failed = FailedStart(self.seen.trouble, now_s, self.seen.template)
            self._fail_orders(self.seen.trouble)
            self._blocked_s, self._due = None, True

    def _bind(self, now_s: float) -> None:
        """Bind pods to replicas: by mark, then to waiting replicas, then by the pod's name up to the scale."""
        for pod in self._free():
            mark = pod.seen.replica
            if mark not in pod.spent and self._accepts(pod.seen) and self._pod_of(ReplicaId(mark)) is None:
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

    def _accepts(self, pod: AdoptedPodSeen) -> bool:
        """Return whether the pod's mark is accepted: it names an ordered replica, or `is_own_mark` holds."""
        return ReplicaId(pod.replica) in self._orders or is_own_mark(pod, self.model.name)

    def _take(self, pod: TrackedPod, replica: ReplicaId, intent: str, slots: int, order: Replica | None = None) -> None:
        """Bind a pod to a replica. `order`: the order it fulfils, if any."""
        pod.replica, pod.intent, pod.slots, pod.reported, pod.going = replica, intent, slots, None, False
        if order is not None:
            pod.begun.ask(order.times.placing.asked_s)
        self._report(pod)

    def _free(self) -> list[TrackedPod]:
        """Return the pods that may become replicas: ready ones first, then the oldest."""
        if self.mode is Mode.RELEASED:
            return []
        free = [pod for pod in self._pods.values() if pod.replica is None and pod.stays and not pod.ended]
        return sorted(free, key=lambda pod: (not pod.answers, pod.seen.rank, pod.seen.created, pod.seen.name))

    def _alive(self) -> list[TrackedPod]:
        """Return the pods of replicas that are not stopping."""
        return [pod for pod in self._pods.values() if pod.replica and pod.stays and not pod.going]

    def _fits(self, pod: TrackedPod) -> bool:
        """Return whether a pod may become a replica without an order: within the scale, or in a rollout."""
        if not self._settled() or (self._due and self.mode is Mode.LEVEL):
            return False
        alive = self._alive()
        surge = len(self._replaced(alive)) if pod.answers and not self._replaced([pod]) else 0
        return len(alive) < self.seen.replicas + surge

    def _replaced(self, pods: list[TrackedPod]) -> list[TrackedPod]:
        """Return the pods that a rollout will end: those of older templates, once a pod of a newer one is ready."""
        answering = [pod for pod in self._pods.values() if pod.stays and pod.answers]
        newest = max(answering, key=lambda pod: (pod.seen.created, pod.since_s), default=None)
        return [] if newest is None else [pod for pod in pods if pod.seen.template != newest.seen.template]

    def _rank(self, pod: TrackedPod) -> int:
        """Return the deletion rank: a StatefulSet deletes the highest ordinal first, a rollout the replaced pods."""
        return pod.seen.rank or len(self._replaced([pod]))

    def _settled(self) -> bool:
        """Return whether the workload's known state includes our last write."""
        return self.seen.version >= self._version

    def _pod_of(self, replica: ReplicaId) -> TrackedPod | None:
        return next((pod for pod in self._pods.values() if pod.replica == replica), None)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report(self, pod: TrackedPod) -> None:
        """Report changes of a replica."""
        if pod.replica is None:
            return
        seen, before = derive_replica_state(pod), None if pod.reported is None else pod.reported[0]
        if seen is Seen.EXITED or before is Seen.EXITED:  # a container that the kubelet restarts is another replica
            if before is not Seen.EXITED:
                self._add_observation(pod, seen, reason=pod.ended)
                if pod.failed_s is not None and not pod.seen.ended:
                    self._failed = FailedStart(pod.ended, pod.failed_s, self.seen.template)
            self._crashed(pod)
        elif seen is Seen.LEAVING:
            if before is not Seen.LEAVING and not pod.going:
                self._add_observation(pod, seen, reason="its pod is being deleted")
        elif pod.reported != (seen, pod.seen.waits, format_pod_address(pod.seen), self._rank(pod)):
            self._add_observation(pod, seen, waits=pod.seen.waits)

    def _crashed(self, pod: TrackedPod) -> None:
        """Handle an ended engine: remove its pod if a lower scale would delete exactly that one. Otherwise the
        restarted engine becomes a new replica.
        """
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
        """End stopping replicas whose pods remain, because another pod ended or the scale was not written. Their pods
        become new replicas.
        """
        staying = [pod for pod in self._pods.values() if pod.stays]
        if self._due or not self._settled() or len(staying) > self.seen.replicas:
            return
        for pod in staying:
            if pod.going:
                self._end(
                    pod, "its pod stays: another pod of the workload ended, or its scale was not lowered", RELEASED
                )

    def _end(self, pod: TrackedPod, reason: str, proof: str) -> None:
        """End the pod's replica; the pod may become another one."""
        if pod.replica is None:
            return
        before = None if pod.reported is None else pod.reported[0]
        if before is not Seen.EXITED:
            if before is not Seen.LEAVING and not pod.going:
                self._add_observation(
                    pod, Seen.LEAVING, reason=reason
                )  # so that it does not count as an engine failure
            self._add_observation(pod, Seen.EXITED, reason=reason)
        self._add_observation(pod, Seen.CLEAN, proof=proof)
        pod.spent |= {pod.seen.replica, pod.replica}
        pod.replica, pod.reported, pod.going, pod.begun = None, None, False, StartTiming()

    def _add_observation(
        self, pod: TrackedPod, seen: Seen, *, reason: str = "", waits: str = "", proof: str = ""
    ) -> None:
        of, rank = self.model.name, self._rank(pod)
        observation = build_observation(pod, of, self._zero_unix_s, seen, rank, reason=reason, waits=waits, proof=proof)
        pod.reported = (seen, waits, observation.address, rank)
        self._observations.append(observation)

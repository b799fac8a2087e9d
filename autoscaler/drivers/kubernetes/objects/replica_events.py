"""Builds observations of a replica from its pod or its order, and decides whether one differs from the last. Pure.

A kubelet records whole seconds by its node's clock, and a start is often shorter. The timestamps of a start are
therefore those of our observations, by our clock. A pod that already ran when first observed gets none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from autoscaler.drivers import probes
from autoscaler.drivers.kubernetes.objects.replica_pod import PodSeen
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.world import Placing, PodRef, Replica

READY_TO_START = "PodReadyToStartContainers"
"""Condition of a pod whose sandbox, network and volumes are ready (KEP-3085). Kubelets before 1.35 set it only after
the image was pulled, so the two phases cannot be distinguished."""


@dataclass(slots=True)
class StartTiming:
    """Timestamps of one pod, or of one container in it."""

    placing: Placing = field(default_factory=Placing)
    started_s: float | None = None
    """When its process was observed to begin; None: not yet, or before the first observation."""
    _was_observed: bool = False
    _seen_s: float = math.inf
    """When its object was first seen."""

    def ask(self, now_s: float | None) -> None:
        """Record when the API server confirmed the create (None: not yet). The watch may report the object earlier."""
        self._was_observed = True
        asked_s = min(math.inf if now_s is None else now_s, self._seen_s)
        if self.placing.asked_s is None and math.isfinite(asked_s):
            self.placing = replace(self.placing, asked_s=asked_s)

    def pull(self, now_s: float) -> None:
        """Record that the weights are on the node."""
        self._was_observed = True
        self.placing = replace(self.placing, pulled_s=now_s)

    def see(self, now_s: float, *, bound: bool, prepared: bool, runs: bool) -> None:
        """Record the state of the pod's object."""
        self._seen_s = min(self._seen_s, now_s)
        if runs:
            if self._was_observed and self.started_s is None:
                self.started_s = now_s
            return
        self._was_observed = True
        if bound and self.placing.bound_s is None:
            self.placing = replace(self.placing, bound_s=now_s)
        if prepared and self.placing.prepared_s is None:
            self.placing = replace(self.placing, prepared_s=now_s)


def is_news(previous: ReplicaSeen, seen: Seen, waits: str) -> bool:
    """Whether to report an observation. After EXITED only CLEAN follows; after LEAVING, only EXITED or CLEAN."""
    if previous.seen is Seen.EXITED:
        return seen is Seen.CLEAN
    if previous.seen is Seen.LEAVING:
        return seen in (Seen.EXITED, Seen.CLEAN)
    if previous.seen is Seen.TAKEN:
        return seen in (Seen.LEAVING, Seen.EXITED, Seen.CLEAN)
    if previous.seen in (Seen.READY, Seen.UNREADY) and seen is Seen.STARTING:
        return False
    return (previous.seen, previous.waits) != (seen, waits)


def is_about_pod(previous: ReplicaSeen, pod: PodSeen) -> bool:
    """Return whether `previous` is an observation of this pod (same uid)."""
    return previous.pod is not None and previous.pod.uid == pod.uid


def with_finalizers(proof: str, finalizers: Sequence[str]) -> str:
    """Return the proof that a replica is clean, with the finalizers that keep its pod's object."""
    return f"{proof}; its pod is kept by the finalizer {', '.join(finalizers)}" if finalizers else proof


def build_podless_observation(
    replica: Replica, seen: Seen, *, reason: str = "", waits: str = "", proof: str = ""
) -> ReplicaSeen:
    """Return an observation of a replica without a pod."""
    return ReplicaSeen(
        id=replica.id, model=replica.model, spec_hash=replica.spec_hash, intent=replica.intent,
        slices=replica.resources.slices, memory_bytes=replica.resources.memory_bytes,
        compute_percent=replica.resources.compute_percent, slots=replica.slots, seen=seen, reason=reason, waits=waits,
        proof=proof,
    )  # fmt: skip


def build_observation(
    pod: PodSeen,
    begun: StartTiming,
    from_unix_s: float,
    seen: Seen,
    previous: ReplicaSeen | None = None,
    *,
    reason: str = "",
    waits: str = "",
    proof: str = "",
) -> ReplicaSeen:
    """Return an observation of a replica with a pod, on our clock (`from_unix_s`), with the slices of `previous`."""
    started_s = begun.started_s
    if started_s is None and pod.started_unix_s is not None:
        started_s = pod.started_unix_s + from_unix_s
    return ReplicaSeen(
        id=pod.replica, model=pod.model, spec_hash=pod.spec_hash, intent=pod.intent, slices=pod.slices,
        memory_bytes=pod.memory_bytes, compute_percent=pod.compute_percent, slots=pod.slots, seen=seen,
        address=probes.format_engine_address(pod.ip, pod.port, pod.tls_name) if pod.ip else "", started_s=started_s,
        placing=begun.placing, pod=PodRef(namespace=pod.namespace, name=pod.name, uid=pod.uid), reason=reason,
        waits=waits, host_request=pod.cpu_memory, weights=pod.weights, proof=proof,
        actual=previous.actual if previous is not None and is_about_pod(previous, pod) else (),
    )  # fmt: skip

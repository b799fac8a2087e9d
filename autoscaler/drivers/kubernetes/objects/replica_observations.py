"""Builds observations of a replica from its pod or its order, and decides whether one differs from the last. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from autoscaler import text
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen, StartTiming
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.world import PodRef, Replica


def is_news(previous: ReplicaSeen, seen: Seen, waits: str) -> bool:
    """Return whether an observation is to be reported after `previous`.
    After EXITED only CLEAN is reported; after LEAVING, only EXITED or CLEAN.
    """
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
    """Return an observation of a replica with a pod. `previous`: the last observation, whose actual slices are kept.
    `from_unix_s`: offset in seconds from Unix time to the clock of observations.
    """
    started_s = begun.started_s
    if started_s is None and pod.started_unix_s is not None:
        started_s = pod.started_unix_s + from_unix_s
    return ReplicaSeen(
        id=pod.replica, model=pod.model, spec_hash=pod.spec_hash, intent=pod.intent, slices=pod.slices,
        memory_bytes=pod.memory_bytes, compute_percent=pod.compute_percent, slots=pod.slots, seen=seen,
        address=text.format_engine_address(pod.ip, pod.port, pod.tls_name) if pod.ip else "", started_s=started_s,
        placing=begun.placing, pod=PodRef(namespace=pod.namespace, name=pod.name, uid=pod.uid), reason=reason,
        waits=waits, host_request=pod.cpu_memory, weights=pod.weights, proof=proof,
        actual=previous.actual if previous is not None and is_about_pod(previous, pod) else (),
    )  # fmt: skip

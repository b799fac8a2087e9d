"""What the driver says of a Replica: made of its pod, or of what was ordered; and whether it is news. Pure."""

from __future__ import annotations

from autoscaler.drivers import address
from autoscaler.drivers.kubernetes.beginning import Beginning
from autoscaler.drivers.kubernetes.pods import PodSeen
from autoscaler.world import PodRef, Replica, ReplicaSeen, Seen


def is_news(told: ReplicaSeen, seen: Seen, waits: str) -> bool:
    """Whether that is to be said after `told`. An end is the end: nothing but CLEAN comes after it."""
    if told.seen is Seen.EXITED:
        return seen is Seen.CLEAN
    if told.seen in (Seen.READY, Seen.UNREADY) and seen is Seen.STARTING:
        return False
    return (told.seen, told.waits) != (seen, waits)


def unbound(replica: Replica, seen: Seen, *, reason: str = "", waits: str = "", proof: str = "") -> ReplicaSeen:
    """Of a Replica that has no pod."""
    return ReplicaSeen(
        id=replica.id, model=replica.model, spec_hash=replica.spec_hash, intent=replica.intent, slices=replica.slices,
        memory_bytes=replica.memory_bytes, compute_percent=replica.compute_percent, slots=replica.slots, seen=seen,
        reason=reason, waits=waits, proof=proof,
    )  # fmt: skip


def seen_in(
    pod: PodSeen,
    begun: Beginning,
    from_unix_s: float,
    seen: Seen,
    *,
    reason: str = "",
    waits: str = "",
    proof: str = "",
) -> ReplicaSeen:
    """Of one that has a pod. `from_unix_s`: what makes a time of the calendar one of the clock of observations."""
    started_s = begun.started_s
    if started_s is None and pod.started_unix_s is not None:
        started_s = pod.started_unix_s + from_unix_s
    return ReplicaSeen(
        id=pod.replica, model=pod.model, spec_hash=pod.spec_hash, intent=pod.intent, slices=pod.slices,
        memory_bytes=pod.memory_bytes, compute_percent=pod.compute_percent, slots=pod.slots, seen=seen,
        address=address.of_engine(pod.ip, pod.port, pod.tls_name) if pod.ip else "", started_s=started_s,
        placing=begun.placing, pod=PodRef(namespace=pod.namespace, name=pod.name, uid=pod.uid), reason=reason,
        waits=waits, proof=proof,
    )  # fmt: skip

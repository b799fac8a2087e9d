"""Parses the state of a replica from its pod: phases of its start, why it waits, how it ended. Pure.

`pod_manifest` builds the pod.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.kubernetes.objects.pod_manifest import ENGINE, format_pod_name
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.constants import CRASHES, ENDED
from autoscaler.slicing import slicers
from autoscaler.slicing.hami import HamiAllocation
from autoscaler.spec.pod import OURS
from autoscaler.spec.quantity import whole_number
from autoscaler.state.pod_requests import sum_pod_requests
from autoscaler.state.resources import NOTHING, HostAmount
from autoscaler.state.world import Placing, Replica, SliceId

IMAGE_S_MAX = 60.0
"""A start fails if its image could not be pulled, or a Secret was missing, for this long. Short registry failures are
tolerated, and requests do not wait long for a misspelled image."""
_PATIENCE_S = {
    "ImagePullBackOff": IMAGE_S_MAX, "ErrImagePull": IMAGE_S_MAX, "ImageInspectError": IMAGE_S_MAX,
    "RegistryUnavailable": IMAGE_S_MAX, "SignatureValidationFailed": IMAGE_S_MAX,
    "CreateContainerConfigError": IMAGE_S_MAX, "CreateContainerError": IMAGE_S_MAX, "RunContainerError": IMAGE_S_MAX,
    "InvalidImageName": 0.0, "ErrImageNeverPull": 0.0,
}  # fmt: skip
"""Waiting reason of a container that has not started yet -> how long it may last. A kubelet reports each image error
in turn with ImagePullBackOff. They have one limit, so that a change between them does not restart the wait. The image
errors are those of kubelet 1.36 (`pkg/kubelet/images`, `cri-api/pkg/errors`).
"""
_INIT_PATIENCE_S = {**_PATIENCE_S, CRASHES: IMAGE_S_MAX}
"""The same for an init container or native sidecar, which its kubelet restarts repeatedly."""
INIT_S_MAX = 900.0
"""How long an init container of an adopted workload's template may run, and a sidecar may take to start: an engine's
default (`secondsMax`).
"""
INJECTED_S_MAX = 60.0
"""The same for each container that a webhook has injected. In our own pods, all init containers are injected."""

_CLAIM_LACKS = re.compile(r'persistentvolumeclaim "[^"]*" not found')
"""Scheduler message for a pod whose claim does not exist: more capacity would not help."""


READY_TO_START = "PodReadyToStartContainers"
"""Condition of a pod whose sandbox, network and volumes are ready (KEP-3085). Kubelets before 1.35 set it only after
the image was pulled, so the two phases cannot be distinguished."""


@dataclass(slots=True)
class StartTiming:
    """Timestamps of one pod, or of one container in it.

    A kubelet records whole seconds of the clock of its node, and a start is often shorter than a second. Therefore the
    timestamps are the times of our observations, by our own clock. A pod that already runs at its first observation
    has no timestamps.
    """

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


class PodSeen(NamedTuple):
    """The facts kept about a pod of ours."""

    namespace: str
    name: str
    uid: str
    replica: ReplicaId
    model: ModelName
    spec_hash: str
    intent: str
    slices: tuple[SliceId, ...]
    memory_bytes: int
    compute_percent: int
    slots: int
    readiness_path: str
    tls_name: str | None
    """Name in its certificate; None: plain HTTP."""
    node: str
    ip: str
    port: int
    prepared: bool
    """Everything except the image and the container is ready."""
    started_unix_s: float | None
    """When its container started."""
    ended: str
    """How its container ended; empty while it runs or waits."""
    waits: str
    """Why its container has not started yet: no room, no image. Empty once it has."""
    patience_s: float | None
    """How long that wait may last; None: no limit, since the model is not at fault."""
    leaving: bool
    """It is being deleted."""
    drain: str
    """Epoch of the leader that is about to delete it."""
    disrupted: str
    """Why others end it: preemption, drain, eviction."""
    grace_s: float = 30.0
    """Its grace period, unless the deletion sets a shorter one."""
    cpu_memory: HostAmount = NOTHING
    """Its CPU and memory requests."""
    cards: tuple[HamiAllocation, ...] = ()
    """Its allocation by HAMi, as HAMi's scheduler recorded it."""
    claims: tuple[str, ...] = ()
    """Names of its ResourceClaims."""
    weights: tuple[str, ...] = ()
    """Copies of weights that it uses, folders below its node's store."""
    lingers: bool = False
    """See `add_pre_stop_sleep`."""
    is_over: bool = False
    """Its phase is final and all of its containers have ended, so that it uses no device."""
    finalizers: tuple[str, ...] = ()
    """Finalizers, which keep its object after its deletion."""
    waits_for: str = ""
    """See `Waiting`."""

    @property
    def bound(self) -> bool:
        """Whether it has a node."""
        return bool(self.node)

    @property
    def claims_alone(self) -> bool:
        """Whether it has ResourceClaims and shares none of them: its own claims have its name."""
        return bool(self.claims) and {*self.claims} == {self.name}


def read_replica_pod(pod: Object) -> PodSeen | None:
    """Parse the state of a replica from its pod; None if the pod is not ours or its annotations were damaged. A pod
    with another name than its replica's is not ours: names are unique, so no second pod becomes a known replica.
    """
    metadata, status = pod["metadata"], pod.get("status", {})
    notes: dict[str, str] = metadata.get("annotations") or {}

    def note(name: str) -> str:
        return notes.get(OURS + name, "")

    numbers = [whole_number(note(name)) for name in ("memory-bytes", "compute-percent", "slots")]
    ports = [port["containerPort"] for one in pod["spec"]["containers"] for port in one.get("ports") or ()
             if (one["name"], port.get("name")) == (ENGINE, "http")]  # fmt: skip
    memory_bytes, compute_percent, slots = numbers
    replica = ReplicaId(note("replica") or metadata["name"])
    if format_pod_name(replica) != metadata["name"]:
        return None
    if not note("intent") or not ports or memory_bytes is None or compute_percent is None or slots is None:
        return None
    statuses: list[Object] = status.get("containerStatuses") or []
    state: dict[str, Any] = next((one.get("state", {}) for one in statuses if one["name"] == ENGINE), {})
    started = state.get("running", {}).get("startedAt")
    ended = _ended(status, state)
    waits = Waiting() if ended or started is not None else read_waiting_reason(pod, state)
    return PodSeen(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        replica,
        ModelName(note("model")),
        note("spec-hash"),
        note("intent"),
        tuple(SliceId(one) for one in note("slices").split(",") if one),
        memory_bytes,
        compute_percent,
        slots,
        note("readiness-path"),
        notes.get(OURS + "tls-name"),
        pod["spec"].get("nodeName", ""),
        status.get("podIP", ""),
        ports[0],
        _condition(status, READY_TO_START).get("status") == "True",
        None if started is None else datetime.fromisoformat(started).timestamp(),
        ended,
        waits.reason,
        waits.patience_s,
        "deletionTimestamp" in metadata,
        note("drain"),
        _disrupted(status),
        float(pod["spec"].get("terminationGracePeriodSeconds", 30)),
        sum_pod_requests(pod["spec"]),
        slicers.parse_hami_allocations(notes),
        tuple(one.get("resourceClaimName", "") for one in pod["spec"].get("resourceClaims") or ()),
        tuple(filter(None, note("weights").split(","))),
        any("preStop" in one.get("lifecycle", {}) for one in pod["spec"]["containers"] if one["name"] == ENGINE),
        _is_over(status),
        tuple(map(str, metadata.get("finalizers") or ())),
        waits.container,
    )


def is_pod_of_replica(found: PodSeen, replica: Replica) -> bool:
    """Return whether a pod of the replica's name was created for the same decision and may be adopted."""
    decided = (found.intent, found.spec_hash, found.slices)
    return not found.leaving and decided == (
        replica.intent,
        replica.spec_hash,
        replica.resources.chosen or replica.resources.slices,
    )


def _ended(status: dict[str, Any], state: dict[str, Any]) -> str:
    over = state.get("terminated")
    if status.get("reason") and status.get("phase") == "Failed":  # Evicted, OutOfcpu, NodeAffinity, ...
        return _sentence(status)
    if over is None:
        return (_init_failure(status) or "was ended by its node") if status.get("phase") in ENDED else ""
    code: int = over["exitCode"]
    if over.get("reason") == "OOMKilled":
        return (
            "was killed for lack of memory (OOMKilled): raise resources.limits.memory, or use a node with more memory"
        )
    if code == 137:
        return "was killed by SIGKILL"
    reason = over.get("reason", "")
    said = over.get("message", "") or (reason if reason not in ("Error", "Completed") else "")
    return f"ended with status {code}" + (f": {said}" if said else "")


def _is_over(status: dict[str, Any]) -> bool:
    """Return whether all containers have ended. Containers that never started count as ended."""
    listed = (status.get("containerStatuses") or []) + (status.get("initContainerStatuses") or [])
    return status.get("phase") in ENDED and not any("running" in one.get("state", {}) for one in listed)


def _init_failure(status: dict[str, Any]) -> str:
    """Return how an init container failed; empty if none did."""
    for one in status.get("initContainerStatuses") or ():
        over = one.get("state", {}).get("terminated") or {}
        if over.get("exitCode"):
            said = over.get("message", "") or (over.get("reason", "") if over.get("reason") != "Error" else "")
            return f"init container {one['name']} ended with status {over['exitCode']}" + (f": {said}" if said else "")
    return ""


def _sentence(said: dict[str, Any]) -> str:
    """Join a reason and its message."""
    return ": ".join(filter(None, (said.get("reason", ""), said.get("message", ""))))


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((one for one in status.get("conditions") or [] if one["type"] == kind), {})


class Waiting(NamedTuple):
    """Why a container has not started yet."""

    reason: str = ""
    patience_s: float | None = None
    """How long this may last; None: no limit."""
    container: str = ""
    """The running init container that it waits for: the limit holds for each of them."""


def read_waiting_reason(pod: Object, state: dict[str, Any], own: Collection[str] = ()) -> Waiting:
    """Return why a container in this state has not started yet. `own`: the init containers that are not injected."""
    waits, status = state.get("waiting", {}), pod.get("status", {})
    if waits.get("reason") in _PATIENCE_S:
        return Waiting(_sentence(waits), _PATIENCE_S[waits["reason"]])
    sidecars = {one["name"] for one in pod["spec"].get("initContainers") or () if one.get("restartPolicy") == "Always"}
    for one in status.get("initContainerStatuses") or ():
        limit_s = INIT_S_MAX if one["name"] in own else INJECTED_S_MAX
        said = _init_waiting(one, limit_s, sidecar=one["name"] in sidecars)
        if said is not None:
            return said
    if not pod["spec"].get("nodeName"):
        scheduled = _condition(status, "PodScheduled")
        lacks = _CLAIM_LACKS.search(scheduled.get("message", ""))
        return Waiting(_sentence(scheduled) or "it is not scheduled yet", IMAGE_S_MAX if lacks else None)
    return Waiting(f"node {pod['spec']['nodeName']} prepares its image and volumes")


def _init_waiting(container: dict[str, Any], limit_s: float, *, sidecar: bool) -> Waiting | None:
    """Return why an engine waits for an init container or native sidecar, which may run for `limit_s`; None if it does
    not wait. After a crash, a container counts as crashing until it is ready, also while it runs again.
    """
    name, state = f"init container {container['name']}", container.get("state", {})
    waits, over = state.get("waiting", {}), state.get("terminated", {})
    if waits.get("reason") in _INIT_PATIENCE_S:
        said = ": ".join(filter(None, (waits["reason"], name, waits.get("message", ""))))
        return Waiting(said, _INIT_PATIENCE_S[waits["reason"]])
    crashed = over.get("exitCode") or (container.get("restartCount") and not over and not container.get("ready"))
    if crashed:
        return Waiting(f"{CRASHES}: {name}", IMAGE_S_MAX)
    if "running" in state and not (sidecar and container.get("started")):
        return Waiting(f"{name} has not {'started' if sidecar else 'finished'}", limit_s, container["name"])
    return None


def _disrupted(status: dict[str, Any]) -> str:
    """Return the reason of a preemption, an eviction or a taint (KEP-3329); Kueue has its own condition."""
    both = (_condition(status, kind) for kind in ("DisruptionTarget", "TerminationTarget"))
    return next((_sentence(said) for said in both if said.get("status") == "True"), "")

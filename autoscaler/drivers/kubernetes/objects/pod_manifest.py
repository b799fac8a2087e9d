"""A replica as a pod: builds the manifest that starts it, and parses the state of a replica from its pod. Pure.

Defines the names of our labels and annotations. Invariants:

- A pod contains everything that a new leader needs to adopt its replica.
- A pod's name is its replica's id, which ends in the intent, so that a repeated create for a decision finds the pod.
- A pod never restarts its container: a retry is another replica, decided by the planner.
- A pod passes the pod security standard `restricted`.
- A pod has no owner reference. The garbage collector would end the pods of a deleted model without a drain; the planner
  drains them instead.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import Launch
from autoscaler.drivers.kubernetes.objects.node_slices import sum_pod_requests
from autoscaler.drivers.kubernetes.objects.pod_overrides import add_pod_affinity, apply_overrides, refuse_collisions
from autoscaler.drivers.kubernetes.weight_volumes import mount_claim
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.constants import CRASHES, ENDED, WRITER
from autoscaler.queries.pod_requests import UNASKED
from autoscaler.slicing import slicer_families
from autoscaler.slicing.base import PodFields
from autoscaler.slicing.hami import HamiAllocation
from autoscaler.slicing.vendors import RESOURCES
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.model import Model
from autoscaler.spec.pod import DO_NOT_DISRUPT, GPU, MANAGED_BY, OURS, SAFE_TO_EVICT, EnvSource, Pod
from autoscaler.spec.quantity import whole_number
from autoscaler.state.resources import NOTHING, HostAmount
from autoscaler.state.world import Placing, Replica, SliceId

DRAIN = OURS + "drain"
"""Annotation set by a leader before it deletes the pod: its epoch."""
SLICES = OURS + "slices"
"""Annotation: the slices of its replica; empty: none."""
WEIGHTS = OURS + "weights"
"""Annotation: the copies of weights that it uses, folders below its node's store."""
UNDISTURBED = {DO_NOT_DISRUPT: "true", SAFE_TO_EVICT: "false"}
"""Annotations of a new pod, unless a model's `pod.annotations` override them.

Karpenter does not disrupt the node while the replica starts and drains. Between these phases,
`autoscaler.providers.karpenter.disruption_guard` removes Karpenter's annotation: Karpenter taints a node before it
removes the node, and waits for draining pods. Cluster Autoscaler evicts all pods of a node as soon as it taints the
node, so no replacement could start first. Its annotation therefore stays; we release barely used nodes ourselves."""
ENGINE = "engine"
PORTS = range(20_000, 28_192)
"""Ports of engines, below the ephemeral ports and above the usual ports of engines and their libraries. Each replica
has its own port. If another pod gets its IP address, nothing listens on that port there, so a misdirected request fails
instead of being answered by the wrong engine."""
HOST = "$(POD_IP)"
"""Address on which an engine listens; Kubernetes substitutes it."""
HOME = "/tmp"  # noqa: S108  the container's own: writable for a non-root user in any image
USER = 1000
"""User of an engine, unless `pod.securityContext` overrides it: pod security `restricted` forbids root, the default of
most engine images.
"""

SIGNALLED_S = 10
"""Part of a pod's grace period that remains for its engine after the signal."""
LINGERED_S = 1
"""Grace period of a lingering pod without requests, in whole seconds. When it ends, the kubelet still waits two seconds
before it sends SIGKILL."""

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
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
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


def build_pod_manifest(  # noqa: PLR0917  replica, model, launch, image, then values from Settings
    replica: Replica,
    model: Model,
    launch: Launch,
    image: str,
    defaults: Pod | None = None,
    selector: Mapping[str, str] | None = None,
    priority_class: str | None = None,
    asks: PodFields | None = None,
    weights: Pod | None = None,
    owner: Ownership = ANYBODYS,
) -> Object:
    """Build the pod of a replica, on the node that the planner chose, if any. `defaults`, `priority_class`: from
    Settings. `weights`: its mounts (`volumes.mount_weights`); None: the weights are in a claim, or its image fetches
    them. `owner`: the installation that creates it.

    `selector`: labels of suitable nodes, if the scheduler chooses the node. `asks`: the fields that request its slices;
    None: unknown, so a number of GPUs is requested.
    """
    spec = model.spec
    known_by = {MANAGED_BY: WRITER, OURS + "model": format_model_label(replica.model), **owner.labels}
    if asks is None:
        gpus = len(replica.resources.slices) if replica.resources.slices else spec.gpu.count
        asks = PodFields(limits={GPU: str(gpus)} if gpus else {})
    pod: Object = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": format_pod_name(replica.id),
            "annotations": {**UNDISTURBED, **asks.annotations, **_notes(replica, model, launch)},
            "labels": {**asks.labels, **known_by, OURS + "intent": replica.intent},
        },
        "spec": {
            "restartPolicy": "Never", "containers": [_engine(replica, model, launch, image, asks)],
            "enableServiceLinks": False, "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": max(1, int(spec.drain_seconds_max)),
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        },
    }  # fmt: skip
    if asks.claims:
        pod["spec"]["resourceClaims"] = [
            {"name": claim, "resourceClaimName": format_pod_name(one["metadata"]["name"])}
            for claim, one in zip(_claims(asks), asks.claims, strict=True)
        ]
    if asks.scheduler:
        pod["spec"]["schedulerName"] = asks.scheduler
    if asks.limits or asks.claims or asks.scheduler:
        makers = (GPU, *(name for name in asks.limits if name in RESOURCES))
        pod["spec"]["tolerations"] = [{"key": name, "operator": "Exists"} for name in makers]
    if spec.pull_secret is not None:
        pod["spec"]["imagePullSecrets"] = [{"name": spec.pull_secret}]
    said = (Pod(priority_class_name=priority_class), defaults or Pod(), Pod(resources=spec.resources), spec.pod)
    seen = weights or mount_claim(spec.artifact)
    for over in said:
        refuse_collisions(over, model.spec.env, asks, seen)
        pod = apply_overrides(pod, over)
    pod = apply_overrides(pod, seen)
    if selector is not None:
        pod["spec"]["nodeSelector"] = {**selector, **pod["spec"].get("nodeSelector", {})}
    elif replica.resources.slices:
        pod["spec"]["affinity"] = {**pod["spec"].get("affinity", {}), **_on(parse_node_name(replica.resources.slices))}
    if selector is not None or not replica.resources.slices:
        add_pod_affinity(pod["spec"], spec, known_by)
    return pod


def add_pre_stop_sleep(pod: Object) -> None:
    """Delay the engine's SIGTERM after a delete or eviction until near the end of the grace period, so that requests
    finish. A driver deletes a drained pod with the grace period `LINGERED_S`.
    """
    grace_s: int = pod["spec"]["terminationGracePeriodSeconds"]
    seconds = max(1, grace_s - min(SIGNALLED_S, grace_s // 2))
    pod["spec"]["containers"][0]["lifecycle"] = {"preStop": {"sleep": {"seconds": seconds}}}


def _notes(replica: Replica, model: Model, launch: Launch) -> dict[str, str]:
    notes = {
        "replica": replica.id, "model": replica.model, "spec-hash": replica.spec_hash, "intent": replica.intent,
        "slices": ",".join(replica.resources.slices), "memory-bytes": str(replica.resources.memory_bytes),
        "compute-percent": str(replica.resources.compute_percent), "slots": str(replica.slots),
        "readiness-path": launch.readiness_path,
    }  # fmt: skip
    if model.spec.tls is not None:
        notes["tls-name"] = model.spec.tls.server_name or ""
    return {OURS + name: value for name, value in notes.items()}


def _engine(replica: Replica, model: Model, launch: Launch, image: str, asks: PodFields) -> Object:
    """Return the engine's container. It requests little CPU and has no CPU limit: a throttled engine starts slowly."""
    scheme = "HTTP" if model.spec.tls is None else "HTTPS"
    sources = {name: one for name, one in model.spec.env.items() if isinstance(one, EnvSource)}
    env: list[Object] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    if "HOME" not in launch.env and "HOME" not in sources:
        env.append({"name": "HOME", "value": HOME})
    env += [{"name": name, "value": value} for name, value in {**launch.env, **asks.env}.items()]
    env += [{"name": name, "valueFrom": _source(one)} for name, one in sources.items()]
    resources: Object = {"requests": dict(UNASKED)}
    if asks.limits:
        resources["limits"] = dict(asks.limits)
    if asks.claims:
        resources["claims"] = [{"name": claim} for claim in _claims(asks)]
    return {
        "name": ENGINE, "image": image, "command": list(launch.argv), "env": env, "resources": resources,
        "ports": [{"name": "http", "containerPort": assign_engine_port(replica.id)}],
        "readinessProbe": {
            "httpGet": {"path": launch.readiness_path, "port": "http", "scheme": scheme}, "periodSeconds": 1,
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip


def _claims(asks: PodFields) -> list[str]:
    """Return the names of the claims within the pod."""
    return [f"claim-{at}" for at in range(len(asks.claims))]


def _source(source: EnvSource) -> Object:
    of = source.value_from
    if of.field_ref is not None:
        return {"fieldRef": {"fieldPath": of.field_ref.field_path}}
    kind, key = ("secretKeyRef", of.secret_key_ref) if of.secret_key_ref else ("configMapKeyRef", of.config_map_key_ref)
    if key is None:
        raise ValueError(
            "valueFrom of an environment variable has neither fieldRef, secretKeyRef nor configMapKeyRef"
        )  # prevented by `autoscaler.spec.pod`
    return {kind: {"name": key.name, "key": key.key, "optional": key.optional}}


def format_pod_name(replica: ReplicaId) -> str:
    """Return the pod's name: the replica's ID with the characters that Kubernetes allows. The end of the ID makes the
    name unique.
    """
    return replica if _SUBDOMAIN.fullmatch(replica) else re.sub(r"[^a-z0-9]+", "-", replica.lower()).strip("-")


def assign_engine_port(replica: ReplicaId) -> int:
    """Return the engine's port, a hash of the replica's id. Two replicas rarely share one: once in `len(PORTS)`."""
    return PORTS[zlib.crc32(replica.encode()) % len(PORTS)]


def format_model_label(model: ModelName) -> str:
    """Return a model's name as a label value; an invalid one is shortened and ends in its hash."""
    if _LABEL.fullmatch(model):
        return model
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:48].strip("._-")
    return f"{short}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def parse_node_name(slices: tuple[SliceId, ...]) -> str:
    """Return the node of slices, whose ids are NODE/NAME."""
    return slices[0].partition("/")[0]


def _on(node: str) -> Object:
    """Use affinity instead of `nodeName`: the scheduler must still count resources."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


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
        slicer_families.parse_hami_allocations(notes),
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

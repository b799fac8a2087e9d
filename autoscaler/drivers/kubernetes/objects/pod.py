"""A Replica as a pod: the manifest that starts it, and what a pod says of its Replica. Pure.

Owns the names of our labels and annotations. Promises: everything that a new leader needs to adopt a Replica stands in
its pod; a pod's name is its Replica's id, which ends in the intent, so that a second create of the same decision finds
the first. A pod never starts its container again: another try is another Replica, and the plan's decision. It passes
the pod security standard `restricted`. It has no owner reference: a Model that is deleted must drain, and the garbage
collector, which does not wait, would end its pods with Calls on them; the plan ends them instead.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import Launch
from autoscaler.drivers.kubernetes.objects.node_resources import sum_pod_requests
from autoscaler.drivers.kubernetes.objects.pod_overrides import add_pod_affinity, apply_overrides, refuse_collisions
from autoscaler.drivers.kubernetes.objects.start_timing import READY_TO_START
from autoscaler.drivers.kubernetes.volumes import mount_claim
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.constants import CRASHES, ENDED, WRITER
from autoscaler.queries.pod_requests import UNASKED
from autoscaler.slicing import registry
from autoscaler.slicing.base import PodFields
from autoscaler.slicing.hami import HamiAllocation
from autoscaler.slicing.vendors import RESOURCES
from autoscaler.spec.model import Model
from autoscaler.spec.ownership import ANYBODYS, Ownership
from autoscaler.spec.pod import DO_NOT_DISRUPT, GPU, MANAGED_BY, OURS, SAFE_TO_EVICT, EnvSource, Pod
from autoscaler.spec.quantity import whole_number
from autoscaler.state.resources import NOTHING, Beside
from autoscaler.state.world import Replica, SliceId

DRAIN = OURS + "drain"
"""The mark of a leader that is about to delete it: its epoch."""
SLICES = OURS + "slices"
"""An annotation: the Slices of its Replica; empty: none."""
WEIGHTS = OURS + "weights"
"""An annotation: the Copies that it uses, folders below its node's store."""
UNDISTURBED = {DO_NOT_DISRUPT: "true", SAFE_TO_EVICT: "false"}
"""What a pod says when it is made, unless a Model's `pod.annotations` say otherwise. Karpenter leaves its node alone
while it starts and drains (`autoscaler.providers.karpenter.disruption_guard` takes that away in between): it announces
by a taint that a node goes, and waits for who drains. Cluster Autoscaler is told for good: it evicts all of a node in
the moment in which it taints it, so no successor could start first, and it takes only what is hardly used, which we
give back ourselves.
"""
ENGINE = "engine"
PORTS = range(20_000, 28_192)
"""Of engines. Each Replica has one of its own, so that it is known by its address: an address that is given to another
pod at once is nobody's who listens there, and a Call that was meant for the first is refused, not answered. Below those
that outgoing connections take, and above those that engines and their libraries like.
"""
HOST = "$(POD_IP)"
"""What an engine listens on; Kubernetes puts the address in."""
HOME = "/tmp"  # noqa: S108  the container's own: what a user who is not root may write to in any image
USER = 1000
"""Whom an engine runs as, unless `pod.securityContext` says otherwise: pod security `restricted` forbids root, which
most images of engines would be."""

SIGNALLED_S = 10
"""Of a pod's grace, for its engine to end after its signal."""
LINGERED_S = 1
"""What a pod that lingers is given when no Call is on it any more: a kubelet counts whole seconds, and adds two after
which it kills."""

IMAGE_S_MAX = 60.0
"""An image that could not be pulled for so long, or a Secret that is not there, is a start that failed. A registry's
hiccup is shorter; to be told of a name that is wrong, Calls should not wait longer."""
_PATIENCE_S = {
    "ImagePullBackOff": IMAGE_S_MAX, "ErrImagePull": IMAGE_S_MAX, "ImageInspectError": IMAGE_S_MAX,
    "RegistryUnavailable": IMAGE_S_MAX, "CreateContainerConfigError": IMAGE_S_MAX,
    "CreateContainerError": IMAGE_S_MAX, "RunContainerError": IMAGE_S_MAX,
    "InvalidImageName": 0.0, "ErrImageNeverPull": 0.0,
}  # fmt: skip
"""Why a container does not start that was not started yet -> how long that may last."""
_INIT_PATIENCE_S = {**_PATIENCE_S, CRASHES: IMAGE_S_MAX}
"""The same of an init container or native sidecar, whose kubelet starts it again and again."""
INIT_S_MAX = 900.0
"""How long an init container may run, and a native sidecar take to start: as an engine by default (`secondsMax`)."""

_CLAIM_LACKS = re.compile(r'persistentvolumeclaim "[^"]*" not found')
"""What the scheduler says of a pod whose claim does not exist: no room that comes lets it start."""
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class PodSeen(NamedTuple):
    """What is kept of a pod of ours."""

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
    """Whom its certificate is for; None: it speaks plain HTTP."""
    node: str
    ip: str
    port: int
    prepared: bool
    """All of it is there but its image and its container."""
    started_unix_s: float | None
    """When its container started."""
    ended: str
    """How its container ended; empty while it runs, or waits."""
    waits: str
    """Why its container has not started yet: no room, no image. Empty once it has."""
    patience_s: float | None
    """How long that may last; None: for ever, for it is no fault of the Model's."""
    leaving: bool
    """Its deletion was asked for."""
    drain: str
    """The mark of a leader that is about to delete it."""
    disrupted: str
    """Why somebody else ends it: preempted, drained, evicted."""
    grace_s: float = 30.0
    """What it has to end, unless whoever deletes it says less."""
    beside: Beside = NOTHING
    """What it requests of its node beside devices."""
    cards: tuple[HamiAllocation, ...] = ()
    """What HAMi gave it, as its own scheduler wrote down."""
    claims: tuple[str, ...] = ()
    """Names of its ResourceClaims."""
    weights: tuple[str, ...] = ()
    """The Copies that it uses, folders below its node's store."""
    lingers: bool = False
    """See `add_pre_stop_sleep`."""
    is_over: bool = False
    """Its phase is final and all of its containers have ended, so that it uses no device."""
    finalizers: tuple[str, ...] = ()
    """What keeps its object after that."""

    @property
    def bound(self) -> bool:
        """It has a node."""
        return bool(self.node)

    @property
    def claims_alone(self) -> bool:
        """Whether it has ResourceClaims, and others have none of them: they are called as it is."""
        return bool(self.claims) and {*self.claims} == {self.name}


def build_pod_manifest(  # noqa: PLR0917  who, what, how, from what; then what Settings say
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
    """The pod of a Replica, on the node that the plan chose, if it chose one. `defaults` and `priority_class`: of the
    Settings. `weights`: by what it sees them (`volumes.mount_weights`); None: they are in a claim, or its image gets
    them. `owner`: the installation that makes it.

    `selector`: labels of the nodes that will do, where the plan may not know nodes and the scheduler chooses.
    `asks`: what it says to get its Slices; None: that is not known, and it asks for so many GPUs.
    """
    spec = model.spec
    known_by = {MANAGED_BY: WRITER, OURS + "model": format_model_label(replica.model), **owner.labels}
    if asks is None:
        gpus = len(replica.slices) if replica.slices else spec.gpu.count
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
    elif replica.slices:
        pod["spec"]["affinity"] = {**pod["spec"].get("affinity", {}), **_on(parse_node_name(replica.slices))}
    if selector is not None or not replica.slices:
        add_pod_affinity(pod["spec"], spec, known_by)
    return pod


def add_pre_stop_sleep(pod: Object) -> None:
    """Whoever deletes it gives its Calls time, an eviction, too: its engine hears of that only when most of its pod's
    grace is over, or when a driver has it deleted sooner, which waits LINGERED_S.
    """
    grace_s: int = pod["spec"]["terminationGracePeriodSeconds"]
    seconds = max(1, grace_s - min(SIGNALLED_S, grace_s // 2))
    pod["spec"]["containers"][0]["lifecycle"] = {"preStop": {"sleep": {"seconds": seconds}}}


def _notes(replica: Replica, model: Model, launch: Launch) -> dict[str, str]:
    notes = {
        "replica": replica.id, "model": replica.model, "spec-hash": replica.spec_hash, "intent": replica.intent,
        "slices": ",".join(replica.slices), "memory-bytes": str(replica.memory_bytes),
        "compute-percent": str(replica.compute_percent), "slots": str(replica.slots),
        "readiness-path": launch.readiness_path,
    }  # fmt: skip
    if model.spec.tls is not None:
        notes["tls-name"] = model.spec.tls.server_name or ""
    return {OURS + name: value for name, value in notes.items()}


def _engine(replica: Replica, model: Model, launch: Launch, image: str, asks: PodFields) -> Object:
    """Its container. It requests little CPU and has no limit of it: an engine that is throttled is slow to start."""
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
    """What the pod and its container call them."""
    return [f"claim-{at}" for at in range(len(asks.claims))]


def _source(source: EnvSource) -> Object:
    of = source.value_from
    if of.field_ref is not None:
        return {"fieldRef": {"fieldPath": of.field_ref.field_path}}
    kind, key = ("secretKeyRef", of.secret_key_ref) if of.secret_key_ref else ("configMapKeyRef", of.config_map_key_ref)
    if key is None:
        raise ValueError("a variable comes from somewhere")  # autoscaler.spec.pod has seen to that
    return {kind: {"name": key.name, "key": key.key, "optional": key.optional}}


def format_pod_name(replica: ReplicaId) -> str:
    """Its pod's name: the Replica's id, as far as Kubernetes can write it. The id's end keeps two apart."""
    return replica if _SUBDOMAIN.fullmatch(replica) else re.sub(r"[^a-z0-9]+", "-", replica.lower()).strip("-")


def assign_engine_port(replica: ReplicaId) -> int:
    """Where its engine listens. Two Replicas share one by chance, once in len(PORTS)."""
    return PORTS[zlib.crc32(replica.encode()) % len(PORTS)]


def format_model_label(model: ModelName) -> str:
    """A Model's name as a label's value: one that is none is shortened and ends in its hash."""
    if _LABEL.fullmatch(model):
        return model
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:48].strip("._-")
    return f"{short}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def parse_node_name(slices: tuple[SliceId, ...]) -> str:
    """A Slice's id is NODE/NAME."""
    return slices[0].partition("/")[0]


def _on(node: str) -> Object:
    """By affinity, not by `nodeName`: the scheduler must still count what is there."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def read_replica_pod(pod: Object) -> PodSeen | None:
    """What its pod says of a Replica; None of a pod that is not ours, or that somebody has spoilt."""
    metadata, status = pod["metadata"], pod.get("status", {})
    notes: dict[str, str] = metadata.get("annotations") or {}

    def note(name: str) -> str:
        return notes.get(OURS + name, "")

    numbers = [whole_number(note(name)) for name in ("memory-bytes", "compute-percent", "slots")]
    ports = [port["containerPort"] for one in pod["spec"]["containers"] for port in one.get("ports") or ()
             if (one["name"], port.get("name")) == (ENGINE, "http")]  # fmt: skip
    memory_bytes, compute_percent, slots = numbers
    if not note("intent") or not ports or memory_bytes is None or compute_percent is None or slots is None:
        return None
    statuses: list[Object] = status.get("containerStatuses") or []
    state: dict[str, Any] = next((one.get("state", {}) for one in statuses if one["name"] == ENGINE), {})
    started = state.get("running", {}).get("startedAt")
    ended = _ended(status, state)
    waits, patience_s = ("", None) if ended or started is not None else read_waiting_reason(pod, state)
    return PodSeen(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        ReplicaId(note("replica") or metadata["name"]),
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
        waits,
        patience_s,
        "deletionTimestamp" in metadata,
        note("drain"),
        _disrupted(status),
        float(pod["spec"].get("terminationGracePeriodSeconds", 30)),
        sum_pod_requests(pod["spec"]),
        registry.parse_hami_allocations(notes),
        tuple(one.get("resourceClaimName", "") for one in pod["spec"].get("resourceClaims") or ()),
        tuple(filter(None, note("weights").split(","))),
        any("preStop" in one.get("lifecycle", {}) for one in pod["spec"]["containers"] if one["name"] == ENGINE),
        _is_over(status),
        tuple(map(str, metadata.get("finalizers") or ())),
    )


def is_pod_of_replica(found: PodSeen, replica: Replica) -> bool:
    """Whether a pod of that name is this very decision, and may be taken for it."""
    decided = (found.intent, found.spec_hash, found.slices)
    return not found.leaving and decided == (replica.intent, replica.spec_hash, replica.chosen or replica.slices)


def _ended(status: dict[str, Any], state: dict[str, Any]) -> str:
    over = state.get("terminated")
    if status.get("reason") and status.get("phase") == "Failed":  # Evicted, OutOfcpu, NodeAffinity, ...
        return _sentence(status)
    if over is None:
        return (_init_failure(status) or "was ended by its node") if status.get("phase") in ENDED else ""
    code: int = over["exitCode"]
    if over.get("reason") == "OOMKilled":
        return "was killed for memory (OOMKilled): it needs more than resources.limits.memory, or than its node has"
    if code == 137:
        return "was killed by SIGKILL"
    reason = over.get("reason", "")
    said = over.get("message", "") or (reason if reason not in ("Error", "Completed") else "")
    return f"ended with status {code}" + (f": {said}" if said else "")


def _is_over(status: dict[str, Any]) -> bool:
    """Containers that never started are not listed, or wait."""
    listed = (status.get("containerStatuses") or []) + (status.get("initContainerStatuses") or [])
    return status.get("phase") in ENDED and not any("running" in one.get("state", {}) for one in listed)


def _init_failure(status: dict[str, Any]) -> str:
    """How an init container ended that failed; empty: none did."""
    for one in status.get("initContainerStatuses") or ():
        over = one.get("state", {}).get("terminated") or {}
        if over.get("exitCode"):
            said = over.get("message", "") or (over.get("reason", "") if over.get("reason") != "Error" else "")
            return f"init container {one['name']} ended with status {over['exitCode']}" + (f": {said}" if said else "")
    return ""


def _sentence(said: dict[str, Any]) -> str:
    """A reason and its message."""
    return ": ".join(filter(None, (said.get("reason", ""), said.get("message", ""))))


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((one for one in status.get("conditions") or [] if one["type"] == kind), {})


def read_waiting_reason(pod: Object, state: dict[str, Any]) -> tuple[str, float | None]:
    """Why a container in this state has not started yet, and the seconds that this may last (None: no limit)."""
    waits, status = state.get("waiting", {}), pod.get("status", {})
    if waits.get("reason") in _PATIENCE_S:
        return _sentence(waits), _PATIENCE_S[waits["reason"]]
    sidecars = {one["name"] for one in pod["spec"].get("initContainers") or () if one.get("restartPolicy") == "Always"}
    for one in status.get("initContainerStatuses") or ():
        said = _init_waiting(one, sidecar=one["name"] in sidecars)
        if said is not None:
            return said
    if not pod["spec"].get("nodeName"):
        scheduled = _condition(status, "PodScheduled")
        lacks = _CLAIM_LACKS.search(scheduled.get("message", ""))
        return _sentence(scheduled) or "it is not scheduled yet", IMAGE_S_MAX if lacks else None
    return f"node {pod['spec']['nodeName']} gets its image and volumes ready", None


def _init_waiting(container: dict[str, Any], *, sidecar: bool) -> tuple[str, float] | None:
    """Why an engine waits for an init container or native sidecar, and for how long it may; None: it does not. One that
    has crashed counts as crashing while its kubelet waits and while it runs again, until it is ready.
    """
    name, state = f"init container {container['name']}", container.get("state", {})
    waits, over = state.get("waiting", {}), state.get("terminated", {})
    if waits.get("reason") in _INIT_PATIENCE_S:
        said = ": ".join(filter(None, (waits["reason"], name, waits.get("message", ""))))
        return said, _INIT_PATIENCE_S[waits["reason"]]
    crashed = over.get("exitCode") or (container.get("restartCount") and not over and not container.get("ready"))
    if crashed:
        return f"{CRASHES}: {name}", IMAGE_S_MAX
    if "running" in state and not (sidecar and container.get("started")):
        return f"{name} has not finished" if not sidecar else f"{name} has not started", INIT_S_MAX
    return None


def _disrupted(status: dict[str, Any]) -> str:
    """Preemption, an eviction, a taint (KEP-3329); Kueue has a condition of its own."""
    both = (_condition(status, kind) for kind in ("DisruptionTarget", "TerminationTarget"))
    return next((_sentence(said) for said in both if said.get("status") == "True"), "")

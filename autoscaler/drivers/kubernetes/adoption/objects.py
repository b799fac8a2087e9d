"""Parses Deployments, StatefulSets, their pods, and other autoscalers into the few facts that adoption needs. Pure.

Facts of a workload: our annotations, its scale, and the controller of the scale. Facts of a pod: its address, taken
from the pod because a rollout may change it, and the state of its container. A pod belongs to the workload only if the
workload's controller owns it; matching labels do not suffice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec

from autoscaler.drivers.kubernetes.objects.pod_state import READY_TO_START, Waiting, read_waiting_reason
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.constants import CRASHES, ENDED, TEMPLATE_HASH, WRITER
from autoscaler.kubernetes.resources.model_conditions import ConditionValue
from autoscaler.spec.pod import OURS
from autoscaler.spec.quantity import whole_number

Kind = Literal["Deployment", "StatefulSet"]
LINGO = "lingo.substratus.ai/"
REPLICA, INTENT = OURS + "replica", OURS + "intent"
"""Annotations of a pod: its replica and the decision that it belongs to."""
COST, GOES_FIRST = "controller.kubernetes.io/pod-deletion-cost", "-1000"
CONTROLLERS: dict[Kind, str] = {"Deployment": "ReplicaSet", "StatefulSet": "StatefulSet"}
"""Kind of workload -> kind of the object that creates its pods."""
SHOWN = OURS + "Adopted"
"""The type of our condition on a workload."""
PORT_DEFAULT = 8080
"""Used if neither an annotation nor the container names a port."""


class WorkloadKey(NamedTuple):
    """Identifies a workload."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class ShownCondition(NamedTuple):
    """Our condition as stored on a workload."""

    said: ConditionValue
    since: str
    """Time of its last transition, in the API server's format."""


class ReleasedWorkload(NamedTuple):
    """The facts kept about a workload that lost its annotation and still has our condition."""

    key: WorkloadKey
    uid: str
    version: int
    shown: ShownCondition


class WorkloadSeen(NamedTuple):
    """The facts kept about an annotated Deployment or StatefulSet."""

    key: WorkloadKey
    uid: str
    version: int
    """Its resourceVersion, which increases."""
    named_unix_s: int
    """When it was annotated; 0: unknown."""
    notes: tuple[tuple[str, str], ...]
    """Its annotations of both domains, sorted."""
    selector: str
    container: str
    """The container that serves."""
    replicas: int
    ours: bool
    """Its scale is as we wrote it."""
    scaled_by: str
    """The field manager of its scale, if that is not ours; empty: none (as after a merge patch to 0)."""
    scaled_unix_s: float | None
    since_adopted: bool
    """The scale was written through the scale subresource, as by `kubectl scale`, and after the annotation."""
    trouble: str
    """Why its controller cannot create a pod (condition ReplicaFailure); empty: no problem."""
    shown: ShownCondition | None = None
    template: str = ""
    """A hash of its pod template."""
    template_marks: tuple[str, ...] = ()
    """Those annotations in its pod template that only the autoscaler may write."""
    init_containers: tuple[str, ...] = ()
    """Init containers of its pod template; others in its pods are injected."""


class ScalerSeen(NamedTuple):
    """Another autoscaler and its target."""

    target: WorkloadKey
    title: str


class AdoptedPodSeen(NamedTuple):
    """The facts kept about a pod of a workload."""

    name: str
    uid: str
    rank: int
    """Its ordinal in a StatefulSet."""
    replica: str
    intent: str
    goes_first: bool
    created: str
    ip: str
    port: int
    probe_port: int
    path: str | None
    """Path whose GET reports readiness; None: an open port suffices."""
    kubelet_decides: bool
    """Readiness is taken from the kubelet, because our probe cannot do what the readiness probe specifies."""
    held: bool
    """Whether the pod is not ready even if our probe succeeds: the startup probe has not succeeded, another container
    is not ready, or a readiness gate is closed.
    """
    ready: bool
    started_unix_s: float | None
    ended: str
    """How its container ended; empty while it runs, waits, or is restarted for the first time."""
    over: bool
    """The pod has ended for good, and only its object is left."""
    waits: str
    """Why no container runs; empty if one does."""
    leaving: bool
    bound: bool = False
    """It has a node."""
    prepared: bool = False
    """Everything except the image and the container is ready."""
    patience_s: float | None = None
    """How long the waiting may last; None: no limit."""
    template: str = ""
    """The Deployment's template it was created from; empty for a StatefulSet, which replaces pods in place."""
    finalizers: tuple[str, ...] = ()
    """Finalizers that keep its object after its deletion."""
    waits_for: str = ""
    """The running init container that it waits for."""


# --- workloads --------------------------------------------------------------------------------------------------------


def read_workload(kind: Kind, found: Object) -> WorkloadSeen | ReleasedWorkload | None:
    """Parse a workload; None if it is being deleted, or is not annotated and has no condition of ours."""
    metadata, spec = found["metadata"], found["spec"]
    annotations: dict[str, str] = metadata.get("annotations") or {}
    notes = tuple(sorted((key, value) for key, value in annotations.items() if key.startswith((OURS, LINGO))))
    if "deletionTimestamp" in metadata:
        return None
    key, shown = WorkloadKey(kind, metadata["namespace"], metadata["name"]), _shown(found)
    if not any(name in (OURS + "models", LINGO + "models") for name, _ in notes):
        return (
            None if shown is None else ReleasedWorkload(key, metadata["uid"], int(metadata["resourceVersion"]), shown)
        )
    managed = metadata.get("managedFields") or []
    annotated = _annotated(managed)
    ours, owner = _scaled_by(managed)
    containers = spec["template"]["spec"]["containers"]
    template_notes = spec["template"].get("metadata", {}).get("annotations") or {}
    failure = [c for c in found.get("status", {}).get("conditions") or [] if _is(c, "ReplicaFailure")]
    return WorkloadSeen(
        key=key,
        uid=metadata["uid"],
        version=int(metadata["resourceVersion"]),
        named_unix_s=int(_unix_s(annotated)) if annotated else 0,
        notes=notes,
        selector=_selector(spec["selector"]),
        container=_serving(containers, whole_number(annotations.get(OURS + "port")))["name"],
        replicas=spec.get("replicas", 0),
        ours=ours,
        scaled_by=owner["manager"] if owner is not None else "",
        scaled_unix_s=_unix_s(owner["time"]) if owner is not None and "time" in owner else None,
        since_adopted=owner is not None
        and owner.get("subresource") == "scale"
        and str(owner.get("time", "")) > annotated,
        trouble=failure[0].get("message", "") if failure else "",
        shown=shown,
        template=hashlib.blake2s(msgspec.json.encode(spec["template"], order="deterministic")).hexdigest()[:16],
        template_marks=tuple(name for name in (REPLICA, INTENT) if name in template_notes),
        init_containers=tuple(one["name"] for one in spec["template"]["spec"].get("initContainers") or ()),
    )


def _shown(found: Object) -> ShownCondition | None:
    for one in found.get("status", {}).get("conditions") or []:
        if one["type"] == SHOWN:
            said = ConditionValue(SHOWN, one["status"], one.get("reason", ""), one.get("message", ""))
            return ShownCondition(said, one.get("lastTransitionTime") or "")
    return None


def _scaled_by(managed: list[dict[str, Any]]) -> tuple[bool, dict[str, Any] | None]:
    """Return (whether we manage spec.replicas, the newest entry of managedFields that manages it if we do not)."""
    owners = [one for one in managed if "f:replicas" in one.get("fieldsV1", {}).get("f:spec", {})]
    if any((one["manager"], one.get("subresource")) == (WRITER, "scale") for one in owners):
        return True, None
    return False, max(owners, key=lambda one: str(one.get("time", "")), default=None)


def _annotated(managed: list[dict[str, Any]]) -> str:
    """Return when the annotation of the model names was last written; empty if unknown."""
    writers = [
        str(one.get("time", ""))
        for one in managed
        for key in one.get("fieldsV1", {}).get("f:metadata", {}).get("f:annotations", {})
        if key in ("f:" + OURS + "models", "f:" + LINGO + "models")
    ]
    return max(writers, default="")


def _selector(selector: dict[str, Any]) -> str:
    """Format a label selector as a query parameter."""
    words = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for one in selector.get("matchExpressions") or []:
        key, values = one["key"], ",".join(one.get("values") or [])
        words.append({
            "In": f"{key} in ({values})", "NotIn": f"{key} notin ({values})", "Exists": key, "DoesNotExist": f"!{key}",
        }[one["operator"]])  # fmt: skip
    return ",".join(words)


def read_scaler(kind: str, found: Object) -> ScalerSeen | None:
    """Parse a HorizontalPodAutoscaler or ScaledObject; None if its target is of a kind that we do not scale."""
    target = found["spec"].get("scaleTargetRef") or {}
    scaled: str = target.get("kind", "Deployment")
    metadata = found["metadata"]
    for known in CONTROLLERS:
        if scaled == known:
            key = WorkloadKey(known, metadata["namespace"], str(target.get("name", "")))
            return ScalerSeen(key, f"{kind} {metadata['name']}")
    return None


# --- pods -------------------------------------------------------------------------------------------------------------


def read_pod(
    found: Object, key: WorkloadKey, container: str, port: int | None = None, own: Collection[str] = ()
) -> AdoptedPodSeen | None:
    """Parse a pod; None if something else controls it: selectors of two workloads may both match it. `own`: the init
    containers of its workload.
    """
    metadata, status = found["metadata"], found.get("status", {})
    owners = [one for one in metadata.get("ownerReferences") or [] if one.get("controller")]
    if not owners or (owners[0]["kind"], owners[0]["name"]) != (CONTROLLERS[key.kind], _controller(key, metadata)):
        return None
    containers = found["spec"]["containers"]
    serving = next((one for one in containers if one["name"] == container), _serving(containers, port))
    listens = port or _port(serving)
    probe_port, path, kubelet_decides = _readiness(serving, listens)
    states = {one["name"]: one for one in status.get("containerStatuses") or []}
    now = states.get(serving["name"], {})
    running = now.get("state", {}).get("running")
    annotations: dict[str, str] = metadata.get("annotations") or {}
    ended, over = _ended(status, now)
    waits = Waiting() if running is not None else read_waiting_reason(found, now.get("state", {}), own)
    return AdoptedPodSeen(
        name=metadata["name"], uid=metadata["uid"], rank=_rank(key.kind, metadata["name"]),
        replica=annotations.get(REPLICA, ""), intent=annotations.get(INTENT, ""),
        goes_first=annotations.get(COST) == GOES_FIRST, created=metadata["creationTimestamp"],
        ip=status.get("podIP", ""), port=listens, probe_port=probe_port, path=path, kubelet_decides=kubelet_decides,
        held=_held(found["spec"], serving, status),
        ready=any(_is(one, "Ready") for one in status.get("conditions") or []),
        started_unix_s=_unix_s(running["startedAt"]) if running is not None and running.get("startedAt") else None,
        ended=ended, over=over, waits=waits.reason, patience_s=waits.patience_s, waits_for=waits.container,
        leaving="deletionTimestamp" in metadata, bound=bool(found["spec"].get("nodeName")),
        prepared=any(_is(one, READY_TO_START) for one in status.get("conditions") or []),
        template=(metadata.get("labels") or {}).get(TEMPLATE_HASH, ""),
        finalizers=tuple(map(str, metadata.get("finalizers") or ())),
    )  # fmt: skip


def _controller(key: WorkloadKey, metadata: dict[str, Any]) -> str:
    """Return the name of the controller of pods with this template: a ReplicaSet has the hash in its name."""
    hash = (metadata.get("labels") or {}).get(TEMPLATE_HASH, "")
    return key.name if key.kind == "StatefulSet" else f"{key.name}-{hash}"


def _serving(containers: list[dict[str, Any]], port: int | None = None) -> dict[str, Any]:
    """Return the container with the port, else with a port named http, else the first with any port, else the first."""
    given = [one for one in containers if any(has["containerPort"] == port for has in one.get("ports") or [])]
    if given:
        return given[0]
    named = [one for one in containers if any(port.get("name") == "http" for port in one.get("ports") or [])]
    return (named or [one for one in containers if one.get("ports")] or containers)[0]


def _port(container: dict[str, Any]) -> int:
    ports = container.get("ports") or []
    named = [port for port in ports if port.get("name") == "http"]
    return next((int(port["containerPort"]) for port in (named or ports)), PORT_DEFAULT)


def _readiness(container: dict[str, Any], port: int) -> tuple[int, str | None, bool]:
    """Return (port to probe, path for GET, whether the kubelet decides)."""
    probe = container.get("readinessProbe")
    if probe is None:
        return port, None, False
    if probe.get("initialDelaySeconds", 0) > 0 or probe.get("successThreshold", 1) > 1:
        return port, None, True
    if "tcpSocket" in probe:
        number = _number(container, probe["tcpSocket"]["port"])
        return number or port, None, number is None or bool(probe["tcpSocket"].get("host"))
    get = probe.get("httpGet")
    if get is None or get.get("scheme", "HTTP") != "HTTP" or get.get("host") or get.get("httpHeaders"):
        return port, None, True
    number = _number(container, get["port"])
    return number or port, get.get("path") or "/", number is None


def _held(spec: dict[str, Any], serving: dict[str, Any], status: dict[str, Any]) -> bool:
    """Return `AdoptedPodSeen.held`. It is the condition Ready without the serving container's readiness probe:
    https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-readiness-gate
    """
    statuses = (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ()))
    of = {one["name"]: one for one in statuses}
    sidecars = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
    others = [one["name"] for one in (*spec["containers"], *sidecars) if one["name"] != serving["name"]]
    starts = "startupProbe" in serving and not of.get(serving["name"], {}).get("started")
    true = {one["type"] for one in status.get("conditions") or () if one["status"] == "True"}
    closed = any(gate["conditionType"] not in true for gate in spec.get("readinessGates") or ())
    return starts or closed or not all(of.get(name, {}).get("ready") for name in others)


def _number(container: dict[str, Any], port: int | str) -> int | None:
    """Resolve a named port. None: no port has that name, so the kubelet never sees the container ready."""
    if isinstance(port, int):
        return port
    named = {one.get("name"): int(one["containerPort"]) for one in container.get("ports") or []}
    return named.get(port)


def _rank(kind: Kind, name: str) -> int:
    ordinal = name.rpartition("-")[2]
    return int(ordinal) if kind == "StatefulSet" and ordinal.isdecimal() else 0


def _ended(status: dict[str, Any], container: dict[str, Any]) -> tuple[str, bool]:
    """Return (how its container ended, whether for good). A kubelet restarts it, the first time at once."""
    state = container.get("state", {})
    if status.get("phase") in ENDED:
        reason = ": ".join(status[key] for key in ("reason", "message") if status.get(key))
        said = _how(state.get("terminated")) or reason or "was ended by the node"
        return said, True
    if state.get("waiting", {}).get("reason") == CRASHES:
        return _how(container.get("lastState", {}).get("terminated")) or CRASHES, False
    return _how(state.get("terminated")), False


def _how(over: dict[str, Any] | None) -> str:
    if over is None:
        return ""
    if over.get("reason") == "OOMKilled":
        return "was killed for lack of memory (OOMKilled)"
    if over["exitCode"] == 137:
        return "was killed by SIGKILL"
    said = over.get("message", "")
    return f"ended with status {over['exitCode']}" + (f": {said}" if said else "")


def _is(condition: dict[str, Any], kind: str) -> bool:
    return (condition["type"], condition["status"]) == (kind, "True")


def _unix_s(written: str) -> float:
    return datetime.fromisoformat(written).timestamp()

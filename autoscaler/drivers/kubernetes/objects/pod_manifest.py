"""Builds the manifest of the pod that starts a replica. Pure. `pod_state` parses the state of a replica from its pod.

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
import re
import zlib
from collections.abc import Mapping

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import Launch
from autoscaler.drivers.kubernetes.objects.pod_overrides import add_pod_affinity, apply_overrides, refuse_collisions
from autoscaler.drivers.kubernetes.weight_volumes import mount_claim
from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.constants import WRITER
from autoscaler.slicing.slicer_protocol import PodFields
from autoscaler.slicing.vendors import RESOURCES
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.model import Model
from autoscaler.spec.pod import DO_NOT_DISRUPT, GPU, MANAGED_BY, OURS, SAFE_TO_EVICT, EnvSource, Pod
from autoscaler.state.pod_requests import UNASKED
from autoscaler.state.world import Replica, SliceId

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


_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


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

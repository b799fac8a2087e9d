"""The part of a Model that configures its pods: `pod`, `resources`, `env.*.valueFrom` (interfaces, section 2). Pure.

Owns the types and their rules. Only the fields here can be merged into a pod. The plan sets the name, Pilotlight's own
labels and annotations, node affinity, command, devices and termination; a document that sets one of these is rejected
with the path of the key. Names and the contents of `affinity`, `volumes`, `volumeMounts` and `securityContext` are
those of Kubernetes; the API server validates them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from autoscaler.spec.decode import Part, Path, WrongKeyError

GPU = "nvidia.com/gpu"
OURS = "pilotlight.dev/"
"""The prefix of labels, annotations and API groups of Pilotlight."""
API_VERSION = OURS + "v1alpha1"
"""The API version of documents and custom resources."""
MANAGED_BY = "app.kubernetes.io/managed-by"
DO_NOT_DISRUPT, SAFE_TO_EVICT = "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""Pod annotations that make Karpenter and Cluster Autoscaler wait for a pod before they remove its node."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""The label with the LocalQueue of Kueue, which admits a pod to scheduling and can preempt it."""
GROUP, GROUP_SIZE = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
"""The label and the annotation by which pods share one Workload of Kueue."""
CONSUMES = ("autoscaling.x-k8s.io/consume-provisioning-request", "autoscaling.x-k8s.io/provisioning-class-name")
"""Annotations of the pods that use a ProvisioningRequest: its name and its class."""
RESERVED = frozenset({
    MANAGED_BY, GROUP, GROUP_SIZE, *CONSUMES, "cluster-autoscaler.kubernetes.io/consume-provisioning-request",
    "cluster-autoscaler.kubernetes.io/provisioning-class-name",
})  # fmt: skip
"""Labels and annotations without the prefix `OURS` that only Pilotlight sets. Most assign pods to capacity orders; the
last two are their names in older versions of Cluster Autoscaler.
"""
PLACE = OURS + "place"
"""The label of Pilotlight's pods that are not replicas: the name of the capacity order whose place the pod reserves
until a replica takes it.
"""

_QUANTITY = re.compile(r"[0-9]{1,19}(\.[0-9]{1,9})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
THE_PLAN = "is set by Pilotlight: remove it"
THE_PLANS_NODE = (
    "is set by Pilotlight, which chooses the node: select devices with spec.gpu.models or nodes with nodeSelector"
)
VOLUMES_BEGIN = "pilotlight-"
"""The prefix of names of volumes that Pilotlight adds to pods."""
SELECTS = frozenset({"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"})
"""Labels by which Services, NetworkPolicies and the autoscaler select Pilotlight's own pods."""
OWN_SELECTORS = "selects Pilotlight's own pods: use another label"
VOLUME_RESERVED = f"names that begin with {VOLUMES_BEGIN} are reserved: rename it"
VOLUME_WANTED = "expected the name of a volume in `volumes`"
SOURCE_WANTED = "expected the source of a volume, such as emptyDir: {}"


class KeyRef(Part, frozen=True):
    """A reference to one key of a Secret or ConfigMap in the pod's namespace."""

    name: str
    """The name of the Secret or ConfigMap."""
    key: str
    """The key in it."""
    optional: bool = False
    """Whether the pod starts without the variable if the object or key does not exist."""


class FieldRef(Part, frozen=True):
    """A reference to a field of the pod itself."""

    field_path: str
    """The path of the field, such as `metadata.name`."""


class ValueFrom(Part, frozen=True):
    """The source of a variable's value: exactly one of these."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod."""


class EnvSource(Part, frozen=True):
    """A variable whose value the kubelet determines. Only pods can use it."""

    value_from: ValueFrom
    """The source of the value."""


class Resources(Part, frozen=True):
    """Resource requests and limits by name (`cpu`, `memory`, `rdma/hca`).

    CPU is not limited unless a limit is set here.
    """

    requests: dict[str, str | int] = {}
    """Requested quantities by resource name."""
    limits: dict[str, str | int] = {}
    """Maximum quantities by resource name."""


class Toleration(Part, frozen=True):
    """A taint that the pods tolerate, as in Kubernetes."""

    key: str | None = None
    """The key of the taint. None: every taint, with operator `Exists`."""
    operator: Literal["Exists", "Equal"] | None = None
    """`Exists`: any value. `Equal`, the default: the value must be equal."""
    value: str | None = None
    """The value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect of the taint. None: every effect."""
    toleration_seconds: int | None = None
    """How long `NoExecute` is tolerated, in seconds. None: without a limit."""


class SecretName(Part, frozen=True):
    """A Secret in the pod's namespace."""

    name: str
    """The name of the Secret."""


class Pod(Part, frozen=True):
    """Fields to merge into the pods that Pilotlight creates."""

    node_selector: dict[str, str] = {}
    """Labels that the node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods tolerate."""
    affinity: dict[str, object] = {}
    """`podAffinity` and `podAntiAffinity`, as in Kubernetes. Pilotlight sets `nodeAffinity`."""
    annotations: dict[str, str] = {}
    """Annotations of the pods, except those with the prefix `pilotlight.dev/`."""
    labels: dict[str, str] = {}
    """Labels of the pods, except those with the prefix `pilotlight.dev/`."""
    volumes: tuple[dict[str, object], ...] = ()
    """Volumes of the pods, as in Kubernetes."""
    volume_mounts: tuple[dict[str, object], ...] = ()
    """Volume mounts of the engine container. Each one names a volume in `volumes`."""
    image_pull_secrets: tuple[SecretName, ...] = ()
    """Secrets for pulling the image."""
    service_account_name: str | None = None
    """The service account of the pods. Its token is not mounted."""
    runtime_class_name: str | None = None
    """The RuntimeClass of the pods."""
    scheduler_name: str | None = None
    """The scheduler of the pods."""
    priority_class_name: str | None = None
    """The PriorityClass of the pods."""
    resources: Resources = Resources()
    """Resource requests and limits to add to `spec.resources`."""
    security_context: dict[str, object] = {}
    """The security context of the pod. Default: what the pod security standard `restricted` requires."""


def selector_of(defaults: Pod | None, own: Pod) -> dict[str, str]:
    """Return the labels that a replica's node must have: those of the Settings, overridden by those of the Model."""
    return own.node_selector if defaults is None else {**defaults.node_selector, **own.node_selector}


def check_pod(pod: Pod, at: Path) -> None:
    """Check fields that are merged into a pod. Raises WrongKeyError with a path below `at`."""
    if "nodeAffinity" in pod.affinity:
        raise WrongKeyError((*at, "affinity", "nodeAffinity"), THE_PLANS_NODE)
    for kind in sorted(pod.affinity.keys() - {"podAffinity", "podAntiAffinity"}):
        raise WrongKeyError((*at, "affinity", kind), "unknown key; expected podAffinity or podAntiAffinity")
    _check_notes(pod.labels, (*at, "labels"))
    for label in sorted(SELECTS & pod.labels.keys()):
        raise WrongKeyError((*at, "labels", label), OWN_SELECTORS)
    _check_notes(pod.annotations, (*at, "annotations"))
    check_labels(pod.labels, (*at, "labels"))
    check_labels(pod.node_selector, (*at, "nodeSelector"))
    check_resources(pod.resources, (*at, "resources"))
    _check_named(pod.volumes, (*at, "volumes"))
    _check_named(pod.volume_mounts, (*at, "volumeMounts"))
    for position, volume in enumerate(pod.volumes):
        if str(volume["name"]).startswith(VOLUMES_BEGIN):
            raise WrongKeyError((*at, "volumes", position, "name"), VOLUME_RESERVED)
        if len(volume) == 1:
            raise WrongKeyError((*at, "volumes", position), SOURCE_WANTED)
    known = {volume.get("name") for volume in pod.volumes}
    for position, mount in enumerate(pod.volume_mounts):
        if mount["name"] not in known:
            raise WrongKeyError((*at, "volumeMounts", position, "name"), VOLUME_WANTED)
    names = {
        "serviceAccountName": pod.service_account_name, "runtimeClassName": pod.runtime_class_name,
        "schedulerName": pod.scheduler_name, "priorityClassName": pod.priority_class_name,
    }  # fmt: skip
    for key, name in names.items():
        if name is not None:
            check_object_name(name, (*at, key))
    for position, secret in enumerate(pod.image_pull_secrets):
        check_object_name(secret.name, (*at, "imagePullSecrets", position, "name"))


def check_labels(labels: Mapping[str, str], at: Path) -> None:
    """Check Kubernetes labels. Raises WrongKeyError."""
    for label, value in labels.items():
        if not _LABEL.fullmatch(label) or not _LABEL_VALUE.fullmatch(value):
            raise WrongKeyError((*at, label), "expected a Kubernetes label: at most 63 of A-Za-z0-9._-")


def check_label_value(text: str, at: Path) -> None:
    """Check the value of a Kubernetes label, which must not be empty. Raises WrongKeyError."""
    if not text or not _LABEL_VALUE.fullmatch(text):
        raise WrongKeyError(at, "expected 1 to 63 characters of A-Za-z0-9._- that begin and end with a letter or digit")


def check_resources(resources: Resources, at: Path) -> None:
    """Check quantities by resource name; GPUs are counted in spec.gpu. Raises WrongKeyError."""
    for where, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            if name == GPU:
                raise WrongKeyError((*at, where, name), "is set by Pilotlight: use spec.gpu.count")
            if not _LABEL.fullmatch(name) or not _QUANTITY.fullmatch(str(amount)):
                raise WrongKeyError((*at, where, name), "expected a quantity such as 500m or 16Gi")


def check_source(source: EnvSource, at: Path) -> None:
    """Check that a variable has exactly one source. Raises WrongKeyError."""
    of = source.value_from
    sources = [one for one in (of.secret_key_ref, of.config_map_key_ref, of.field_ref) if one is not None]
    if len(sources) != 1:
        raise WrongKeyError((*at, "valueFrom"), "expected one of secretKeyRef, configMapKeyRef and fieldRef")


def check_object_name(name: str, at: Path) -> None:
    """Check the name of a Kubernetes object. Raises WrongKeyError."""
    if not _NAME.fullmatch(name):
        raise WrongKeyError(at, "expected a Kubernetes object name: lower-case letters, digits, - and .")


def _check_notes(notes: Iterable[str], at: Path) -> None:
    for name in notes:
        if name.startswith(OURS) or name in RESERVED:
            raise WrongKeyError((*at, name), THE_PLAN)


def _check_named(items: tuple[Mapping[str, object], ...], at: Path) -> None:
    for position, item in enumerate(items):
        if not isinstance(item.get("name"), str) or not item["name"]:
            raise WrongKeyError((*at, position, "name"), "missing; expected text")

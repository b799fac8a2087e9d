"""What a Model says of its pods beyond what serves it: `pod`, `resources`, `env.*.valueFrom` (interfaces, section 2).

Owns the types and their rules. Only what is named here may be laid over a pod of ours; what the plan owns (its name,
our labels and annotations, node affinity, its command, its devices, when it ends) is refused by path where the document
is read, in one line. Names are Kubernetes' own, and so is the form of what stands in `affinity`, `volumes`,
`volumeMounts` and `securityContext`, which the API server checks. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from autoscaler.spec.decode import Part, Path, WrongKeyError

GPU = "nvidia.com/gpu"
OURS = "pilotlight.dev/"
"""What begins so is Pilotlight's."""
API_VERSION = OURS + "v1alpha1"
"""Of its documents and custom resources."""
MANAGED_BY = "app.kubernetes.io/managed-by"
DO_NOT_DISRUPT, SAFE_TO_EVICT = "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""Annotations of pods, by which who removes nodes (Karpenter; Cluster Autoscaler) waits for them."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""A label: the LocalQueue of Kueue that lets a pod be scheduled, and may have it deleted for another's sake."""
PLACE = OURS + "place"
"""A label of pods of ours that are no Replica's: the name of the Lease whose place each keeps until one's takes it."""

_QUANTITY = re.compile(r"[0-9]{1,19}(\.[0-9]{1,9})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
THE_PLAN = "is set by Pilotlight: leave it out"
THE_PLANS_NODE = (
    "is set by Pilotlight, which chooses the node: select devices with spec.gpu.models or nodes with nodeSelector"
)
VOLUMES_BEGIN = "pilotlight-"
"""Names of volumes that Pilotlight adds to pods."""
SELECTS = frozenset({"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"})
"""Labels by which Services, NetworkPolicies and the autoscaler select Pilotlight's own pods."""
OWN_SELECTORS = "selects Pilotlight's own pods: use another label"
VOLUME_RESERVED = f"names that begin with {VOLUMES_BEGIN} are reserved: rename it"
VOLUME_WANTED = "expected the name of one of the volumes here"
SOURCE_WANTED = "expected the source of a volume, such as emptyDir: {}"


class KeyRef(Part, frozen=True):
    """One key of a Secret or ConfigMap in the pod's namespace."""

    name: str
    key: str
    optional: bool = False


class FieldRef(Part, frozen=True):
    """A field of the pod itself, such as `metadata.name`."""

    field_path: str


class ValueFrom(Part, frozen=True):
    """Where a variable's value comes from: one of these."""

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


class EnvSource(Part, frozen=True):
    """A variable that the kubelet fills in; only pods can have one."""

    value_from: ValueFrom


class Resources(Part, frozen=True):
    """Requests and limits by name (`cpu`, `memory`, `rdma/hca`). No CPU limit is set unless one stands here."""

    requests: dict[str, str | int] = {}
    limits: dict[str, str | int] = {}


class Toleration(Part, frozen=True):
    """A taint that is no reason to stay away."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class SecretName(Part, frozen=True):
    """A Secret in the pod's namespace."""

    name: str


class Pod(Part, frozen=True):
    """What is laid over the pods that Pilotlight makes."""

    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: dict[str, object] = {}
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    volumes: tuple[dict[str, object], ...] = ()
    volume_mounts: tuple[dict[str, object], ...] = ()
    image_pull_secrets: tuple[SecretName, ...] = ()
    service_account_name: str | None = None
    runtime_class_name: str | None = None
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    resources: Resources = Resources()
    security_context: dict[str, object] = {}
    """Of the pod. Absent: what pod security `restricted` asks for."""


def selector_of(defaults: Pod | None, own: Pod) -> dict[str, str]:
    """Labels that its node must have: what the Settings say, and a Model's own over that."""
    return own.node_selector if defaults is None else {**defaults.node_selector, **own.node_selector}


def check_pod(pod: Pod, at: Path) -> None:
    """What may be laid over a pod. Raises WrongKeyError with the path below `at`."""
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
    """Labels of objects of Kubernetes."""
    for label, value in labels.items():
        if not _LABEL.fullmatch(label) or not _LABEL_VALUE.fullmatch(value):
            raise WrongKeyError((*at, label), "expected a label of Kubernetes: at most 63 of A-Za-z0-9._-")


def check_label_value(text: str, at: Path) -> None:
    """What a label of Kubernetes may say; not nothing."""
    if not text or not _LABEL_VALUE.fullmatch(text):
        raise WrongKeyError(at, "expected 1 to 63 of A-Za-z0-9._- that begin and end with a letter or digit")


def check_resources(resources: Resources, at: Path) -> None:
    """Quantities by name; devices are counted in spec.gpu."""
    for where, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            if name == GPU:
                raise WrongKeyError((*at, where, name), "is set by Pilotlight: use spec.gpu.count")
            if not _LABEL.fullmatch(name) or not _QUANTITY.fullmatch(str(amount)):
                raise WrongKeyError((*at, where, name), "expected a quantity such as 500m or 16Gi")


def check_source(source: EnvSource, at: Path) -> None:
    """Where a variable comes from: exactly one place."""
    of = source.value_from
    told = [one for one in (of.secret_key_ref, of.config_map_key_ref, of.field_ref) if one is not None]
    if len(told) != 1:
        raise WrongKeyError((*at, "valueFrom"), "expected one of secretKeyRef, configMapKeyRef and fieldRef")


def check_object_name(name: str, at: Path) -> None:
    """The name of an object of Kubernetes."""
    if not _NAME.fullmatch(name):
        raise WrongKeyError(at, "expected the name of an object: lower-case letters, digits, - and .")


def _check_notes(notes: Iterable[str], at: Path) -> None:
    for name in notes:
        if name.startswith(OURS) or name == MANAGED_BY:
            raise WrongKeyError((*at, name), THE_PLAN)


def _check_named(items: tuple[Mapping[str, object], ...], at: Path) -> None:
    for position, item in enumerate(items):
        if not isinstance(item.get("name"), str) or not item["name"]:
            raise WrongKeyError((*at, position, "name"), "missing; expected text")

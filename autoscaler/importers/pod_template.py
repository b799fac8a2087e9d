"""Parts of a Kubernetes pod template that several imports convert: devices, environment, volumes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta

from autoscaler.documents.document_rules import CHOICES_BEGIN, CHOICES_END, SET_BY_DRIVER
from autoscaler.importers.decode import read_mapping
from autoscaler.importers.result import Document, Sketch
from autoscaler.spec.decode import Part, Path, WrongKeyError
from autoscaler.spec.pod import GPU
from autoscaler.spec.quantity import whole_number

REPLICAS_MAX = 1000
"""Value for no limit of replicas: Pilotlight's maximum."""
Count = Annotated[int, Meta(ge=0)]
Objects = tuple[dict[str, object], ...]
TOOLS = ("kubectl.kubernetes.io/", "meta.helm.sh/", "helm.sh/", "app.kubernetes.io/", "argocd.argoproj.io/")
"""Labels and annotations of the tools that created an object, which do not apply to the converted one."""


class Container(Part, frozen=True):
    """A container of a pod template."""

    name: str = ""
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Objects = ()
    ports: Objects = ()
    resources: dict[str, object] = {}
    volume_mounts: Objects = ()
    readiness_probe: dict[str, object] = {}


class PodSpec(Part, frozen=True):
    """The spec of a pod template."""

    containers: tuple[dict[str, object], ...]
    service_account_name: str = ""
    image_pull_secrets: Objects = ()
    node_selector: dict[str, object] = {}
    tolerations: Objects = ()
    volumes: Objects = ()
    runtime_class_name: str = ""
    priority_class_name: str = ""
    scheduler_name: str = ""


def read_name(value: object) -> tuple[str, str, Document]:
    """Return the name, the namespace and the metadata of an object. Raises WrongKeyError."""
    metadata = read_mapping(read_mapping(value, ()).get("metadata"), ("metadata",))
    name = metadata.get("name")
    if not isinstance(name, str):
        raise WrongKeyError(("metadata", "name"), "missing; expected text")
    return name, str(metadata.get("namespace") or ""), metadata


def write_resources(value: object, at: Path, sketch: Sketch) -> None:
    """Convert the resources of a container: GPUs to `gpu.count`, others to `resources`."""
    given = read_mapping(value, at)
    count, resources = 0, dict[str, Document]()
    for kind in ("requests", "limits"):
        for name, amount in read_mapping(given.get(kind), (*at, kind)).items():
            if name == GPU:
                number = whole_number(str(amount))
                if number is None:
                    raise WrongKeyError((*at, kind, name), "expected a whole number")
                count = max(count, number)
            elif "/" in name:
                if kind == "limits":
                    sketch.tell(f"resources.{name}", "Pilotlight chooses the device: set spec.gpu.count and memory")
            elif isinstance(amount, str | int):
                resources.setdefault(kind, {})[name] = amount
            else:
                raise WrongKeyError((*at, kind, name), "expected a quantity such as 500m or 16Gi")
    sketch.spec["gpu"] = {"count": count}
    if resources:
        sketch.spec["resources"] = resources


def convert_environment(variables: Iterable[Document], sketch: Sketch) -> Document:
    """Return the environment of a container, without variables that Pilotlight sets."""
    out: Document = {}
    for variable in variables:
        name, source = str(variable.get("name", "")), variable.get("valueFrom")
        keys = source.keys() if isinstance(source, dict) else set[str]()
        if name in SET_BY_DRIVER or name.endswith(CHOICES_END) or name.startswith(CHOICES_BEGIN):
            sketch.tell(f"env {name}", "Pilotlight chooses the devices")
        elif keys and not keys <= {"secretKeyRef", "configMapKeyRef", "fieldRef"}:
            sketch.tell(f"env {name}", "expected a value, or a reference to a Secret, a ConfigMap or a field")
        else:
            out[name] = {"valueFrom": source} if keys else str(variable.get("value") or "")
    return out


def keep_own(entries: Mapping[str, object], foreign: tuple[str, ...] = ()) -> dict[str, str]:
    """Return labels or annotations without those of tools and with these prefixes."""
    return {key: str(value) for key, value in entries.items() if not key.startswith((*TOOLS, *foreign))}


def write_pod(pod: PodSpec, sketch: Sketch) -> None:
    """Convert the fields of the pod, without its containers."""
    fields: Document = {
        "nodeSelector": pod.node_selector,
        "tolerations": list(pod.tolerations),
        "volumes": list(pod.volumes),
        "imagePullSecrets": list(pod.image_pull_secrets),
        "serviceAccountName": pod.service_account_name,
        "runtimeClassName": pod.runtime_class_name,
        "priorityClassName": pod.priority_class_name,
        "schedulerName": pod.scheduler_name,
    }
    sketch.pod |= {key: value for key, value in fields.items() if value}

"""Converts Lingo's Deployments and StatefulSets. Pure.

Adoption reads Lingo's annotations directly, so a conversion is optional. The result contains the equivalent annotations
of Pilotlight, as a merge patch for the existing object. It includes Lingo's global settings (CONCURRENCY,
SCALE_DOWN_DELAY), which Pilotlight has per workload, and the port of the Service with the workload's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autoscaler.documents.document_types import DocumentError
from autoscaler.importers.decode import DocumentErrorContext, expand_object_lists, parse_yaml_documents, read_mapping
from autoscaler.importers.result import ConversionNote, ConversionResult, Document
from autoscaler.spec.pod import OURS

THEIRS = "lingo.substratus.ai/"
KINDS = ("Deployment", "StatefulSet")
MODELS, MIN, MAX = "models", "min-replicas", "max-replicas"
MAX_DEFAULT = "3"
ENVIRONMENT = {"CONCURRENCY": "100", "SCALE_DOWN_DELAY": "30"}
"""Lingo's global settings and their defaults."""
NOTHING_TO_DO = "adoption reads its annotations as they are: nothing needs to change"
PATCH = (
    "the equivalent Pilotlight annotations: "
    "`kubectl patch -f FILE --type merge --patch-file FILE` adds them and changes nothing else"
)
"""Not `kubectl apply`, since the owner's next `kubectl apply` would remove the annotations."""


class Thing(NamedTuple):
    """The parts of an object that are read."""

    kind: str
    name: str
    namespace: str
    notes: Document
    """Annotations."""
    containers: list[Document]
    """Containers of a workload."""
    ports: list[Document]
    """Ports of a Service."""


def convert_workloads(sources: Sequence[tuple[str, str]]) -> list[ConversionResult]:
    """Convert (file, text) pairs to the annotations of every workload that Lingo serves. Raises DocumentError."""
    things: list[Thing] = []
    for source, text in sources:
        for number, value in enumerate(expand_object_lists(parse_yaml_documents(source, text)), 1):
            with DocumentErrorContext(source, value, number):
                things.append(_thing(read_mapping(value, ())))
    settings = dict(ENVIRONMENT)
    for thing in things:
        if any("lingo" in str(container.get("image", "")) for container in thing.containers):
            settings |= {name: value for name, value in _environment(thing) if name in settings}
    services = {(thing.name, thing.namespace): thing for thing in things if thing.kind == "Service"}
    served = [thing for thing in things if thing.kind in KINDS and f"{THEIRS}{MODELS}" in thing.notes]
    if not served:
        where = ", ".join(source for source, _ in sources)
        wanted = f"a Deployment or StatefulSet with the annotation {THEIRS}{MODELS}"
        raise DocumentError(f"{where}: metadata.annotations: expected {wanted}")
    return [_taken(thing, settings, services.get((thing.name, thing.namespace))) for thing in served]


def _thing(value: Document) -> Thing:
    """Read an object. Raises WrongKeyError."""
    metadata = read_mapping(value.get("metadata"), ("metadata",))
    spec = read_mapping(value.get("spec"), ("spec",))
    template = read_mapping(spec.get("template"), ("spec", "template"))
    pod = read_mapping(template.get("spec"), ("spec", "template", "spec"))
    return Thing(
        str(value.get("kind", "")),
        str(metadata.get("name", "")),
        str(metadata.get("namespace") or ""),
        read_mapping(metadata.get("annotations"), ("metadata", "annotations")),
        _list(pod.get("containers")),
        _list(spec.get("ports")),
    )


def _taken(thing: Thing, settings: dict[str, str], service: Thing | None) -> ConversionResult:
    said = {
        "models": thing.notes[f"{THEIRS}{MODELS}"],
        "replicas-min": thing.notes.get(f"{THEIRS}{MIN}", "0"),
        "replicas-max": thing.notes.get(f"{THEIRS}{MAX}", MAX_DEFAULT),
        "slots": settings["CONCURRENCY"],
        "idle-seconds": settings["SCALE_DOWN_DELAY"],
    }
    notes = []
    port = _port(thing, service)
    if port:
        said["port"] = port
    else:
        notes.append(
            ConversionNote("port", f"no port was found: also pass the Service {thing.name}, or add {OURS}port")
        )
    metadata: Document = {"name": thing.name}
    if thing.namespace:
        metadata["namespace"] = thing.namespace
    metadata["annotations"] = {f"{OURS}{name}": str(value) for name, value in said.items()}
    document: Document = {"apiVersion": "apps/v1", "kind": thing.kind, "metadata": metadata}
    what = f"{thing.kind} {thing.name}"
    return ConversionResult(what, document, tuple(notes), about=(f"{what}: {NOTHING_TO_DO}", PATCH))


def _port(thing: Thing, service: Thing | None) -> str:
    """Port of the pods: the Service's only port or the one named http; without a Service, the container's."""
    ports = [port for container in thing.containers for port in _list(container.get("ports"))]
    if service is None:
        chosen = _chosen(ports)
        return str(chosen.get("containerPort", "")) if chosen else ""
    named = {str(port.get("name")): str(port.get("containerPort")) for port in ports}
    chosen = _chosen(service.ports)
    target = str(chosen.get("targetPort", chosen.get("port", ""))) if chosen else ""
    return target if target.isdecimal() else named.get(target, "")


def _chosen(ports: list[Document]) -> Document | None:
    http = [port for port in ports if port.get("name") == "http"]
    return next(iter(http if len(ports) > 1 else ports), None)


def _environment(thing: Thing) -> Iterator[tuple[str, str]]:
    for container in thing.containers:
        for variable in _list(container.get("env")):
            if "value" in variable:
                yield str(variable.get("name")), str(variable["value"])


def _list(value: object) -> list[Document]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []

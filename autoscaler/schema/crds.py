"""Generates the CustomResourceDefinitions of Model and Tenant from the document types. Pure.

Adds to the schema names, printer columns and selectable fields. `.venv/bin/python -m docs.schemas` writes the output; a
test keeps the files in charts/pilotlight/crds equal to it. A key that is not supported yet is in the schema and
rejected with the same message as in files: if it were left out, the server would drop it silently for every client
without strict validation. Only the autoscaler writes a status (interfaces, section 2), so its schema has few bounds and
no rules.
"""

from __future__ import annotations

from typing import cast

import msgspec
import yaml
from msgspec import inspect

from autoscaler.documents.document_rules import KEYS, MESSAGE
from autoscaler.documents.document_types import ModelDocument, TenantDocument
from autoscaler.schema.cel_rules import forbid_key
from autoscaler.schema.structural import OBJECT, TEXT, Docs, Schema, Structural
from autoscaler.spec.decode import Part
from autoscaler.state.lifecycle import ReplicaState

_COUNT: Schema = {"type": "integer", "format": "int32", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TIME: Schema = {"type": "string", "format": "date-time"}


def to_camel_case(state: str) -> str:
    """Convert a state such as `falling-asleep` to a key."""
    first, *rest = state.split("-")
    return first + "".join(word.capitalize() for word in rest)


def _object(properties: dict[str, Schema], description: str, **more: object) -> Schema:
    return {"type": "object", "description": description, "properties": properties, **more}


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


_CONDITIONS: Schema = {
    "type": "array",
    "description": "The current conditions, one of each type.",
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
    "items": _object(
        {
            "type": _described({**TEXT, "maxLength": 316}, "The type, such as `Ready`."),
            "status": _described({**TEXT, "enum": ["True", "False", "Unknown"]}, "Whether the condition holds."),
            "reason": _described({**TEXT, "maxLength": 1024}, "The reason of the status in one word, for programs."),
            "message": _described({**TEXT, "maxLength": 32_768}, "The details of the status, for people."),
            "lastTransitionTime": _described(_TIME, "When the status last changed."),
            "observedGeneration": _described(
                {"type": "integer", "format": "int64", "minimum": 0},
                "The generation of the spec that the condition describes.",
            ),
        },
        "A condition in the form of metav1.Condition.",
        required=["type", "status", "reason", "message", "lastTransitionTime"],
    ),
}
_OBSERVED: Schema = {
    "type": "integer",
    "format": "int64",
    "description": "The generation of the spec that this status describes.",
}
_LEARNED = _object(
    {
        "startSeconds": _described(
            {"type": "array", "items": _NUMBER, "maxItems": 256}, "The durations of the last starts, in seconds."
        ),
        "tries": _described(_COUNT, "The number of failed attempts of the current start."),
        "episodes": _described(_COUNT, "The number of starts that failed in a row, with all their attempts."),
        "retryAt": _described(_TIME, "When the next attempt of the current start may begin."),
        "refusedUntil": _described(_TIME, "When the back-off after a failed start ends. Until then, requests fail."),
        "failure": _described(TEXT, "The reason of the last failure."),
        "lastActivity": _described(_TIME, "When a request last arrived or ended."),
    },
    "Measurements and back-offs that are kept over a restart of the autoscaler.",
)
MODEL_STATUS = _object(
    {
        "observedGeneration": _OBSERVED,
        "replicas": _object(
            {
                to_camel_case(state): _described(_COUNT, f"The number of replicas in state `{state}`.")
                for state in ReplicaState
                if state is not ReplicaState.GONE
            },
            "The number of replicas in each state.",
        ),
        "demand": _object(
            {
                "waiting": _described(_COUNT, "The number of queued requests."),
                "running": _described(_COUNT, "The number of requests on replicas."),
            },
            "The numbers of requests in the last reports of the gateways.",
        ),
        "conditions": _CONDITIONS,
        "lastStart": _object(
            {
                "seconds": _described(_NUMBER, "The time from the order to readiness, in seconds."),
                "phases": _described(
                    {"type": "object", "additionalProperties": _NUMBER}, "The duration of each phase, in seconds."
                ),
                "reason": _described(TEXT, "Why the replica was started."),
            },
            "The last successful start of a replica: its duration, the duration of its phases, and its reason.",
        ),
        "learned": _LEARNED,
    },
    "The status of the Model. Only the autoscaler writes it.",
)
TENANT_STATUS = _object(
    {"observedGeneration": _OBSERVED, "conditions": _CONDITIONS},
    "The status of the Tenant. Only the autoscaler writes it.",
)


GROUP, VERSION = "pilotlight.dev", "v1alpha1"
HEAD = "# Generated by `.venv/bin/python -m docs.schemas` from the types of the documents.\n"

_TEXTS: Schema = {"type": "array", "items": TEXT}
LATER: dict[str, Schema] = {
    "spec.fallbacks": _TEXTS,
    "spec.url": TEXT,
    "spec.upstreamModel": TEXT,
    "spec.sleep": TEXT,
    "spec.owner": TEXT,
    "spec.parent": TEXT,
    "spec.namespaces": _TEXTS,
    "spec.reclaimSeconds": {"type": "number"},
}
"""Keys that are not supported yet and are not objects: their future schemas."""


class CrdKind(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a definition that are specific to one kind."""

    document: type[Part]
    name: str
    plural: str
    short: str
    scope: str
    columns: tuple[tuple[str, str, str, int], ...]
    """(heading, type, path, priority); a priority above 0: shown only with `-o wide`."""
    selectable: tuple[str, ...] = ()
    """Paths that a field selector may use."""
    status: Schema


_READY = '.status.conditions[?(@.type=="Ready")]'
_AGE = ("Age", "date", ".metadata.creationTimestamp", 0)
MODEL = CrdKind(
    document=ModelDocument,
    name="Model",
    plural="models",
    short="plm",
    scope="Namespaced",
    columns=(
        ("Ready", "integer", ".status.replicas.ready", 0),
        ("Waiting", "integer", ".status.demand.waiting", 0),
        ("Running", "integer", ".status.demand.running", 0),
        ("State", "string", f"{_READY}.reason", 0),
        _AGE,
        ("Engine", "string", ".spec.engine", 1),
        ("Message", "string", f"{_READY}.message", 1),
    ),
    selectable=(".spec.engine", ".spec.paused"),
    status=MODEL_STATUS,
)
TENANT = CrdKind(
    document=TenantDocument,
    name="Tenant",
    plural="tenants",
    short="plt",
    scope="Cluster",
    columns=(
        ("Weight", "number", ".spec.weight", 0),
        ("State", "string", f"{_READY}.reason", 0),
        _AGE,
        ("Message", "string", f"{_READY}.message", 1),
    ),
    status=TENANT_STATUS,
)


def render_crds(docs: Docs) -> dict[str, str]:
    """File name -> YAML text. `docs` returns the attribute docstrings of a type."""
    return {f"{kind.plural}.yaml": HEAD + _yaml(build_crd(kind, docs)) for kind in (MODEL, TENANT)}


def build_crd(kind: CrdKind, docs: Docs) -> Schema:
    """Build one CustomResourceDefinition."""
    version: Schema = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _document(kind, docs)},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": type, "jsonPath": path} | ({"priority": priority} if priority else {})
            for name, type, path, priority in kind.columns
        ],
    }
    if kind.selectable:
        version["selectableFields"] = [{"jsonPath": path} for path in kind.selectable]
    names = {
        "kind": kind.name,
        "listKind": f"{kind.name}List",
        "plural": kind.plural,
        "singular": kind.name.lower(),
        "shortNames": [kind.short],
        "categories": ["pilotlight"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": kind.scope, "names": names, "versions": [version]},
    }


def _document(kind: CrdKind, docs: Docs) -> Schema:
    """The schema of the whole object. Kubernetes validates metadata itself."""
    info = inspect.type_info(kind.document)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{kind.document} is not a Struct")
    schema = Structural(docs).part(info)
    properties = _properties(schema)
    properties |= {"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}}
    properties["status"] = kind.status
    schema.pop("required")
    if "default" not in properties["spec"]:
        schema["required"] = ["spec"]
    for key in KEYS[kind.name]:
        _refuse(schema, key)
    return schema


def _refuse(schema: Schema, key: str) -> None:
    """Add a key that is not supported yet to the schema, with the rule that rejects it."""
    *above, last = key.split(".")
    for part in above:
        schema = _properties(schema)[part]
    _properties(schema)[last] = {"description": f"It {MESSAGE}.", **LATER.get(key, OBJECT)}
    rules = cast("list[object]", schema.setdefault("x-kubernetes-validations", []))
    rules.append(forbid_key(last).written())


def _properties(schema: Schema) -> dict[str, Schema]:
    return cast("dict[str, Schema]", schema["properties"])  # schemas of our objects always have properties


class _Plain(yaml.SafeDumper):
    """Dumper without anchors and aliases: equal values are written out each time."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _yaml(value: Schema) -> str:
    return yaml.dump(value, Dumper=_Plain, sort_keys=False, width=120)

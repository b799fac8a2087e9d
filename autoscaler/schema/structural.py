"""Translates document types to structural schemas, as Kubernetes requires in a CustomResourceDefinition. Pure.

The schemas have no references: each value has one type, and a number or string is `int-or-string`. No field of a spec
accepts values of unbounded depth: fields with Kubernetes types (`affinity`, `volumes`) use `pod_types`. Lists, maps and
strings are bounded, since the API server estimates the cost of each rule before it accepts the definition.
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

import msgspec
from msgspec import inspect

from autoscaler.documents.document_rules import ADAPTERS_MAX, ARTIFACT_CHARS_MAX, NAME_CHARS_MAX
from autoscaler.documents.render import to_plain_value
from autoscaler.schema.cel_rules import RULES, Rule
from autoscaler.schema.json_schema import SIZE
from autoscaler.schema.pod_types import TYPES
from autoscaler.spec.policy import MEMBERS_MAX, VALUE_DEPTH_MAX
from autoscaler.spec.quantity import AUTO, BytesOrAuto

Schema = dict[str, object]
Docs = Callable[[type], Mapping[str, str]]
"""A type -> its attribute docstrings, by Python field name."""

ITEMS_MAX, ENTRIES_MAX, TEXT_CHARS_MAX = 256, 1024, 16_384
"""Maximum size of a list, a map and a string in a cluster. Files have no such bounds."""
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
INT_OR_STRING: Schema = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
QUANTITY: Schema = {**INT_OR_STRING, "pattern": SIZE["pattern"]}
QUANTITY_OR_AUTO: Schema = {**INT_OR_STRING, "pattern": f"^{AUTO}$|{SIZE['pattern']}"}

_BY_NAME: Schema = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
EXTRA: Mapping[tuple[str, str], Schema] = {
    ("ModelSpec", "aliases"): {"maxItems": ADAPTERS_MAX, "x-kubernetes-list-type": "set"},
    ("ModelSpec", "adapters"): {"maxItems": ADAPTERS_MAX, **_BY_NAME},
    ("TenantSpec", "keys"): {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["sha256"]},
    ("ModelSpec", "artifact"): {"maxLength": ARTIFACT_CHARS_MAX},
    ("Adapter", "artifact"): {"maxLength": ARTIFACT_CHARS_MAX},
    ("Adapter", "name"): {"maxLength": 63},
    ("Key", "createdAt"): {"format": "date-time"},
    ("Key", "expiresAt"): {"format": "date-time"},
}
"""(type, key) -> additional schema properties."""

KUBERNETES: Mapping[tuple[str, str], str] = {
    ("Pod", "affinity"): "Affinity",
    ("Pod", "volumes"): "Volume[]",
    ("Pod", "volumeMounts"): "VolumeMount[]",
    ("Pod", "securityContext"): "PodSecurityContext",
}
"""(type, key) -> its Kubernetes type."""
_NAME_OF_LABEL: Schema = {"type": "string", "maxLength": 63}
_KUBERNETES_EXTRA: Mapping[tuple[str, str], Schema] = {
    ("Volume", "name"): _NAME_OF_LABEL,
    ("VolumeMount", "name"): _NAME_OF_LABEL,
    ("Affinity", "nodeAffinity"): OBJECT,
}
"""Deviations from Kubernetes types: bounds for rules, and a key that a rule rejects."""
_SIMPLE: Mapping[str, Schema] = {
    "string": {"type": "string", "maxLength": TEXT_CHARS_MAX},
    "bool": {"type": "boolean"},
    "int32": {"type": "integer", "format": "int32"},
    "int64": {"type": "integer", "format": "int64"},
    "Quantity": INT_OR_STRING,
}

_SNAKE = re.compile(r"\b([a-z]+)((?:_[a-z]+)+)\b")


class Structural:
    """Builds schemas; `docs` returns the attribute docstrings of a type."""

    def __init__(self, docs: Docs) -> None:
        self._docs = docs

    def part(self, info: inspect.StructType) -> Schema:
        """The schema of an object whose keys are all known."""
        docs, kind = self._docs(info.cls), info.cls.__name__
        properties = {f.encode_name: self._field(kind, f, docs.get(f.name, "")) for f in info.fields}
        said = (info.cls.__doc__ or "").split("\n\n")[0]
        schema: Schema = {"type": "object", "description": _description(said), "properties": properties}
        if required := [field.encode_name for field in info.fields if field.required]:
            schema["required"] = required
        return schema | _rules(RULES.get((kind, ""), ()))

    def _field(self, kind: str, field: inspect.Field, doc: str) -> Schema:
        of_kubernetes = KUBERNETES.get((kind, field.encode_name))
        schema = self._schema(field.type) if of_kubernetes is None else _kubernetes(of_kubernetes)
        if doc:
            schema = {"description": _description(doc)} | {
                key: value for key, value in schema.items() if key != "description"
            }
        if field.default not in (msgspec.NODEFAULT, None):
            schema["default"] = _plain(to_plain_value(field.default))
        if (kind, field.encode_name) == ("ModelSpec", "aliases"):
            schema["items"] = {"type": "string", "maxLength": NAME_CHARS_MAX, **_rules(RULES["ModelSpec", "aliases[]"])}
        if (kind, field.encode_name) == ("ModelSpec", "tenants"):
            schema["items"] = {"type": "string", "maxLength": NAME_CHARS_MAX}
        return schema | EXTRA.get((kind, field.encode_name), {}) | _rules(RULES.get((kind, field.encode_name), ()))

    def _schema(self, info: inspect.Type) -> Schema:
        """The schema of one type. Raises NotImplementedError for a type that no document uses yet."""
        match info:
            case inspect.Metadata():
                return self._schema(info.type)
            case inspect.StructType():
                return self.part(info)
            case inspect.CustomType() if info.cls is object:
                return _json_value(VALUE_DEPTH_MAX)
            case inspect.CustomType():
                return dict(QUANTITY_OR_AUTO if info.cls is BytesOrAuto else QUANTITY)
            case inspect.UnionType():
                return self._union([one for one in info.types if not isinstance(one, inspect.NoneType)])
            case inspect.VarTupleType():
                return {"type": "array", "maxItems": ITEMS_MAX, "items": self._schema(info.item_type)}
            case inspect.DictType():
                return _map(self._schema(info.value_type))
            case inspect.LiteralType():
                return {"type": "string", "enum": list(info.values)}
            case inspect.IntType():
                return {"type": "integer", "format": "int64", **_bounds(info)}
            case inspect.FloatType():
                return {"type": "number", **_bounds(info)}
            case inspect.StrType():
                return {"type": "string", "maxLength": TEXT_CHARS_MAX} | (
                    {"pattern": info.pattern} if info.pattern else {}
                )
            case inspect.BoolType():
                return {"type": "boolean"}
            case _:
                raise NotImplementedError(f"no schema for {info}")

    def _union(self, types: list[inspect.Type]) -> Schema:
        """The schema of a union: integers or words are `int-or-string`; `autoscaler.documents.parse` checks the
        rest.
        """
        if len(types) == 1:
            return self._schema(types[0])
        parts = [self.part(one) for one in types if isinstance(one, inspect.StructType)]
        if parts:
            return _text_or(parts[0])
        bounds: Schema = {}
        for one in types:
            match one:
                case inspect.LiteralType():
                    bounds["pattern"] = f"^({'|'.join(map(str, one.values))})$"
                case inspect.IntType() | inspect.FloatType():
                    bounds |= _bounds(one)
                case inspect.StrType():
                    bounds["maxLength"] = TEXT_CHARS_MAX
                case _:
                    raise NotImplementedError(f"no schema for {one} as a member of a union type")
        return {**INT_OR_STRING, **bounds}


def _text_or(part: Schema) -> Schema:
    """The schema of a string or an object. It cannot state a `type` and would accept anything, so bounds limit the
    depth of the value.

    Numbers and booleans are still accepted; Pilotlight itself rejects them.
    """
    properties = cast("dict[str, Schema]", part["properties"])
    bounds: Schema = {"maxLength": TEXT_CHARS_MAX, "maxItems": 0, "maxProperties": len(properties)}
    required: Schema = {"required": list(properties), "properties": properties}  # leaves no room for other keys
    return {"x-kubernetes-preserve-unknown-fields": True, **bounds, **required}


def _json_value(depth: int) -> Schema:
    """The schema of any JSON value with at most `depth` nested lists and maps. It cannot state a `type`."""
    bounds: Schema = {"nullable": True, "maxLength": TEXT_CHARS_MAX, "maxItems": 0, "maxProperties": 0}
    if depth:
        nested = _json_value(depth - 1)
        bounds |= {
            "maxItems": MEMBERS_MAX,
            "maxProperties": MEMBERS_MAX,
            "items": nested,
            "additionalProperties": nested,
        }
    return {"x-kubernetes-preserve-unknown-fields": True, **bounds}


def _kubernetes(name: str) -> Schema:
    """The schema of a type in `pod_types`."""
    if name.endswith("[]"):
        return {"type": "array", "maxItems": ITEMS_MAX, "items": _kubernetes(name.removesuffix("[]"))}
    if name.endswith("{}"):
        return _map(_kubernetes(name.removesuffix("{}")))
    if name in _SIMPLE:
        return dict(_SIMPLE[name])
    properties = {field.removesuffix("!"): _kubernetes(of) for field, of in TYPES[name].items()}
    for (of, field), schema in _KUBERNETES_EXTRA.items():
        if of == name:
            properties[field] = schema | _rules(RULES.get((name, field), ()))
    made: Schema = {"type": "object", "properties": properties}
    if required := [field.removesuffix("!") for field in TYPES[name] if field.endswith("!")]:
        made["required"] = required
    return made | _rules(RULES.get((name, ""), ()))


def _description(doc: str) -> str:
    """Translate a docstring to the terms of documents: keys are camelCase, and None means absent."""
    keys = _SNAKE.sub(lambda found: found[1] + found[2].title().replace("_", ""), " ".join(doc.split()))
    return keys.replace("None:", "Absent:")


def _map(values: Schema) -> Schema:
    return {"type": "object", "maxProperties": ENTRIES_MAX, "additionalProperties": values}


def _bounds(info: inspect.IntType | inspect.FloatType) -> Schema:
    """The bounds in OpenAPI form: an exclusive bound is a bound and a flag."""
    bounds: Schema = {}
    for name, exclusive, at, beyond in (("minimum", "exclusiveMinimum", info.ge, info.gt),
                                        ("maximum", "exclusiveMaximum", info.le, info.lt)):  # fmt: skip
        if at is not None or beyond is not None:
            bounds[name] = _plain(at if beyond is None else beyond)
        if beyond is not None:
            bounds[exclusive] = True
    return bounds


def _plain(value: object) -> object:
    """Convert an integral float to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rules(rules: tuple[Rule, ...]) -> Schema:
    return {"x-kubernetes-validations": [rule.written() for rule in rules]} if rules else {}

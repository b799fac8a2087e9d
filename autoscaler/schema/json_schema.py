"""Generates JSON Schemas (draft 2020-12) of the documents from their types, for editors, the chart and the API.

`.venv/bin/python -m docs.schemas` writes the output; a test keeps the files in docs/schema equal to it. Rules
between keys (`replicas.min` <= `max`) are not in a schema; `autoscaler.documents.document_rules` has them. msgspec's
own generator cannot show the default of a size.
"""

from __future__ import annotations

import msgspec
from msgspec import inspect

from autoscaler.documents.document_types import ModelDocument, SettingsDocument, TenantDocument
from autoscaler.documents.render import to_plain_value
from autoscaler.spec.decode import Part
from autoscaler.spec.quantity import AUTO, BytesOrAuto

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SIZE: dict[str, object] = {
    "type": ["string", "integer"],
    "pattern": r"^[0-9]{1,19}(\.[0-9]{1,9})?(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$",
    "minimum": 0,
    "description": "A size as a Kubernetes quantity, such as 16Gi or 500M.",
}


def render_schemas() -> dict[str, str]:
    """File name -> JSON text, for each kind of document."""
    kinds: dict[str, type[Part]] = {"model": ModelDocument, "tenant": TenantDocument, "settings": SettingsDocument}
    return {f"{name}.json": _text(kind) for name, kind in kinds.items()}


def _text(kind: type[Part]) -> str:
    schema = {"$schema": DIALECT} | _schema(inspect.type_info(kind))
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def _schema(info: inspect.Type) -> dict[str, object]:
    """The schema of one type. Raises NotImplementedError for a type that no document uses yet."""
    match info:
        case inspect.Metadata():
            return _schema(info.type)
        case inspect.StructType():
            return _part(info)
        case inspect.CustomType() if info.cls is object:
            return {}  # Kubernetes validates it
        case inspect.CustomType():
            return {"anyOf": [{"enum": [AUTO]}, dict(SIZE)]} if info.cls is BytesOrAuto else dict(SIZE)
        case inspect.UnionType():
            return {"anyOf": [_schema(one) for one in info.types]}
        case inspect.VarTupleType():
            return {"type": "array", "items": _schema(info.item_type)}
        case inspect.DictType():
            return {"type": "object", "additionalProperties": _schema(info.value_type)}
        case inspect.LiteralType():
            return {"enum": list(info.values)}
        case inspect.IntType() | inspect.FloatType():
            return {"type": "integer" if isinstance(info, inspect.IntType) else "number", **_bounds(info)}
        case inspect.StrType():
            return {"type": "string", "pattern": info.pattern} if info.pattern else {"type": "string"}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.NoneType():
            return {"type": "null"}
        case _:
            raise NotImplementedError(f"no schema for {info}")


def _part(info: inspect.StructType) -> dict[str, object]:
    """The schema of an object whose keys are all known, described by the first paragraph of its docstring."""
    properties = {}
    for field in info.fields:
        properties[field.encode_name] = _schema(field.type)
        if field.default not in (msgspec.NODEFAULT, None):
            properties[field.encode_name]["default"] = to_plain_value(field.default)
    return {
        "type": "object",
        "description": " ".join((info.cls.__doc__ or "").partition("\n\n")[0].split()),
        "properties": properties,
        "required": [field.encode_name for field in info.fields if field.required],
        "additionalProperties": False,
    }


def _bounds(info: inspect.IntType | inspect.FloatType) -> dict[str, object]:
    bounds: dict[str, object] = {
        "minimum": info.ge,
        "exclusiveMinimum": info.gt,
        "maximum": info.le,
        "exclusiveMaximum": info.lt,
    }
    return {key: value for key, value in bounds.items() if value is not None}

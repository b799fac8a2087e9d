"""Documents as YAML, and values as plain data. Pure."""

from __future__ import annotations

import msgspec
import yaml

from autoscaler.documents.document_types import (
    Documents,
    identify_document,
)
from autoscaler.documents.variable_and_file_references import restore
from autoscaler.spec.decode import Part
from autoscaler.spec.model import Model
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.quantity import AUTO, Bytes, BytesOrAuto, format_bytes
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import TenantSpec


def to_yaml(documents: Documents, *, with_references: bool = False) -> str:
    """Render the documents as YAML without defaults. `parse_documents` returns equal Documents. Undecoded documents are
    rendered unchanged, so that their reader decodes them again. `with_references`: references are rendered as they were
    written, instead of their values, which may be secret, and all other texts so that they are no references.
    """
    out: list[dict[str, object]] = []
    for model in documents.models:
        if model.name in documents.undecoded:
            out.append(documents.undecoded[model.name].value)
            continue
        out.append(_model_document(model))
    for tenant in documents.tenants:
        head: dict[str, object] = {"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": str(tenant.name)}}
        out.append(head | ({"spec": _plain(tenant.spec)} if tenant.spec != TenantSpec() else {}))
    if documents.settings != Settings():
        out.append({"apiVersion": API_VERSION, "kind": "Settings"} | _plain(documents.settings))
    shown = [restore(one, documents.written.get(identify_document(one), {})) for one in out] if with_references else out
    return yaml.safe_dump_all(shown, sort_keys=False, width=120)


def _model_document(model: Model) -> dict[str, object]:
    metadata = {"name": str(model.name)}
    if model.namespace != "default":
        metadata["namespace"] = model.namespace
    return {"apiVersion": API_VERSION, "kind": "Model", "metadata": metadata, "spec": _plain(model.spec)}


def _plain(part: Part) -> dict[str, object]:
    """Convert a Part to plain values for YAML, without defaults."""
    return {
        field.encode_name: to_plain_value(getattr(part, field.name))
        for field in msgspec.structs.fields(part)
        if field.required or getattr(part, field.name) != _default(field)
    }


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def to_plain_value(value: object) -> object:
    """Convert a value of a document to plain values for YAML and JSON: sizes as quantities, Parts without defaults."""
    if isinstance(value, Part):
        return _plain(value)
    if isinstance(value, Bytes):
        return AUTO if isinstance(value, BytesOrAuto) and not value else format_bytes(value)
    if isinstance(value, tuple):
        return [to_plain_value(item) for item in value]
    return {key: to_plain_value(item) for key, item in value.items()} if isinstance(value, dict) else value

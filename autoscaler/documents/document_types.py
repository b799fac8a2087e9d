"""The documents of a configuration: Models, Tenants and Settings, with their metadata. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from autoscaler.contract import ModelName
from autoscaler.documents.variable_and_file_references import Written
from autoscaler.spec.decode import Part
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Tenant, TenantSpec

ApiVersion = Literal["pilotlight.dev/v1alpha1"]


class DocumentError(Exception):
    """A document is invalid. The message is one line: FILE: DOCUMENT: KEY PATH: what was expected."""


class Metadata(Part, frozen=True):
    """The metadata of a Tenant. Labels and annotations are for other programs; Pilotlight does not read them."""

    name: str
    """The name of the object."""
    labels: dict[str, str] = {}
    """Labels for other programs."""
    annotations: dict[str, str] = {}
    """Annotations for other programs."""


class ModelMetadata(Metadata, frozen=True):
    """The metadata of a Model, which belongs to a namespace."""

    namespace: str = "default"
    """The namespace of the Model."""


class ModelDocument(Part, frozen=True):
    """A Model document."""

    api_version: ApiVersion
    kind: Literal["Model"]
    metadata: ModelMetadata
    spec: ModelSpec


class TenantDocument(Part, frozen=True):
    """A Tenant document."""

    api_version: ApiVersion
    kind: Literal["Tenant"]
    metadata: Metadata
    spec: TenantSpec = TenantSpec()


class SettingsDocument(Settings, frozen=True, kw_only=True):
    """The Settings document, whose keys are at the top level."""

    api_version: ApiVersion
    kind: Literal["Settings"]


class UndecodedDocument(NamedTuple):
    """A Model document that raised an unexpected exception when it was decoded or rendered."""

    source: str
    value: dict[str, object]
    """The document as plain values."""
    reason: str
    """The exception, in one line."""


class Documents(msgspec.Struct, frozen=True, kw_only=True):
    """All documents of an installation. Models keep their order: of two Models, the first is older."""

    models: tuple[Model, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    settings: Settings = Settings()
    undecoded: Mapping[ModelName, UndecodedDocument] = {}
    """The documents of those `models` that are stand-ins (`autoscaler.documents.partial_decoding`)."""
    written: Mapping[tuple[str, str], Written] = {}
    """(kind, name) -> the document's texts with references, by key path."""
    values: Mapping[str, str] = {}
    """Values of references -> as they are written, for messages."""


def identify_document(document: object) -> tuple[str, str]:
    """Return the kind of a document and its name, which is empty for Settings."""
    value = document if isinstance(document, dict) else {}
    metadata = value.get("metadata")
    return str(value.get("kind")), str(metadata.get("name", "")) if isinstance(metadata, dict) else ""

"""Loads documents: YAML text of Models, Tenants and Settings to typed values. Pure.

Owns the form of a document (apiVersion, kind, metadata, spec; Settings have neither metadata nor spec), the rules
between documents of files, and the conversion back to YAML. The caller reads the files and passes their names and
texts. Every error names the file, the document, the key path and the expected value. The first error raises; nothing is
loaded partially. With `contain=True`, an unexpected exception replaces only its Model by a stand-in
(`partial_decoding`). `read_document` reads an object of a cluster by the same rules; `autoscaler.spec.document_names`
resolves conflicts of names there.

Environment variables override Settings (`environment_overrides`).

Values in documents can be references to variables and files (`variable_and_file_references`). They are replaced before
validation, and only if the caller passes a reader of files: documents that were written by `to_yaml` contain values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from autoscaler.contract import ModelName, TenantName
from autoscaler.documents.document_rules import (
    MESSAGE,
    check_model,
    check_name,
    check_own_names,
    check_served_name,
    check_settings,
    check_tenant,
    find_unsupported_key,
)
from autoscaler.documents.document_types import (
    DocumentError,
    Documents,
    ModelDocument,
    SettingsDocument,
    TenantDocument,
    UndecodedDocument,
    identify_document,
)
from autoscaler.documents.environment_overrides import RESERVED, override_settings
from autoscaler.documents.partial_decoding import read_known_keys
from autoscaler.documents.render import to_yaml
from autoscaler.documents.variable_and_file_references import References, Written, hide_values
from autoscaler.exception_handling import Failure, attempt, describe_error
from autoscaler.spec.decode import WrongKeyError, decode_value, format_path, suggest_nearest
from autoscaler.spec.engines import default_slots
from autoscaler.spec.model import Model
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.policy import check_forced_names
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Tenant
from autoscaler.spec.yaml import YamlError, parse_yaml
from autoscaler.text import one_line

KINDS = ("Model", "Tenant", "Settings")


def parse_documents(
    texts: Sequence[tuple[str, str]], environ: Mapping[str, str] | None = None,
    reserved: Collection[str] = RESERVED, *, contain: bool = False, read_file: Callable[[str], str] | None = None,
) -> Documents:  # fmt: skip
    """Parse (source, YAML text) of each file. Variables in `environ` override settings. Raises DocumentError.

    `read_file` returns the content of a file that a value refers to, or raises ValueError with the reason; None:
    references in values are not replaced.
    `contain`: an unexpected exception affects only the Model whose document raises it when it is decoded or rendered
    again, if its name is known.
    """
    loading = _Loading(None if read_file is None else References(environ or {}, read_file), contain=contain)
    for source, text in texts:
        try:
            values = parse_yaml(text)
        except YamlError as error:
            raise DocumentError(error.in_file(source)) from error
        for number, value in enumerate(values, 1):
            try:
                loading.add(source, value)
            except WrongKeyError as error:
                path = hide_values(format_path(error.path), loading.values)
                where = ": ".join(part for part in (source, _label(value, number), path) if part)
                message = hide_values(error.message, loading.values)
                raise DocumentError(one_line(f"{where}: {message}")) from error
    try:
        settings = override_settings(loading.settings, environ or {}, reserved)
        check_settings(settings)
    except WrongKeyError as error:
        raise DocumentError(f"environment: {format_path(error.path)}: {error.message}") from error
    return Documents(
        models=tuple(loading.models), tenants=tuple(loading.tenants), settings=settings, undecoded=loading.undecoded,
        written=loading.written, values=loading.values,
    )  # fmt: skip


def read_document(value: object) -> Model | Tenant:
    """Read one document that is given as a plain value. Raises WrongKeyError with a path relative to the document."""
    document, kind = _kind(value)
    if kind == "Model":
        return _model(document)
    if kind == "Tenant":
        return _tenant(document)
    raise WrongKeyError(("kind",), "expected one of Model, Tenant")


def _kind(value: object) -> tuple[dict[str, object], str]:
    """Return the document and its kind, if both are known and every key is supported."""
    if not isinstance(value, dict):
        raise WrongKeyError((), "expected a document with apiVersion and kind")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise WrongKeyError(("kind",), f"expected one of {', '.join(KINDS)}{suggest_nearest(str(kind), KINDS)}")
    if value.get("apiVersion") != API_VERSION:
        raise WrongKeyError(("apiVersion",), f"expected {API_VERSION}")
    if path := find_unsupported_key(kind, value):
        raise WrongKeyError(path, MESSAGE)
    return value, kind


def _model(value: dict[str, object]) -> Model:
    document = decode_value(value, ModelDocument)
    spec, name = document.spec, document.metadata.name
    check_name(name, ("metadata", "name"))
    check_name(document.metadata.namespace, ("metadata", "namespace"))
    check_model(spec)
    check_served_name(name, spec)
    check_own_names(name, spec)
    model = Model(
        name=ModelName(name),
        spec=spec,
        namespace=document.metadata.namespace,
        memory_bytes=int(spec.gpu.memory_bytes or 0),
        slots=spec.slots or default_slots(spec.engine),
    )
    check_forced_names(spec.policy, (*model.names(), *model.adapter_names()), ("spec", "policy"))
    return model


def _tenant(value: dict[str, object]) -> Tenant:
    document = decode_value(value, TenantDocument)
    check_name(document.metadata.name, ("metadata", "name"))
    check_tenant(document.spec)
    return Tenant(name=TenantName(document.metadata.name), spec=document.spec)


class _Loading:
    """The documents so far, and the owner of each name."""

    def __init__(self, references: References | None, *, contain: bool) -> None:
        self._references = references
        self.values: Mapping[str, str] = {} if references is None else references.values
        self._contain = contain
        self.written: dict[tuple[str, str], Written] = {}
        self.models: list[Model] = []
        self.undecoded: dict[ModelName, UndecodedDocument] = {}
        self.tenants: list[Tenant] = []
        self.settings = Settings()
        self.owners: dict[tuple[str, str], str] = {}
        """(kind of name, name) -> its owner and source, for error messages."""

    def add(self, source: str, value: object) -> None:
        """Add one document. Raises WrongKeyError."""
        if self._references is not None:
            value, written = self._references.resolve(value)
            if written:
                self.written[identify_document(value)] = written
        claimed = len(self.owners)
        done = attempt(partial(self._add, source, value))
        if not isinstance(done, Failure):
            return
        contained = self._contain and not isinstance(done.error, WrongKeyError)
        if not contained or not isinstance(value, dict) or (stand_in := _stand_in(value)) is None:
            raise done.error
        while len(self.owners) > claimed:
            self.owners.popitem()
        self._append_model(source, stand_in)
        self.undecoded[stand_in.name] = UndecodedDocument(
            source, value, describe_error(done.error, partial(hide_values, values=self.values))
        )

    def _add(self, source: str, value: object) -> None:
        document, kind = _kind(value)
        adders: dict[str, Callable[[str, dict[str, object]], None]] = {
            "Model": self._add_model, "Tenant": self._add_tenant, "Settings": self._add_settings,
        }  # fmt: skip
        adders[kind](source, document)

    def _add_model(self, source: str, value: dict[str, object]) -> None:
        model = _model(value)
        if self._contain:
            to_yaml(Documents(models=(model,)))  # raises here, for this Model, and not when all documents are rendered
        self._append_model(source, model)

    def _append_model(self, source: str, model: Model) -> None:
        name = model.name
        self._claim("model name", name, f"the name of a Model in {source}", ("metadata", "name"))
        for position, alias in enumerate(model.spec.aliases):
            self._claim("model name", alias, f"an alias of Model {name} in {source}", ("spec", "aliases", position))
        for adapted in model.adapter_names():
            self._claim("model name", adapted, f"an adapter of Model {name} in {source}", ("spec", "adapters"))
        self.models.append(msgspec.structs.replace(model, order=len(self.models)))

    def _add_tenant(self, source: str, value: dict[str, object]) -> None:
        tenant = _tenant(value)
        self._claim("tenant", tenant.name, f"the name of a Tenant in {source}", ("metadata", "name"))
        for position, key in enumerate(tenant.spec.keys):
            at = ("spec", "keys", position, "sha256")
            self._claim("key", key.sha256, f"a key of Tenant {tenant.name} in {source}", at)
        self.tenants.append(tenant)

    def _add_settings(self, source: str, value: dict[str, object]) -> None:
        self._claim("kind", "Settings", f"defined in {source}; only one Settings document is allowed", ("kind",))
        document = decode_value(value, SettingsDocument)
        check_settings(document)
        self.settings = Settings(**{name: getattr(document, name) for name in Settings.__struct_fields__})

    def _claim(self, what: str, name: str, owner: str, at: tuple[str | int, ...]) -> None:
        taken = self.owners.setdefault((what, name), owner)
        if taken is not owner:
            shown = "this hash" if what == "key" else f"`{name}`"
            raise WrongKeyError(at, f"{shown} is already {taken}")


def _stand_in(document: dict[str, object]) -> Model | None:
    """Return the stand-in of a Model document. None: it is no such document, or its name is not valid."""
    metadata = document.get("metadata")
    if document.get("kind") != "Model" or not isinstance(metadata, dict):
        return None
    name, namespace = metadata.get("name"), metadata.get("namespace", "default")
    if not isinstance(name, str) or not isinstance(namespace, str):
        return None
    try:
        check_name(name, ("metadata", "name"))
        check_name(namespace, ("metadata", "namespace"))
    except WrongKeyError:
        return None
    return Model(name=ModelName(name), namespace=namespace, spec=read_known_keys(document))


def _label(value: object, number: int) -> str:
    """Return a label such as `Model llama-8b`, or the number of the document in its file if it has no name."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        return f"document {number}"
    metadata = value.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if kind in KINDS and isinstance(name, str):
        return f"{kind} {name}"
    return "Settings" if kind == "Settings" else f"document {number}"

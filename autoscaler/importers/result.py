"""Results of a conversion: a Pilotlight document and notes on what was not converted. Pure.

Unsupported keys are removed and reported, and an invalid document is not returned. Results are written as YAML, with
the notes as comments, or as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import yaml

from autoscaler.documents.document_rules import MESSAGE, find_unsupported_key
from autoscaler.documents.parse import read_document
from autoscaler.spec.decode import Path, WrongKeyError, format_path
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.pod import API_VERSION

Document = dict[str, object]
_KEYS = [field.encode_name for field in msgspec.structs.fields(ModelSpec)]
_NOT_UTF8 = re.compile(r'"[^"]*[\ud800-\udfff][^"]*"')
"""A text in JSON with a byte of a path that is not UTF-8 (PEP 383)."""
_NEEDED = frozenset({("spec",), ("spec", "engine")})
"""A document without one of these keys is useless."""


class ConversionNote(NamedTuple):
    """A source key that was not converted, why, and what to do instead."""

    key: str
    why: str


class ConversionResult(NamedTuple):
    """The result of converting one object. `model`: the parsed document, if it is a Model."""

    what: str
    """For example `Model llama-8b`."""
    document: Document | None = None
    notes: tuple[ConversionNote, ...] = ()
    refused: str = ""
    """Why there is no document; also empty if there was nothing to convert."""
    model: Model | None = None
    about: tuple[str, ...] = ()
    """Further remarks."""


class Sketch:
    """A Model document under construction, and notes on it."""

    def __init__(self, name: str, namespace: str = "") -> None:
        self.name = name
        self.metadata: Document = {"name": name}
        if namespace:
            self.metadata["namespace"] = namespace
        self.spec: Document = {}
        self.pod: Document = {}
        """Becomes `spec.pod`."""
        self.notes: list[ConversionNote] = []

    def tell(self, key: str, why: str) -> None:
        """Note that the source's `key` is not converted."""
        self.notes.append(ConversionNote(key, why))

    def refused(self, why: str) -> ConversionResult:
        """Return the result for an object without an equivalent."""
        return ConversionResult(f"Model {self.name}", None, tuple(self.notes), why)

    def taken(self) -> ConversionResult:
        """Return the document, if it is valid."""
        fields = self.spec | {"pod": self.pod}
        spec = {key: fields[key] for key in sorted(fields, key=_KEYS.index) if fields[key] not in ({}, [], ())}
        document: Document = {"apiVersion": API_VERSION, "kind": "Model", "metadata": self.metadata, "spec": spec}
        return finalize_document(f"Model {self.name}", document, self.notes)


class ConversionError(Exception):
    """An object has no equivalent; `str()` contains the key, the reason and the fix."""


def finalize_document(what: str, document: Document, notes: Iterable[ConversionNote] = ()) -> ConversionResult:
    """Remove unsupported keys, and reject an invalid document."""
    reported = list(notes)
    while path := find_unsupported_key(str(document["kind"]), document):
        if path in _NEEDED:
            return ConversionResult(what, None, tuple(reported), f"{format_path(path)}: {MESSAGE}")
        _drop(document, path)
        reported.append(ConversionNote(format_path(path), MESSAGE))
    try:
        read = read_document(document)
    except WrongKeyError as error:
        return ConversionResult(what, None, tuple(reported), f"{format_path(error.path)}: {error.message}")
    if broken := _NOT_UTF8.search(json.dumps(document, ensure_ascii=False)):
        return ConversionResult(what, None, tuple(reported), f"{broken[0]} is not UTF-8: rename the file or folder")
    return ConversionResult(what, document, tuple(reported), model=read if isinstance(read, Model) else None)


def refuse_duplicate_names(takens: Sequence[ConversionResult]) -> list[ConversionResult]:
    """Reject each Model that has a name or alias of an earlier one."""
    owners: dict[str, str] = {}
    out = []
    for taken in takens:
        names = () if taken.model is None else (*taken.model.names(), *taken.model.adapter_names())
        clash = next((name for name in names if name in owners), None)
        if clash is not None:
            why = f"`{clash}` is already a name of {owners[clash]}: names must be unique in an installation"
            out.append(ConversionResult(taken.what, None, taken.notes, why))
            continue
        owners.update(dict.fromkeys(names, taken.what))
        out.append(taken)
    return out


def to_yaml(takens: Iterable[ConversionResult]) -> str:
    """Format the documents as YAML, each below comments on what was not converted."""
    return "---\n".join(f"{_comments(each)}{_body(each.document)}" for each in takens)


def to_json(takens: Iterable[ConversionResult]) -> str:
    """Format the documents, and what was not converted, as ASCII JSON."""
    takens = list(takens)
    notes = [{"of": each.what, "key": key, "why": why} for each in takens for key, why in each.notes]
    refused = [{"of": each.what, "why": each.refused} for each in takens if each.refused]
    documents = [each.document for each in takens if each.document]
    about = [{"of": each.what, "text": text} for each in takens for text in each.about]
    whole = {"documents": documents, "notTakenOver": notes, "refused": refused, "about": about}
    return json.dumps(whole, indent=2) + "\n"


def _comments(taken: ConversionResult) -> str:
    lines = [*taken.about, *(f"not converted: {key}: {why}" for key, why in taken.notes)]
    if taken.refused:
        lines.append(f"{taken.what} is not converted: {taken.refused}")
    elif taken.document is None:
        lines.insert(0, f"{taken.what}:")
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _body(document: Document | None) -> str:
    """Return the document as YAML, in ASCII if it contains a character that would be escaped at its output."""
    if document is None:
        return ""
    readable = yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)
    is_printable = readable.replace("\n", "").isprintable()
    return readable if is_printable else yaml.safe_dump(document, sort_keys=False, width=120)


def _drop(document: Document, path: Path) -> None:
    """Remove a key, and its parents that become empty."""
    *parents, last = path
    holders: list[tuple[Document, str]] = []
    at: object = document
    for key in (*parents, last):
        if isinstance(at, dict):
            holders.append((at, str(key)))
            at = at.get(key)
    for position, (holder, key) in enumerate(reversed(holders)):
        if position and holder[key]:
            return
        del holder[key]

"""What became of one thing of another program: a document of ours, and all that was not taken over. Pure.

Owns the last step of every conversion: keys that are not in force yet are left out and told, and a document that our
own reading would refuse is not given out at all. Also how both are written as YAML, with the telling as comments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import yaml

from autoscaler.spec.decode import Path, WrongKeyError, format_path
from autoscaler.spec.load import read_document
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.validation import MESSAGE, find_unsupported_key

Document = dict[str, object]
_KEYS = [field.encode_name for field in msgspec.structs.fields(ModelSpec)]
_NEEDED = frozenset({("spec",), ("spec", "engine")})
"""Without these a document is nothing."""


class ConversionNote(NamedTuple):
    """A key of theirs that was not taken over; why, and what to do instead."""

    key: str
    why: str


class ConversionResult(NamedTuple):
    """What one thing of theirs became. `model` is its document as we read it, where it is a Model of ours."""

    what: str
    """`Model llama-8b`."""
    document: Document | None = None
    notes: tuple[ConversionNote, ...] = ()
    refused: str = ""
    """Why there is no document; empty also where there was nothing to become one."""
    model: Model | None = None
    about: tuple[str, ...] = ()
    """What to know of it besides."""


class Sketch:
    """A Model document in the making, and what is told beside it."""

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
        """`key` of theirs is not taken over."""
        self.notes.append(ConversionNote(key, why))

    def refused(self, why: str) -> ConversionResult:
        """It has no equal at all."""
        return ConversionResult(f"Model {self.name}", None, tuple(self.notes), why)

    def taken(self) -> ConversionResult:
        """The document, if it is one of ours."""
        told = self.spec | {"pod": self.pod}
        spec = {key: told[key] for key in sorted(told, key=_KEYS.index) if told[key] not in ({}, [], ())}
        document: Document = {"apiVersion": API_VERSION, "kind": "Model", "metadata": self.metadata, "spec": spec}
        return finalize_document(f"Model {self.name}", document, self.notes)


class ConversionError(Exception):
    """A thing of theirs has no equal here; the text says which key, why, and what to do."""


def finalize_document(what: str, document: Document, notes: Iterable[ConversionNote] = ()) -> ConversionResult:
    """The document without what is not in force yet, or why our own reading refuses it."""
    told = list(notes)
    while path := find_unsupported_key(str(document["kind"]), document):
        if path in _NEEDED:
            return ConversionResult(what, None, tuple(told), f"{format_path(path)}: {MESSAGE}")
        _drop(document, path)
        told.append(ConversionNote(format_path(path), MESSAGE))
    try:
        read = read_document(document)
    except WrongKeyError as error:
        return ConversionResult(what, None, tuple(told), f"{format_path(error.path)}: {error.message}")
    return ConversionResult(what, document, tuple(told), model=read if isinstance(read, Model) else None)


def refuse_duplicate_names(takens: Sequence[ConversionResult]) -> list[ConversionResult]:
    """All of them as one set: a Model whose name or alias an earlier one has is refused."""
    owners: dict[str, str] = {}
    out = []
    for taken in takens:
        names = () if taken.model is None else (*taken.model.names(), *taken.model.adapter_names())
        clash = next((name for name in names if name in owners), None)
        if clash is not None:
            why = f"`{clash}` is already a name of {owners[clash]}: names hold for a whole installation"
            out.append(ConversionResult(taken.what, None, taken.notes, why))
            continue
        owners.update(dict.fromkeys(names, taken.what))
        out.append(taken)
    return out


def to_yaml(takens: Iterable[ConversionResult]) -> str:
    """The documents, each below comments that tell what was not taken over."""
    return "---\n".join(f"{_comments(each)}{_body(each.document)}" for each in takens)


def to_json(takens: Iterable[ConversionResult]) -> str:
    """The same for programs: the documents, and beside them what was not taken over."""
    takens = list(takens)
    notes = [{"of": each.what, "key": key, "why": why} for each in takens for key, why in each.notes]
    refused = [{"of": each.what, "why": each.refused} for each in takens if each.refused]
    documents = [each.document for each in takens if each.document]
    about = [{"of": each.what, "text": text} for each in takens for text in each.about]
    whole = {"documents": documents, "notTakenOver": notes, "refused": refused, "about": about}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode() + "\n"


def _comments(taken: ConversionResult) -> str:
    lines = [*taken.about, *(f"not taken over: {key}: {why}" for key, why in taken.notes)]
    if taken.refused:
        lines.append(f"{taken.what} is not taken over: {taken.refused}")
    elif taken.document is None:
        lines.insert(0, f"{taken.what}:")
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _body(document: Document | None) -> str:
    return "" if document is None else yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)


def _drop(document: Document, path: Path) -> None:
    """Removes a key, and what holds nothing any more without it."""
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

"""Reads the mappings of other programs. Pure.

A wrong type in a mapping is an error with a key path. An unknown key is a note, since other programs add keys
independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from autoscaler.documents.document_types import DocumentError
from autoscaler.importers.result import ConversionError, Document
from autoscaler.spec.decode import Part, Path, WrongKeyError, decode_value, format_path
from autoscaler.spec.quantity import whole_number
from autoscaler.spec.yaml import YamlError, parse_yaml

P = TypeVar("P", bound=Part)
UNKNOWN = "this import does not support the key"


def read_mapping(value: object, at: Path) -> Document:
    """Return a mapping; null is an empty one. Raises WrongKeyError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WrongKeyError(at, "expected keys with values")
    return value


def read_part(value: object, kind: type[P], at: Path, tell: Callable[[str, str], None]) -> P:
    """Decode `value` as `kind`. Null values count as absent; `tell` receives unknown keys. Raises WrongKeyError."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    given = {key: one for key, one in read_mapping(value, at).items() if one is not None}
    for key in given.keys() - known:
        tell(".".join(map(str, (*at, key))), UNKNOWN)
    return decode_value({key: one for key, one in given.items() if key in known}, kind, at=at)


def parse_count(digits: str, key: str) -> int:
    """Parse a text of decimal digits that `key` contains. Raises ConversionError."""
    number = whole_number(digits)
    if number is None:
        raise ConversionError(f"{key}: expected a whole number of at most 15 digits, got {len(digits)} digits")
    return number


def simplify_number(value: float) -> int | float:
    """Return a number as a person writes it: 60, not 60.0."""
    return int(value) if value == int(value) else value


def expand_object_lists(values: Iterable[object]) -> list[object]:
    """Return the objects of a manifest, with each `kind: List`, as kubectl prints it, replaced by its items."""
    out: list[object] = []
    for value in values:
        items = value.get("items") if isinstance(value, dict) and value.get("kind") == "List" else None
        out += items if isinstance(items, list) else [value]
    return out


class DocumentErrorContext:
    """Context manager that converts a WrongKeyError to a one-line DocumentError: FILE: OBJECT: KEY: expectation."""

    def __init__(self, source: str, value: object = None, number: int = 0) -> None:
        self._source = source
        self._label = _label(value, number)

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise DocumentError for a WrongKeyError."""
        if isinstance(error, WrongKeyError):
            where = ": ".join(each for each in (self._source, self._label, format_path(error.path)) if each)
            raise DocumentError(" ".join(f"{where}: {error.message}".split())) from error


def parse_yaml_documents(source: str, text: str) -> list[object]:
    """Parse the YAML documents of a file. Raises DocumentError."""
    try:
        return parse_yaml(text)
    except YamlError as error:
        raise DocumentError(error.in_file(source)) from error


def _label(value: object, number: int) -> str:
    metadata = value.get("metadata") if isinstance(value, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    kind = value.get("kind") if isinstance(value, dict) else None
    return f"{kind} {name}" if isinstance(kind, str) and isinstance(name, str) else f"document {number}" * bool(number)

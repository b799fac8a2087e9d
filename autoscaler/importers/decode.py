"""A mapping of another program -> a typed value: wrong types are named by key path, unknown keys are told. Pure.

Owns that reading. Another program's keys grow without us, so that one we do not know is no error but a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from autoscaler.importers.result import Document
from autoscaler.spec.decode import Path, WrongKeyError, decode, dotted
from autoscaler.spec.load import DocumentError
from autoscaler.spec.part import Part
from autoscaler.spec.yaml import YamlError, read

P = TypeVar("P", bound=Part)
UNKNOWN = "this import does not know it"


def mapping(value: object, at: Path) -> Document:
    """Keys with values; nothing counts as none. Raises WrongKeyError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WrongKeyError(at, "expected keys with values")
    return value


def part(value: object, kind: type[P], at: Path, tell: Callable[[str, str], None]) -> P:
    """`value` as `kind`; keys that are null count as absent, unknown ones are told. Raises WrongKeyError."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    given = {key: one for key, one in mapping(value, at).items() if one is not None}
    for key in given.keys() - known:
        tell(".".join(map(str, (*at, key))), UNKNOWN)
    return decode({key: one for key, one in given.items() if key in known}, kind, at=at)


def number(value: float) -> int | float:
    """As a person writes it: 60, not 60.0."""
    return int(value) if value == int(value) else value


def objects(values: Iterable[object]) -> list[object]:
    """The objects of a manifest: those of a `kind: List`, as kubectl prints it, one by one."""
    out: list[object] = []
    for value in values:
        items = value.get("items") if isinstance(value, dict) and value.get("kind") == "List" else None
        out += items if isinstance(items, list) else [value]
    return out


class Labelled:
    """As `with`, turns a WrongKeyError into a DocumentError, one line: FILE: THING: KEY: what was expected."""

    def __init__(self, source: str, value: object = None, number: int = 0) -> None:
        self._source = source
        self._label = _label(value, number)

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises DocumentError."""
        if isinstance(error, WrongKeyError):
            where = ": ".join(each for each in (self._source, self._label, dotted(error.path)) if each)
            raise DocumentError(" ".join(f"{where}: {error.message}".split())) from error


def texts(source: str, text: str) -> list[object]:
    """The YAML documents of a file. Raises DocumentError."""
    try:
        return read(text)
    except YamlError as error:
        raise DocumentError(f"{source}: {error}") from error


def _label(value: object, number: int) -> str:
    metadata = value.get("metadata") if isinstance(value, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    kind = value.get("kind") if isinstance(value, dict) else None
    return f"{kind} {name}" if isinstance(kind, str) and isinstance(name, str) else f"document {number}" * bool(number)

"""Reads the mappings and command lines of other programs. Pure.

A wrong type in a mapping is an error with a key path. An unknown key is a note, since other programs add keys
independently. Flags of a command line are `--flag value` or `--flag=value`; of a repeated flag the last value applies.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from autoscaler.documents.document_rules import NAME_CHARS_MAX, check_model
from autoscaler.documents.document_types import DocumentError
from autoscaler.importers.result import ConversionError, Document
from autoscaler.spec.decode import Part, Path, WrongKeyError, decode_value, format_path
from autoscaler.spec.model import ModelSpec
from autoscaler.spec.quantity import whole_number
from autoscaler.spec.yaml import YamlError, parse_yaml

P = TypeVar("P", bound=Part)
UNKNOWN = "this import does not support the key"
_OPERATORS = re.compile(r"[;&|<>`$()]")


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


def split_command(text: str) -> list[str]:
    """Return the words of a command, as a shell splits it. Raises ValueError, for example for an open quote."""
    return shlex.split(text)


def unwrap_shell(words: list[str]) -> list[str]:
    """Return the words of the one program that `sh -c` starts, or the same words if the script does more."""
    shell, option, script = words if len(words) == 3 else ("", "", "")
    if shell.rpartition("/")[2] not in {"sh", "bash"} or option not in {"-c", "-lc", "-ec"}:
        return words
    if not script or _OPERATORS.search(script):
        return words
    try:
        return split_command(script.replace("\\\n", " "))
    except ValueError:
        return words


def simplify_name(text: str) -> str:
    """Return a valid name of a Model that is similar to a text: `my model (v2)` becomes `my-model-v2`. Empty if the
    text contains no letters or digits.
    """
    plain = re.sub(r"[^A-Za-z0-9._:/-]+", "-", text)
    return plain.strip("._:/-")[:NAME_CHARS_MAX].rstrip("._:/-")


def is_alias(text: str) -> bool:
    """Whether a document may contain the text as an alias of a Model."""
    try:
        check_model(ModelSpec(engine="command", command=("engine", "{port}"), aliases=(text,)))
    except WrongKeyError:
        return False
    return True


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


class CommandLine:
    """A command line from which flags are removed one by one."""

    def __init__(self, words: Iterable[str]) -> None:
        self.left = list(words)

    def take(self, *flags: str, when: Callable[[str], bool] = lambda _: True) -> str | None:
        """Remove a flag with any of these names and return its value. If `when` rejects the value, the flag stays."""
        found: str | None = None
        position = 0
        while position < len(self.left):
            flag, equals, value = self.left[position].partition("=")
            if flag.replace("_", "-") in flags and not equals:
                value = self.left[position + 1] if position + 1 < len(self.left) else ""
            if flag.replace("_", "-") in flags and value and when(value):
                found = value
                del self.left[position : position + (1 if equals else 2)]
            else:
                position += 1
        return found

    def take_switch(self, *flags: str) -> bool:
        """Remove a flag without a value; return whether it was present."""
        there = [word for word in self.left if word.replace("_", "-") in flags]
        self.left = [word for word in self.left if word not in there]
        return bool(there)

    def has(self, *flags: str) -> bool:
        """Whether a flag is present."""
        return any(word.partition("=")[0].replace("_", "-") in flags for word in self.left)

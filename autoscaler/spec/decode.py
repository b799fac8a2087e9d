"""Decodes plain values to typed documents, and reports the first wrong key with its path and the expected value.

msgspec decodes and validates. If it rejects a value, the value is compared with the types to find the first wrong key:
users need `spec.gpu.memory` and `a size such as 16Gi`, not a type name. Messages never repeat a value, because an
environment variable or a key may be secret.

Also owns Part, the base class of all parts of documents.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from autoscaler.spec.quantity import AUTO, Bytes, BytesOrAuto, parse_bytes, parse_bytes_or_auto


class Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of all parts of documents: immutable, strict, with camelCase keys in documents."""


BYTES_MAX = (1 << 63) - 1
NAMED_MAX = 12
"""A message lists the known keys if there are at most this many."""
SIZE = "a size such as 16Gi or 500M"

T = TypeVar("T")
Path = tuple[str | int, ...]


class WrongKeyError(Exception):
    """A value that its key does not allow. `path` is the key; `message` is the problem, without the path."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


def decode_value(value: object, kind: type[T], *, at: Path = ()) -> T:
    """Decode `value` to `kind` (a Part, or the type of a field). Raises WrongKeyError with a path below `at`."""
    try:
        return msgspec.convert(value, kind, strict=True, dec_hook=_size)
    except msgspec.ValidationError as error:
        _walk(value, kind, at)
        raise WrongKeyError(at, str(error)) from error


def suggest_nearest(word: str, known: Collection[str]) -> str:
    """Return ` (did you mean ...?)`, or an empty string if no known word is similar."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def format_path(path: Path) -> str:
    """Format a path, for example `spec.keys[0].sha256`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _size(kind: type, value: object) -> object:
    """Decode types that msgspec does not know: sizes, and values that Kubernetes validates."""
    if kind is object:
        return value
    if kind not in (Bytes, BytesOrAuto) or not isinstance(value, str | int):
        raise ValueError(f"expected {SIZE}")
    size = parse_bytes_or_auto(value) if kind is BytesOrAuto else parse_bytes(value)
    if size > BYTES_MAX:
        raise ValueError(f"expected {SIZE}, below 8Ei")
    return size


def _walk(value: object, kind: Any, at: Path) -> None:
    """Raise WrongKeyError at the first value that its type does not allow."""
    if value is not None and get_origin(kind) in (Union, types.UnionType):
        kinds = [k for k in get_args(kind) if k is not type(None)]
        fits = [k for k in kinds if (isinstance(k, type) and issubclass(k, Part)) is isinstance(value, dict)]
        kind = kinds[0] if len(kinds) == 1 else fits[0] if len(fits) == 1 else kind
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) in {tuple, dict}:
        _walk(value, get_args(kind)[0], at)  # checks the items; the length is checked below
    if isinstance(kind, type) and issubclass(kind, Part):
        _walk_part(_mapping(value, at), kind, at)
    elif get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise WrongKeyError(at, "expected a list")
        for position, item in enumerate(value):
            _walk(item, get_args(kind)[0], (*at, position))
    elif get_origin(kind) is dict:
        for key, item in _mapping(value, at).items():
            _walk(item, get_args(kind)[1], (*at, key))
    else:
        try:
            msgspec.convert(value, kind, strict=True, dec_hook=_size)
        except msgspec.ValidationError:
            raise WrongKeyError(at, f"expected {describe_type(kind, at)}{_quotes(value, kind)}") from None


def _walk_part(value: dict[str, object], kind: type[Part], at: Path) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in value:
        if key not in fields:
            expected = f"; expected one of {', '.join(fields)}" if len(fields) <= NAMED_MAX else ""
            raise WrongKeyError((*at, key), f"unknown key{suggest_nearest(key, fields) or expected}")
    for name, field in fields.items():
        if name in value:
            _walk(value[name], field.type, (*at, name))
        elif field.required:
            raise WrongKeyError((*at, name), f"missing; expected {describe_type(field.type, (*at, name))}")


def _mapping(value: object, at: Path) -> dict[str, object]:
    if not isinstance(value, dict):
        raise WrongKeyError(at, "expected keys with values")
    return value


def _quotes(value: object, kind: object) -> str:
    is_text = isinstance(inspect.type_info(kind), inspect.StrType)
    return " (put it in quotes)" if is_text and isinstance(value, int | float) else ""


def describe_type(kind: object, at: Path) -> str:
    """Describe the expected value of a type in words. The unit of a number follows from the name of its key."""
    key = str(at[-1]) if at else ""
    return _words(inspect.type_info(kind), "seconds" if key.lower().endswith(("seconds", "secondsmax")) else "")


def _words(info: inspect.Type, unit: str) -> str:
    match info:
        case inspect.UnionType():
            return ", or ".join(_words(one, unit) for one in info.types if not isinstance(one, inspect.NoneType))
        case inspect.CustomType():
            return f"{SIZE}, or {AUTO}" if info.cls is BytesOrAuto else SIZE
        case inspect.LiteralType():
            return ("one of " if len(info.values) > 1 else "") + ", ".join(map(str, info.values))
        case inspect.IntType():
            return "a whole number" + _bounds(info)
        case inspect.FloatType():
            return (f"a number of {unit}" if unit else "a number") + _bounds(info)
        case inspect.StrType():
            return f"text that matches {info.pattern}" if info.pattern else "text"
        case inspect.BoolType():
            return "true or false"
        case inspect.VarTupleType():
            return "a list" + (f" of at most {info.max_length} items" if info.max_length is not None else "")
        case _:
            return "keys with values"


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    low = f"above {_plain(info.gt)}" if info.gt is not None else ""
    low = f"at least {_plain(info.ge)}" if info.ge is not None else low
    high = f"at most {_plain(info.le)}" if info.le is not None else ""
    bounds = " and ".join(bound for bound in (low, high) if bound)
    return f", {bounds}" if bounds else ""


def _plain(number: float) -> str:
    """Format a number as people write it: `-1000000000`, `0.5`."""
    return str(int(number)) if number == int(number) else str(number)

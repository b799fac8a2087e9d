"""Checks recursively whether values have the types that their classes declare."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Mapping, Sequence, Set
from enum import Enum
from typing import Any, Literal, NewType, Union, get_args, get_origin

NUMBER_MAX = 1 << 64
"""Larger than any valid number, and far below the overflow of floats."""


def misfit(value: object) -> str:
    """The path to a value of a wrong type in a NamedTuple or Struct; empty: there is none."""
    hints = _hints(type(value))
    for name, hint in hints.items():
        if found := _misfit(getattr(value, name), hint):
            return f".{name}{found}"
    return ""


_known: dict[type, dict[str, Any]] = {}  # annotations have any type


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _known:
        fields: tuple[str, ...] = getattr(kind, "_fields", ()) or getattr(kind, "__struct_fields__", ())
        hints = typing.get_type_hints(kind) if fields else {}
        _known[kind] = {name: hints[name] for name in fields}
    return _known[kind]


def _misfit(value: object, hint: Any) -> str:
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return ""
    if origin is typing.Annotated:
        return _misfit(value, parts[0])
    if origin in (Union, types.UnionType):
        return "" if any(not _misfit(value, one) for one in parts) else _wrong(value, hint)
    if origin is Literal:
        return "" if value in parts else _wrong(value, hint)
    if hint is None or hint is type(None):
        return "" if value is None else _wrong(value, hint)
    if origin is not None:
        return _inside(value, origin, parts, hint)
    if hint is float:
        return (
            ""
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < NUMBER_MAX
            else _wrong(value, hint)
        )
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is int):
        return _wrong(value, hint)
    if isinstance(value, int) and abs(value) >= NUMBER_MAX:
        return _wrong(value, hint)
    return "" if isinstance(value, Enum) else misfit(value)


def _inside(value: object, origin: type, parts: tuple[Any, ...], hint: Any) -> str:
    if not isinstance(value, origin):
        return _wrong(value, hint)
    inner: list[tuple[object, Any]] = []
    if isinstance(value, Mapping):
        inner = [(one, part) for pair in value.items() for one, part in zip(pair, parts, strict=True)]
    elif isinstance(value, tuple) and not (len(parts) == 2 and parts[1] is Ellipsis):
        inner = list(zip(value, parts, strict=True))
    elif isinstance(value, Sequence | Set):
        inner = [(one, parts[0]) for one in value]
    return next((f"[]{found}" for one, part in inner if (found := _misfit(one, part))), "")


def _wrong(value: object, hint: object) -> str:
    many = f" of {len(value)}" if isinstance(value, Collection) else ""
    return f": {type(value).__name__}{many}, and not {hint}"

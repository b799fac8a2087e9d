"""Which paths of the inference port exist and what they mean. Pure tables; `lookup` is their one door.

Promises: a path that is not in a table does not exist. Paths are compared byte for byte as they came, so `//`, `%2f`
and `..` find nothing, and nothing else of an engine can be reached. A method that a path does not take finds no more
than which it takes. Only a model's name in a path may be percent-encoded, as official clients send it; it is decoded
once and then is a name or nothing.
"""

from __future__ import annotations

import re

from gateway.request import anthropic, more, openai
from gateway.request.operation import Kind, Operation

__all__ = ["Kind", "Operation", "lookup"]

_POST = openai.POST | anthropic.POST | more.POST
_GET = openai.GET | {b"/health": Operation(Kind.HEALTH)}
_PREFLIGHT = Operation(Kind.PREFLIGHT)
_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:@+-]*+(?:/[A-Za-z0-9][A-Za-z0-9._:@+-]*+)*+")
"""A model's name in a path: names, `namespace/name` and `model:adapter`; no segment begins with a dot."""
_NAME_BYTES_MAX = 256
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")


def lookup(method: bytes, path: bytes) -> Operation | None:
    """The Operation of a method (case-sensitive) and a literal path without its query; None is 404.

    HEAD finds nothing anywhere: its answer has no body that could say more.
    """
    if method == b"POST":
        return _posted(path) or _not_allowed(_got(path), b"GET, OPTIONS")
    if method == b"GET":
        return _got(path) or _not_allowed(_posted(path), b"POST, OPTIONS")
    if method == b"OPTIONS":
        return None if _posted(path) is None and _got(path) is None else _PREFLIGHT
    if method == b"HEAD":
        return None
    return _not_allowed(_posted(path), b"POST, OPTIONS") or _not_allowed(_got(path), b"GET, OPTIONS")


def _posted(path: bytes) -> Operation | None:
    return _POST.get(path) or _deployed(path)


def _got(path: bytes) -> Operation | None:
    return _GET.get(path) or _model(path)


def _not_allowed(known: Operation | None, allow: bytes) -> Operation | None:
    """Of a path that is known with another method: the refusal takes its dialect."""
    return None if known is None else Operation(Kind.NOT_ALLOWED, dialect=known.dialect, allow=allow)


def _deployed(path: bytes) -> Operation | None:
    """Azure: the model's name stands between the root and the operation."""
    if not path.startswith(openai.DEPLOYMENTS):
        return None
    for suffix, operation in openai.DEPLOYED:
        if path.endswith(suffix):
            name = _name(path.removesuffix(suffix)[len(openai.DEPLOYMENTS) :])
            return None if name is None else operation._replace(model=name)
    return None


def _model(path: bytes) -> Operation | None:
    for root in openai.GET_MODEL_ROOTS:
        if path.startswith(root):
            name = _name(path[len(root) :])
            return None if name is None else Operation(Kind.GET_MODEL, model=name)
    return None


def _name(raw: bytes) -> str | None:
    """The name that stands in a path, percent-decoded once (RFC 3986, 2.1); None where that is not a name.

    A `%` that is left, a byte that is not ASCII and a control character are in no name.
    """
    if len(raw) > 3 * _NAME_BYTES_MAX:
        return None
    name = _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), raw) if b"%" in raw else raw
    return name.decode("ascii") if len(name) <= _NAME_BYTES_MAX and _NAME.fullmatch(name) else None

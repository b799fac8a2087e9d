"""The paths of the inference port and their operations. `find_operation` is the only entry point.

A path that is not in a table does not exist. Paths are compared byte by byte as received, so `//`, `%2f` and `..` match
nothing, and no other path of an engine can be reached. For a method that a path does not support, the result names the
supported methods. Only a model's name in a path may be percent-encoded, as official clients send it; it is decoded once
and must be a valid name.

The tables contain the OpenAI paths (also under /openai, and Azure's deployments), the Anthropic paths, Jina's and
Cohere's rerank and score, and vLLM's tokenizer.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Literal, NamedTuple

Dialect = Literal["openai", "anthropic", "jina", "vllm"]


class Kind(Enum):
    """How the gateway handles a request."""

    INFER = "infer"
    """Forwarded to an engine."""
    LIST_MODELS = "list_models"
    GET_MODEL = "get_model"
    HEALTH = "health"
    """A constant 200."""
    PREFLIGHT = "preflight"
    """OPTIONS on a path that exists."""
    NOT_ALLOWED = "not_allowed"
    """A path that exists, with a method that it does not support: 405 (RFC 9110, 15.5.6)."""


class Operation(NamedTuple):
    """One operation. Only INFER has an `engine_path`; it is a constant, and never contains the client's bytes."""

    kind: Kind
    engine_path: bytes = b""
    dialect: Dialect = "openai"
    """Determines the format of errors, and the API that the engine must support."""
    multipart: bool = False
    """The body may also be multipart/form-data."""
    usage: bool = False
    """Its streams support `stream_options.include_usage`."""
    salted: bool = False
    """Whether the body may get `cache_salt`, which isolates prefix caches, and `lora`, which selects adapters."""
    model: str | None = None
    """The model's name if the path contains it (Azure's deployments, GET /v1/models/NAME), percent-decoded."""
    allow: bytes = b""
    """For NOT_ALLOWED: the supported methods, as in the `Allow` header (RFC 9110, 10.2.1)."""


def _infer(name: str, *, multipart: bool = False, usage: bool = False, salted: bool = False) -> tuple[bytes, Operation]:
    path = b"/v1/" + name.encode()
    return name.encode(), Operation(Kind.INFER, path, multipart=multipart, usage=usage, salted=salted)


INFER = dict(
    (
        _infer("chat/completions", usage=True, salted=True),
        _infer("completions", usage=True, salted=True),
        _infer("embeddings"),
        _infer("responses", salted=True),
        _infer("moderations"),
        _infer("audio/transcriptions", multipart=True),
        _infer("audio/translations", multipart=True),
        _infer("audio/speech"),
        _infer("images/generations"),
        _infer("images/edits", multipart=True),
    )
)
"""Operations by the part of the path after /v1/ (in Azure's paths: after the deployment)."""

ROOTS = (b"/v1/", b"/openai/v1/")
OPENAI = {root + name: operation for root in ROOTS for name, operation in INFER.items()}
GET = {root + b"models": Operation(Kind.LIST_MODELS) for root in ROOTS}
GET_MODEL_ROOTS = tuple(root + b"models/" for root in ROOTS)
DEPLOYMENTS = b"/openai/deployments/"
DEPLOYED = sorted(((b"/" + name, operation) for name, operation in INFER.items()), key=lambda row: -len(row[0]))
"""Suffixes after a deployment's name; longest first, because `/chat/completions` ends in `/completions`."""
ANTHROPIC = {
    path: Operation(Kind.INFER, path, dialect="anthropic") for path in (b"/v1/messages", b"/v1/messages/count_tokens")
}
RERANK_AND_TOKENIZE = {
    **{path: Operation(Kind.INFER, path, dialect="jina") for path in (b"/v1/rerank", b"/v2/rerank", b"/v1/score")},
    **{path: Operation(Kind.INFER, path, dialect="vllm") for path in (b"/tokenize", b"/detokenize")},
}

_POST = OPENAI | ANTHROPIC | RERANK_AND_TOKENIZE
_GET = GET | {b"/health": Operation(Kind.HEALTH)}
_PREFLIGHT = Operation(Kind.PREFLIGHT)
_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:@+-]*+(?:/[A-Za-z0-9][A-Za-z0-9._:@+-]*+)*+")
"""A model's name in a path; it may be `namespace/name` or `model:adapter`. No segment begins with a dot."""
_NAME_BYTES_MAX = 256
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")


def find_operation(method: bytes, path: bytes) -> Operation | None:
    """Return the operation for a method (case-sensitive) and a literal path without its query; None means 404.

    HEAD never matches: its response has no body for an error message.
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
    """Return the 405 for a path that exists with another method, in that path's dialect."""
    return None if known is None else Operation(Kind.NOT_ALLOWED, dialect=known.dialect, allow=allow)


def _deployed(path: bytes) -> Operation | None:
    """Match Azure's paths: the model's name is between the root and the operation."""
    if not path.startswith(DEPLOYMENTS):
        return None
    for suffix, operation in DEPLOYED:
        if path.endswith(suffix):
            name = _name(path.removesuffix(suffix)[len(DEPLOYMENTS) :])
            return None if name is None else operation._replace(model=name)
    return None


def _model(path: bytes) -> Operation | None:
    for root in GET_MODEL_ROOTS:
        if path.startswith(root):
            name = _name(path[len(root) :])
            return None if name is None else Operation(Kind.GET_MODEL, model=name)
    return None


def _name(raw: bytes) -> str | None:
    """Return the percent-decoded name from a path (decoded once, RFC 3986, 2.1); None if it is invalid.

    A remaining `%`, non-ASCII bytes and control characters are invalid.
    """
    if len(raw) > 3 * _NAME_BYTES_MAX:
        return None
    name = _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), raw) if b"%" in raw else raw
    return name.decode("ascii") if len(name) <= _NAME_BYTES_MAX and _NAME.fullmatch(name) else None

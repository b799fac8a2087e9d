"""The paths of the inference port and their operations: `find_operation`, and `suggest_path` for unknown paths.

A path that is not in a table does not exist. Paths are compared byte by byte, so `%2f` and `..` match nothing, and no
other path of an engine can be reached. Only unambiguous variants are served too: repeated slashes at the beginning,
a slash at the end, `/v1` twice or missing. For a method that a path does not support, the result names the supported
methods. Only a model's name in a path may be percent-encoded, as official clients send it; it is decoded once and must
be a valid name.

The tables contain the OpenAI paths (also under /openai, and Azure's deployments), the Anthropic paths, Jina's and
Cohere's rerank, vLLM's score and tokenizer, and Ollama's API.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final, Literal, NamedTuple

Dialect = Literal["openai", "responses", "anthropic", "jina", "cohere", "score", "tei", "sglang", "vllm", "ollama"]
"""An API. Of tei and sglang only rerank has a name: it differs from that of Jina."""


class Kind(Enum):
    """How the gateway handles a request."""

    INFER = "infer"
    """Forwarded to an engine."""
    LIST_MODELS = "list_models"
    GET_MODEL = "get_model"
    HEALTH = "health"
    """A constant 200."""
    LANDING = "landing"
    """The page at `/`."""
    OLLAMA_TAGS = "ollama_tags"
    OLLAMA_PS = "ollama_ps"
    OLLAMA_SHOW = "ollama_show"
    OLLAMA_VERSION = "ollama_version"
    OLLAMA_MANAGE = "ollama_manage"
    """Rejected: models are not managed through this port."""
    PREFLIGHT = "preflight"
    """OPTIONS on a path that exists."""
    NOT_ALLOWED = "not_allowed"
    """A path that exists, with a method that it does not support: 405 (RFC 9110, 15.5.6)."""


class Operation(NamedTuple):
    """One operation. Only INFER has an `engine_path`; it is a constant, and never contains the client's bytes.
    For Ollama's API it is the client's path, which `gateway.dialects.ollama_requests` replaces.
    """

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
    advice: str = ""
    """For OLLAMA_MANAGE: how to do the same with Pilotlight."""


def _infer(
    name: str, dialect: Dialect = "openai", *, multipart: bool = False, usage: bool = False, salted: bool = False
) -> tuple[bytes, Operation]:
    path = b"/v1/" + name.encode()
    return name.encode(), Operation(Kind.INFER, path, dialect, multipart=multipart, usage=usage, salted=salted)


INFER = dict(
    (
        _infer("chat/completions", usage=True, salted=True),
        _infer("completions", usage=True, salted=True),
        _infer("embeddings"),
        _infer("responses", "responses", salted=True),
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
CHAT: Final = INFER[b"chat/completions"]
MESSAGES: Final = ANTHROPIC[b"/v1/messages"]
"""Translated to CHAT for engines without the API of Anthropic."""
RERANK: Final = Operation(Kind.INFER, b"/v1/rerank", dialect="jina")
RERANK_AND_TOKENIZE = {
    b"/v1/rerank": RERANK,
    b"/v2/rerank": Operation(Kind.INFER, b"/v2/rerank", dialect="cohere"),
    b"/v1/score": Operation(Kind.INFER, b"/v1/score", dialect="score"),
    **{path: Operation(Kind.INFER, path, dialect="vllm") for path in (b"/tokenize", b"/detokenize")},
}

_ADD = (
    "write a Model document (docs: Configuration) and add it with `pilotlight serve -c FILE` or `kubectl apply -f FILE`"
)
OLLAMA = {
    **{
        path: Operation(Kind.INFER, path, dialect="ollama")
        for path in (b"/api/chat", b"/api/generate", b"/api/embed", b"/api/embeddings")
    },
    b"/api/show": Operation(Kind.OLLAMA_SHOW, dialect="ollama"),
    **{
        path: Operation(Kind.OLLAMA_MANAGE, dialect="ollama", advice=advice)
        for path, advice in {
            b"/api/pull": f"fetch weights with `pilotlight weights pull SOURCE`, or {_ADD}",
            b"/api/push": "upload weights with `pilotlight weights push FILE REGISTRY`",
            b"/api/create": _ADD,
            b"/api/copy": "add the new name to spec.aliases of the Model",
        }.items()
    },
}
OLLAMA_BLOB: Final = Operation(Kind.OLLAMA_MANAGE, dialect="ollama", advice=_ADD)
"""POST or HEAD of a file, which `ollama create` sends first."""
_OLLAMA_BLOBS: Final = b"/api/blobs/"
OLLAMA_GET = {
    b"/api/tags": Operation(Kind.OLLAMA_TAGS, dialect="ollama"),
    b"/api/ps": Operation(Kind.OLLAMA_PS, dialect="ollama"),
    b"/api/version": Operation(Kind.OLLAMA_VERSION, dialect="ollama"),
}
OLLAMA_DELETE = {
    b"/api/delete": Operation(
        Kind.OLLAMA_MANAGE, dialect="ollama",
        advice="remove the Model's document and reload, or run `kubectl delete models.pilotlight.dev NAME`",
    )
}  # fmt: skip

_POST: Final = OPENAI | ANTHROPIC | RERANK_AND_TOKENIZE | OLLAMA
_GET: Final = (
    GET
    | OLLAMA_GET
    | {b"/": Operation(Kind.LANDING)}
    | {path: Operation(Kind.HEALTH) for path in (b"/health", b"/healthz", b"/v1/health")}
)
_PREFLIGHT: Final = Operation(Kind.PREFLIGHT)
_SEGMENT = rb"[A-Za-z0-9(\[][A-Za-z0-9._:@+()\[\] -]*+"
_NAME = re.compile(_SEGMENT + rb"(?:/" + _SEGMENT + rb")*+")
"""A model's name in a path; it may be `namespace/name` or `model:adapter`. No segment begins with a dot."""
_NAME_BYTES_MAX = 256
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_VARIANT_BYTES_MAX = 1024
"""A longer path has no variants and no suggestion."""
_ALLOW_GET, _ALLOW_POST, _ALLOW_DELETE = b"GET, HEAD, OPTIONS", b"POST, OPTIONS", b"DELETE, OPTIONS"


def find_operation(method: bytes, path: bytes) -> Operation | None:
    """Return the operation for a method (case-sensitive) and a literal path without its query; None means 404.

    HEAD gives the operation of GET; the caller sends the response without its body (RFC 9110, 9.3.2).
    """
    found = _POST.get(path) if method == b"POST" else None  # nearly all requests
    found = found or _find(method, path)
    if found is not None or len(path) > _VARIANT_BYTES_MAX:
        return found
    variant = _plain_path(path)
    return (None if variant == path else _find(method, variant)) or _find(method, b"/v1" + variant)


def _find(method: bytes, path: bytes) -> Operation | None:
    posted = _posted(path)
    if posted is not None and (method == b"POST" or (method == b"HEAD" and posted is OLLAMA_BLOB)):
        return posted
    got, deleted = _got(path), OLLAMA_DELETE.get(path)
    if got is not None and method in {b"GET", b"HEAD"}:
        return got
    if deleted is not None and method == b"DELETE":
        return deleted
    if method == b"OPTIONS":
        return _PREFLIGHT if posted or got or deleted else None
    return _not_allowed(posted, _ALLOW_POST) or _not_allowed(got, _ALLOW_GET) or _not_allowed(deleted, _ALLOW_DELETE)


def _plain_path(path: bytes) -> bytes:
    """Return the path with one slash at the beginning, none at the end, and `/v1` once."""
    path = b"/" + path.lstrip(b"/")
    while path.startswith(b"/v1/v1/"):
        path = path[3:]
    return path[:-1] if path.endswith(b"/") and path != b"/" else path


def _suggestions() -> dict[bytes, str]:
    """Return the right path by the last one or two segments of a path, in lower case, in plural and singular."""
    found = {b"chat": "/v1/chat/completions", b"chat/completion": "/v1/chat/completions"}
    rows = [*((name, b"/v1/" + name) for name in INFER), (b"models", b"/v1/models")]
    rows += [(path.rpartition(b"/")[2], path) for path in (*RERANK_AND_TOKENIZE, *ANTHROPIC, b"/health")]
    rows += [(path[1:], path) for path in (*OLLAMA, *OLLAMA_GET)]
    rows += [(path[5:], path) for path in (b"/api/generate", b"/api/embed", b"/api/tags", b"/api/ps", b"/api/show")]
    for name, path in rows:
        found.setdefault(name, path.decode())
        found.setdefault(name.removesuffix(b"s"), path.decode())
    return found


_SUGGESTIONS = _suggestions()


def suggest_path(path: bytes) -> str:
    """Return the path that was probably meant by an unknown one, or an empty string. It is always a constant."""
    if len(path) > _VARIANT_BYTES_MAX:
        return ""
    segments = [segment for segment in path.lower().partition(b";")[0].split(b"/") if segment]
    for count in (2, 1):
        known = _SUGGESTIONS.get(b"/".join(segments[-count:]).replace(b"%2f", b"/"))
        if known is not None:
            return known
    return ""


def _posted(path: bytes) -> Operation | None:
    return _POST.get(path) or (OLLAMA_BLOB if path.startswith(_OLLAMA_BLOBS) else _deployed(path))


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

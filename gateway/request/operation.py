"""What a path of the inference port means. Owns the words `Kind` and `Operation` that the tables of dialects are made
of.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

Dialect = Literal["openai", "anthropic", "jina", "vllm"]


class Kind(Enum):
    """What the edge does with a request."""

    INFER = "infer"
    """A Call: goes to an engine."""
    LIST_MODELS = "list_models"
    GET_MODEL = "get_model"
    HEALTH = "health"
    """A constant 200."""
    PREFLIGHT = "preflight"
    """OPTIONS on a path that exists."""
    NOT_ALLOWED = "not_allowed"
    """A path that exists, with a method that it does not take: 405 (RFC 9110, 15.5.6)."""


class Operation(NamedTuple):
    """One row. Only INFER has an `engine_path`: the path at the engine, ours and literal, never the client's bytes."""

    kind: Kind
    engine_path: bytes = b""
    dialect: Dialect = "openai"
    """Whose form errors take, and what an engine must speak to serve it."""
    multipart: bool = False
    """The body may also be multipart/form-data."""
    usage: bool = False
    """Its streams take `stream_options.include_usage`."""
    salted: bool = False
    """Engines that keep prefix caches apart take `cache_salt` here, and those that want `lora` take it."""
    model: str | None = None
    """The model's name where the path holds it (Azure's deployments, GET /v1/models/NAME), percent-decoded."""
    allow: bytes = b""
    """Of NOT_ALLOWED: the methods that the path takes, as the `Allow` header says them (RFC 9110, 10.2.1)."""

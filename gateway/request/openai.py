"""The OpenAI paths (interfaces, section 3), also under /openai, and Azure's deployments of the same operations."""

from __future__ import annotations

from gateway.request.operation import Kind, Operation


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
"""By the part of the path after /v1/ (and after Azure's deployment)."""

ROOTS = (b"/v1/", b"/openai/v1/")
POST = {root + name: operation for root in ROOTS for name, operation in INFER.items()}
GET = {root + b"models": Operation(Kind.LIST_MODELS) for root in ROOTS}
GET_MODEL_ROOTS = tuple(root + b"models/" for root in ROOTS)
DEPLOYMENTS = b"/openai/deployments/"
DEPLOYED = sorted(((b"/" + name, operation) for name, operation in INFER.items()), key=lambda row: -len(row[0]))
"""What may follow a deployment's name; longest first, for `/chat/completions` ends in `/completions`."""

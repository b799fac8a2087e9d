"""The Anthropic paths, passed through to engines that speak them (interfaces, section 3)."""

from __future__ import annotations

from gateway.request.operation import Kind, Operation

POST = {
    path: Operation(Kind.INFER, path, dialect="anthropic") for path in (b"/v1/messages", b"/v1/messages/count_tokens")
}

"""Builds requests for dispatch: finds the tenant and the Model, and edits or translates the body for the engine.

A body is translated to OpenAI's API, edited, and then translated to Triton's API if the engine has only that.

The checks have the same order as those of a head (`gateway.server.precheck`). A request of Ollama's API that asks to
stop a model is answered at once and changes nothing, because the Model's settings decide when it stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from autoscaler.contract import ModelEntry, TenantEntry
from gateway.dialects import (
    messages_requests,
    ollama_requests,
    rerank,
    responses_requests,
    translated_request,
    triton_requests,
)
from gateway.dialects.messages_requests import TranslatedMessages
from gateway.dialects.ollama_responses import ReplyConverter
from gateway.dialects.rerank import TranslatedRerank
from gateway.dialects.responses_requests import TranslatedResponses
from gateway.dialects.triton_requests import TritonRequest
from gateway.dispatch.call import Call
from gateway.errors import out_of_memory, too_large, translated_too_large, unsupported_dialect
from gateway.http import responses
from gateway.http.body_buffers import LARGE_BYTES, Body, ChunkedBody
from gateway.http.request_head import Head, Request
from gateway.policy.request_policy import Policy
from gateway.request import body_members
from gateway.request.api_routes import Dialect, Operation
from gateway.request.auth import cache_salt
from gateway.request.body_members import Peek
from gateway.request.headers import Asked, get_call_headers
from gateway.request.multipart import Form
from gateway.server import precheck
from gateway.server.proxied_call import ProxiedCall
from gateway.server.translated_call import (
    OLLAMA_JSON,
    MessagesCall,
    OllamaCall,
    RerankCall,
    ResponsesCall,
    TranslatedCall,
    TritonCall,
    timestamp,
)

_JSON = b"application/json"
Translating = TypeVar("Translating", bound=TranslatedCall)

if TYPE_CHECKING:
    from gateway.server.connection import Connection
    from gateway.server.context import GatewayContext


def admit_call(
    gateway: GatewayContext, client: Connection, request: Request, operation: Operation, now_s: float
) -> ProxiedCall:
    """Build the Call for a Request, not yet known to dispatch. Raises CallError."""
    head = request.head
    tenant, headers = gateway.tenant(head), get_call_headers(head)
    if headers.error is not None:
        raise headers.error.with_traceback(None)  # the cached error would otherwise keep every traceback
    precheck.check_media(gateway, head, operation, headers)
    if operation.model or headers.model:
        precheck.check_model(gateway, tenant, operation, headers)
    directory = gateway.directory
    default, watched = directory.settings.default_model, directory.watched
    peek = body_members.read_body(operation, request.body, headers.content_type, headers.model, default, watched)
    entry = directory.names.resolve(tenant, peek.model)
    if operation.dialect not in entry.dialects:
        return _admit_translated_call(gateway, client, request, operation, tenant, entry, peek, now_s)
    if operation.dialect == "responses" and isinstance(peek, Peek):
        responses_requests.check_stateless(peek.members)
    salt = cache_salt(tenant.name) if entry.takes_cache_salt else None
    asks_usage = entry.takes_stream_options
    policy = None if directory.policies is None else directory.policies.find(tenant, entry, peek.model)
    body = body_members.edit_body(
        operation, peek, entry.served_name, salt, entry.lora, include_usage=asks_usage, policy=policy
    )
    deadline_s = now_s + min(entry.queue.wait_seconds_max, headers.wait_s)
    priority, stream = min(tenant.priority_max, headers.priority), peek.stream
    call = Call(
        client.request_id, tenant.name, entry.name, now_s, deadline_s, priority, len(body), stream, operation.dialect
    )
    proxied = ProxiedCall(call, gateway, client, head, operation, entry, body)
    if policy is not None:
        proxied.apply_checks(policy, is_form=isinstance(peek, Form))
    if stream and operation.usage and not peek.wants_usage:
        proxied.drop_usage = asks_usage
        proxied.counts_tokens = not asks_usage
    return proxied


def admit_ollama_call(
    gateway: GatewayContext, client: Connection, request: Request, operation: Operation, now_s: float
) -> OllamaCall | None:
    """Build the Call for a Request, not yet known to dispatch; None if it has been answered. Raises CallError."""
    head = request.head
    tenant, headers = gateway.tenant(head), get_call_headers(head)
    if headers.error is not None:
        raise headers.error.with_traceback(None)  # the cached error would otherwise keep every traceback
    precheck.check_media(gateway, head, operation, headers)
    translated = ollama_requests.translate_request(operation, _whole_body(request))
    peek = _read_translated(gateway, translated.target, translated.body, headers)
    entry = gateway.directory.names.resolve_tagged(tenant, peek.model)
    precheck.check_dialect(translated.target, entry)
    if translated.action == "unload":
        _reply(gateway, client, head, ReplyConverter(translated, entry.name, timestamp, dict).loaded("unload"))
        return None
    is_sent = not translated.action
    made = _prepare(gateway, client, request, tenant, entry, translated.target, peek, "ollama", now_s, is_sent=is_sent)
    return _apply(OllamaCall(made.call, gateway, client, head, entry, made.body, made.triton, translated), made, entry)


def _admit_translated_call(  # noqa: PLR0917  one caller passes them in this order
    gateway: GatewayContext, client: Connection, request: Request, operation: Operation, tenant: TenantEntry,
    entry: ModelEntry, peek: Peek | Form, now_s: float,
) -> TranslatedCall:  # fmt: skip
    """Build the Call for a Request to an engine without the API of its path. Raises CallError: 400 if the API cannot be
    translated either.
    """
    precheck.check_dialect(operation, entry)
    head = request.head
    headers = get_call_headers(head)
    if entry.triton is not None and operation.engine_path in triton_requests.PATHS:
        if isinstance(request.body, ChunkedBody):  # edits of pieces would move their room in the budget
            peek = _read_translated(gateway, operation, _whole_body(request), headers)
        made = _prepare(gateway, client, request, tenant, entry, operation, peek, operation.dialect, now_s)
        call = TritonCall(made.call, gateway, client, head, operation, entry, made.body, made.triton, peek.model)
        return _apply(call, made, entry)
    translated = _translate(operation, _whole_body(request), entry)
    if operation.model is not None:  # Azure's paths
        translated.target = translated.target._replace(model=operation.model)
    peek = _read_translated(gateway, translated.target, translated.body, headers)
    made = _prepare(gateway, client, request, tenant, entry, translated.target, peek, operation.dialect, now_s)
    if isinstance(translated, TranslatedMessages):
        messages = MessagesCall(made.call, gateway, client, head, entry, made.body, made.triton, translated)
        return _apply(messages, made, entry)
    if isinstance(translated, TranslatedResponses):
        answers = ResponsesCall(made.call, gateway, client, head, entry, made.body, made.triton, translated)
        return _apply(answers, made, entry)
    return _apply(RerankCall(made.call, gateway, client, head, entry, made.body, translated), made, entry)


def _translate(
    operation: Operation, body: bytes, entry: ModelEntry
) -> TranslatedMessages | TranslatedResponses | TranslatedRerank:
    """Translate a body to another API of OpenAI, or to another form of rerank. Raises CallError 400."""
    if operation.dialect == "anthropic":
        return messages_requests.translate_messages(body)
    if operation.dialect == "responses":
        return responses_requests.translate_responses(body)
    target = rerank.find_target(entry.dialects)
    if target is None:
        raise unsupported_dialect()
    return rerank.translate_rerank(operation, body, target)


def _whole_body(request: Request) -> bytes:
    body = request.body
    if len(body) > translated_request.BODY_BYTES_MAX:
        raise translated_too_large(translated_request.BODY_BYTES_MAX)
    if isinstance(body, bytes):
        return body
    if not isinstance(body, ChunkedBody):
        raise TypeError("only forms are forwarded while they arrive")
    return body.join()


def _read_translated(gateway: GatewayContext, operation: Operation, body: bytes, headers: Asked) -> Peek | Form:
    """Read a body that is, or will be, translated. Raises CallError."""
    if len(body) > gateway.body_bytes_max:
        raise too_large(gateway.body_bytes_max)
    default = gateway.directory.settings.default_model
    return body_members.read_body(operation, body, _JSON, headers.model, default)


class _Prepared(NamedTuple):
    """A request whose response is converted. `body` is that for the engine, `checked` that for external checks."""

    call: Call
    body: Body
    checked: bytes
    policy: Policy | None
    triton: TritonRequest | None


def _prepare(  # noqa: PLR0917  three callers pass them in this order
    gateway: GatewayContext, client: Connection, request: Request, tenant: TenantEntry, entry: ModelEntry,
    operation: Operation, peek: Peek | Form, dialect: Dialect, now_s: float, *, is_sent: bool = True,
) -> _Prepared:  # fmt: skip
    """Edit a body of OpenAI's API as on other paths, and translate it for Triton if the engine is one and the body is
    sent. Raises CallError.
    """
    headers, policies = get_call_headers(request.head), gateway.directory.policies
    salt = cache_salt(tenant.name) if entry.takes_cache_salt else None
    policy = None if policies is None else policies.find(tenant, entry, peek.model)
    asks_usage = entry.takes_stream_options and entry.triton is None
    edited = body_members.edit_body(
        operation, peek, entry.served_name, salt, entry.lora, include_usage=asks_usage, policy=policy
    )
    if not isinstance(edited, bytes):
        raise TypeError("a body is joined before it is translated")
    triton: TritonRequest | None = None
    if entry.triton is not None and is_sent:
        wants_usage = dialect != operation.dialect or (isinstance(peek, Peek) and peek.wants_usage)
        triton = triton_requests.translate_request(
            operation.engine_path, edited, entry.triton, entry.served_name, wants_usage=wants_usage
        )
    body = _counted(gateway, request.body, edited if triton is None else triton.body)
    deadline_s = now_s + min(entry.queue.wait_seconds_max, headers.wait_s)
    priority = min(tenant.priority_max, headers.priority)
    call = Call(
        client.request_id, tenant.name, entry.name, now_s, deadline_s, priority, len(body), peek.stream, dialect
    )  # fmt: skip
    return _Prepared(call, body, edited, policy, triton)


def _apply(call: Translating, made: _Prepared, entry: ModelEntry) -> Translating:
    """Prepare the external checks, and the counting of tokens if the engine does not report them. Raises CallError."""
    if made.policy is not None:
        call.apply_checks(made.policy, body=made.checked)
    call.counts_tokens = call.call.stream and not entry.takes_stream_options and entry.triton is None
    return call


def _counted(gateway: GatewayContext, received: Body, body: bytes) -> Body:
    """Return a translated body that is counted with its own size: a large one in the budget, as it is here, a small one
    by dispatch while it is queued. The received body is dropped. Raises CallError 503 if there is no room for it.
    """
    before = received if isinstance(received, ChunkedBody) else None
    if len(body) <= LARGE_BYTES:
        gateway.discard(before)
        return body
    out = ChunkedBody()
    out.parts.append(body)
    out.size = len(body)
    if not gateway.room.exchange(before, out):
        raise out_of_memory()
    gateway.discard(before)
    return out


def _reply(gateway: GatewayContext, client: Connection, head: Head, document: bytes) -> None:
    """Answer a request that needs no engine."""
    close = not head.keep_alive or gateway.closing
    client.write(
        responses.render_response(200, document, client.id_bytes, close=close, more=client.cors, kind=OLLAMA_JSON)
    )
    client.answered(close=close)

"""The error taxonomy of the inference port and its rendering (interfaces, section 3, Errors).

Defines every status, type, code and message that a client can get from the gateway, rendered as JSON or as an in-stream
event, in the format of OpenAI, Anthropic or Ollama. Messages never echo input and never contain an address.
"""

from __future__ import annotations

import math

import msgspec

MAX_RETRY_AFTER_S = 120.0
"""SDKs give up on longer values."""


class CallError(Exception):
    """The error response of one request. `close` ends the connection.
    `retry_after_s` is set on every 429 and 503, `allow` (methods) on every 405.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool = True,
        allow: bytes = b"",
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type or _TYPES.get(status, "server_error")
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.allow = allow
        self.close = close

    def __repr__(self) -> str:
        return f"<CallError {self.status} {self.code}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallError) and (self.status, self.code, self.message) == (
            other.status,
            other.code,
            other.message,
        )

    def __hash__(self) -> int:
        return hash((self.status, self.code, self.message))


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    504: "timeout_error",
}
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    421: "Misdirected Request",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


def invalid_request(message: str, *, param: str | None = None, close: bool = False) -> CallError:
    """400: the client's request is invalid."""
    return CallError(400, "invalid_request", message, param=param, close=close)


def invalid_api_key() -> CallError:
    """401, the same for a missing and an unknown key."""
    return CallError(401, "invalid_api_key", "this port requires a valid API key; send Authorization: Bearer KEY")


def ambiguous_api_keys() -> CallError:
    """401: two valid keys of different tenants."""
    return CallError(
        401,
        "invalid_api_key",
        "two valid API keys of different tenants were sent; send one, in Authorization, x-api-key or api-key",
    )


def origin_not_allowed() -> CallError:
    """403: a web page sent the request, and its origin is not in `cors.origins`."""
    return CallError(
        403,
        "origin_not_allowed",
        "because this port requires no API key, it rejects requests from web pages; to allow one, add its origin to "
        "cors.origins in Settings",
    )


def misdirected_request() -> CallError:
    """421: anyone could have registered the name in Host (RFC 9110, 15.5.20)."""
    return CallError(
        421,
        "misdirected_request",
        "this port needs no API key, so the Host header must be localhost, an IP address or another local name; to "
        "allow this name, add it to hosts in Settings",
    )


def request_rejected(what: str, reason: str) -> CallError:
    """403: an external check rejected the request or its answer. `reason`: the text of the check."""
    because = f": {reason}" if reason else ""
    return CallError(
        403, "request_rejected", f"a check of this model or tenant rejected {what}{because}", should_retry=False
    )


def model_not_found() -> CallError:
    """404, the same for a model that does not exist and one that this tenant may not call."""
    return CallError(
        404,
        "model_not_found",
        "no such model, or it may not be called with this key; GET /v1/models lists those that may",
        param="model",
    )


def path_not_found(suggestion: str = "") -> CallError:
    """404 for every unknown path. `suggestion` is the path that was probably meant."""
    message = "no such path on the inference port; use one of its API, such as /v1/chat/completions"
    return CallError(404, "not_found", f"no such path; use {suggestion}" if suggestion else message)


def method_not_allowed(allow: bytes) -> CallError:
    """405: the path exists, but not with this method (RFC 9110, 15.5.6). `allow`: the allowed methods."""
    message = f"this path does not support this method; it supports {allow.decode()}"
    return CallError(405, "method_not_allowed", message, allow=allow)


def too_many_chunks() -> CallError:
    """400: the body has thousands of tiny chunks."""
    return invalid_request("the body has too many small chunks; send larger ones", close=True)


def pipelining_limit_exceeded() -> CallError:
    """400: too many bytes of later requests arrived before the response; nothing after them can be read."""
    return invalid_request("too many pipelined bytes; wait for the response before sending more", close=True)


def unsupported_dialect() -> CallError:
    """400: the model's engine does not support this API endpoint."""
    return invalid_request(
        "the engine of this model does not support this API endpoint; use another endpoint or another model",
        param="model",
    )


def _request_timeout(message: str) -> CallError:
    return CallError(408, "request_timeout", message, close=True)


def head_timeout() -> CallError:
    """408: the head arrived too slowly."""
    return _request_timeout(
        "the head of the request did not arrive in time; send it faster, or raise limits.headerSecondsMax in Settings"
    )


def body_stalled() -> CallError:
    """408: no byte of the body arrived for too long."""
    return _request_timeout(
        "no further byte of the body arrived in time; send it without pauses, or raise limits.bodySecondsMax in "
        "Settings"
    )


def body_too_slow() -> CallError:
    """408: the body arrived below the minimum rate."""
    return _request_timeout(
        "the body arrived too slowly; send it faster, or lower limits.bodyBytesPerSecondMin in Settings"
    )


def body_hinders_others() -> CallError:
    """408: the body arrived slowly while others waited for memory."""
    return _request_timeout(
        "the body arrived too slowly while other bodies wait for memory; send it faster, or raise limits.memoryBytes "
        "in Settings"
    )


def too_large(limit_bytes: int) -> CallError:
    """413: the body exceeds the limit."""
    message = (
        f"the body is larger than {limit_bytes} bytes; send a smaller one, or raise limits.bodyBytesMax in Settings"
    )
    return CallError(413, "too_large", message, close=True)


def translated_too_large(limit_bytes: int) -> CallError:
    """413: the body exceeds the limit of bodies that are translated; no setting changes it."""
    message = f"the body is larger than {limit_bytes} bytes, the limit of this endpoint; send a smaller one"
    return CallError(413, "too_large", message, close=True)


def unsupported_media_type() -> CallError:
    """415: neither JSON nor (where allowed) multipart, or an encoded body."""
    return CallError(
        415,
        "unsupported_media_type",
        "the type or encoding of the body is not supported; send plain application/json (or multipart/form-data where "
        "the path takes files)",
    )


def header_too_large() -> CallError:
    """431: the request head exceeds the limit."""
    return CallError(
        431, "header_too_large", "the request head is too large; send fewer or shorter headers", close=True
    )


def queue_full(retry_after_s: float) -> CallError:
    """429: the model's queue in this gateway is full."""
    message = "too many requests are waiting for this model; try again after the time in Retry-After"
    return CallError(429, "queue_full", message, retry_after_s=retry_after_s)


def model_starting(expected_wait_s: float | None, retry_after_s: float) -> CallError:
    """503: the model is cold, and the deadline has passed or comes before the estimated start."""
    about = "" if expected_wait_s is None else f", ready in about {math.ceil(expected_wait_s)} s"
    message = f"the model is starting{about}; try again after the time in Retry-After, or raise the client's timeout"
    return CallError(503, "model_starting", message, retry_after_s=retry_after_s)


def deadline_reached(retry_after_s: float) -> CallError:
    """503: the model is warm, but the request was queued, or checked, until its deadline."""
    message = (
        "this request got no slot of the model before its deadline; try again after the time in Retry-After, or raise "
        "the client's timeout"
    )
    return CallError(503, "overloaded", message, retry_after_s=retry_after_s)


def service_unavailable(code: str, message: str, retry_after_s: float, *, should_retry: bool = True) -> CallError:
    """503 with a code from the autoscaler: model_start_failed, model_faulty, no_capacity, overloaded."""
    return CallError(503, code, message, retry_after_s=retry_after_s, should_retry=should_retry)


def model_faulty() -> CallError:
    """503: this gateway raised an exception for the model or one of its requests."""
    message = "an internal error of the gateway concerns this model; see event=model_faulty in the gateway's log"
    return service_unavailable("model_faulty", message, 60.0, should_retry=False)


def capacity_pending(wait_s: float, retry_after_s: float) -> CallError:
    """503: the model waits for more capacity, which arrives after the deadline."""
    message = f"capacity for the model is being added; expected in about {math.ceil(wait_s)} s; try again then"
    return CallError(503, "no_capacity", message, retry_after_s=retry_after_s)


def gateway_starting() -> CallError:
    """503: this gateway has just started and has no catalogue yet."""
    return CallError(503, "overloaded", "the gateway has just started; try again", retry_after_s=1.0)


def out_of_memory() -> CallError:
    """503: this gateway is short of memory and accepts no request (or none that waits for a start)."""
    return CallError(503, "overloaded", "the gateway is short of memory; try again", retry_after_s=2.0)


def check_failed(*, should_retry: bool = True) -> CallError:
    """503: an external check has no valid response, and its policy does not allow the request then."""
    fix = "try again later, or see" if should_retry else "see"
    message = f"a check of this model or tenant failed; {fix} event=check_failed in the gateway's log"
    return CallError(503, "check_failed", message, retry_after_s=2.0, should_retry=should_retry)


def too_many_checks() -> CallError:
    """503: this gateway waits for too many external checks."""
    return CallError(503, "overloaded", "the gateway waits for too many checks; try again", retry_after_s=1.0)


def unchecked_stream() -> CallError:
    """400: whole answers are checked, which a stream does not have before its end."""
    return invalid_request(
        "answers of this model are checked when they are complete; send stream: false", param="stream"
    )


def unchecked_answer() -> CallError:
    """502: the answer is too large for its check."""
    message = "the answer is larger than its check allows; request a shorter one"
    return CallError(502, "upstream_error", message, should_retry=False)


def translated_answer_too_large(limit_bytes: int) -> CallError:
    """502: the answer exceeds the limit of answers that are translated; no setting changes it."""
    message = (
        f"the answer is larger than {limit_bytes} bytes, the limit of translated answers; send fewer inputs or lower "
        "max_tokens"
    )
    return CallError(502, "upstream_error", message, should_retry=False)


def shutting_down() -> CallError:
    """503: this gateway is stopping and the request was still queued."""
    return CallError(503, "shutting_down", "the gateway is stopping; try again", retry_after_s=1.0)


def upstream_error() -> CallError:
    """502: the engine failed before the first byte, also on the retry; or it failed within a stream."""
    return CallError(
        502, "upstream_error", "the engine ended the response early; try again, or read the log of the engine"
    )


def engine_distrusted() -> CallError:
    """502: TLS with the engine failed, mostly because of its certificate. The log has the reason."""
    message = (
        "the gateway does not trust the TLS certificate of the engine, or the engine has no TLS; correct the "
        "certificate, or tls.caFile in Settings; event=engine_distrusted in the gateway's log has the reason"
    )
    return CallError(502, "upstream_error", message, should_retry=False)


def upstream_timeout() -> CallError:
    """504: the engine's first byte, next byte or whole response took too long."""
    return CallError(
        504,
        "upstream_timeout",
        "the engine did not respond in time; send a smaller request, or raise firstByteSecondsMax, stallSecondsMax or "
        "responseSecondsMax of the model",
        should_retry=False,
    )


def render_error_body(error: CallError, dialect: str = "openai") -> bytes:
    """Render the error as a JSON document; Anthropic clients get the same object wrapped as they expect, and Ollama's
    clients get only the message.
    """
    if dialect == "ollama":
        return msgspec.json.encode({"error": error.message})
    inner = _members(error)
    return msgspec.json.encode({"type": "error", "error": inner} if dialect == "anthropic" else {"error": inner})


def _members(error: CallError) -> dict[str, str | None]:
    return {"message": error.message, "type": error.type, "code": error.code, "param": error.param}


def render_error_event(error: CallError, dialect: str = "openai") -> bytes:
    """Render the error as one SSE event (Ollama: one line), for a stream whose head has been sent. Never followed by
    `[DONE]`.
    """
    if dialect == "ollama":
        return render_error_body(error, dialect) + b"\n"
    if dialect == "responses":
        return render_responses_error(_members(error))
    name = b"event: error\n" if dialect == "anthropic" else b""
    return name + b"data: " + render_error_body(error, dialect) + b"\n\n"


def render_responses_error(error: dict[str, str | None]) -> bytes:
    """Render an error as an event of the Responses API. It is also in the member `error`, as in the streams of other
    APIs, because OpenAI's clients raise only that.
    """
    return b"event: error\ndata: " + msgspec.json.encode({**error, "type": "error", "error": error}) + b"\n\n"


def render_error_headers(error: CallError) -> list[tuple[bytes, bytes]]:
    """Return its headers: Retry-After (whole seconds, rounded up), retry-after-ms, x-should-retry, Allow."""
    out: list[tuple[bytes, bytes]] = []
    if error.allow:
        out.append((b"allow", error.allow))
    if error.retry_after_s is not None:
        seconds = min(max(error.retry_after_s, 0.0), MAX_RETRY_AFTER_S)
        out.append((b"retry-after", b"%d" % max(1, math.ceil(seconds))))
        out.append((b"retry-after-ms", b"%d" % math.ceil(seconds * 1000)))
    if error.retry_after_s is not None or not error.should_retry:
        out.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
    return out


def reason_phrase(status: int) -> str:
    """Return the reason phrase of a status that the gateway sends."""
    return _REASONS.get(status, "Error")

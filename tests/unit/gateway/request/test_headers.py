"""What the headers of a request specify, and which of them an engine receives."""

from __future__ import annotations

import math
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import CallError
from gateway.http.request_head import HEAD_BYTES_MAX, KEPT, Head
from gateway.http.request_reader import RequestReader
from gateway.request.api_routes import find_operation
from gateway.request.headers import UPSTREAM_HEAD_BYTES_MAX, Asked, read_call_headers, request_id, upstream_head
from tests.support.example_budget import examples

TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def head_with(**headers: str) -> Head:
    """Return the head of a chat request with these headers (underscores for hyphens)."""
    return Head(
        b"POST",
        b"/v1/chat/completions",
        {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()},
    )


def asked(**headers: str) -> Asked:
    """Parse these headers of a request."""
    return read_call_headers(head_with(**headers).headers)


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, math.inf),
        ({"prefer": "wait=10"}, 10.0),
        ({"prefer": "Wait = 10"}, 10.0),
        ({"prefer": 'respond-async, wait="10"; x=y, wait=99'}, 10.0),
        ({"prefer": 'a="x, wait=3", wait=10'}, 10.0),
        ({"prefer": "wait=0"}, 0.0),
        ({"prefer": "wait=9999999"}, 9999999.0),
        ({"prefer": "wait"}, math.inf),
        ({"prefer": "wait=-1"}, math.inf),
        ({"prefer": "wait=1.5"}, math.inf),
        ({"prefer": "wait=soon, wait=10"}, math.inf),
        ({"prefer": "handling=lenient;;a"}, math.inf),
        ({"prefer": "=,;"}, math.inf),
        ({"x_stainless_read_timeout": "600"}, 540.0),
        ({"x_stainless_read_timeout": "60"}, 54.0),
        ({"x_stainless_read_timeout": "1.5"}, 1.35),
        ({"x_stainless_read_timeout": "0"}, math.inf),
        ({"x_stainless_read_timeout": "None"}, math.inf),
        ({"x_stainless_read_timeout": "60", "prefer": "wait=70"}, 54.0),
        ({"x_stainless_read_timeout": "60", "prefer": "wait=7"}, 7.0),
    ],
)
def test_wait_time_is_the_lower_of_prefer_wait_and_90_percent_of_timeout(
    headers: dict[str, str], wait_s: float
) -> None:
    assert asked(**headers).wait_s == pytest.approx(wait_s)


@pytest.mark.parametrize(("value", "expected"), [("5", 5), ("-5", -5), ("0", 0), ("007", 7), ("-100", -100)])
def test_priority_is_the_integer_in_the_x_priority_header_or_zero(value: str, expected: int) -> None:
    assert asked(x_priority=value).priority == expected
    assert asked().priority == 0


@pytest.mark.parametrize("value", ["", "high", "1.5", "+1", "101", "-101", "1000", "--1", "1 2"])
def test_invalid_x_priority_is_rejected_with_400(value: str) -> None:
    error = asked(x_priority=value).error
    assert error is not None
    assert (error.status, "x-priority" in error.message) == (400, True)


@pytest.mark.parametrize("value", ["a", "A-b_c.9", "x" * 128])
def test_valid_x_request_id_header_is_the_request_id(value: str) -> None:
    assert request_id(head_with(x_request_id=value)) == value


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a/b", "é", "a\n", 'a"'])
def test_invalid_or_missing_x_request_id_header_yields_no_request_id(value: str) -> None:
    assert request_id(head_with(x_request_id=value)) is None
    assert request_id(head_with()) is None


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"authorization": "Bearer sk-1"}, b"sk-1"),
        ({"authorization": "bearer  sk-1"}, b"sk-1"),
        ({"x_api_key": "sk-1"}, b"sk-1"),
        ({"api_key": "sk-1"}, b"sk-1"),
        ({"authorization": "Bearer sk-1", "x_api_key": "sk-1", "api_key": "sk-1"}, b"sk-1"),
        ({"authorization": "Basic dTpw"}, None),
        ({"authorization": "Basic dTpw", "api_key": "sk-1"}, b"sk-1"),
        ({"authorization": "Bearer"}, None),
        ({"authorization": "Bearer a b"}, None),
        ({"authorization": "Bearer sk-1", "api_key": ""}, b"sk-1"),
    ],
)
def test_api_key_is_read_only_from_well_formed_supported_headers(headers: dict[str, str], key: bytes | None) -> None:
    assert asked(**headers).keys_sha256 == (() if key is None else (sha256(key).hexdigest(),))


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer a", "x_api_key": "b"},
        {"authorization": "Bearer a", "api_key": "b"},
        {"x_api_key": "a", "api_key": "b"},
    ],
)
def test_different_keys_in_two_headers_are_both_returned(headers: dict[str, str]) -> None:
    assert asked(**headers).keys_sha256 == (sha256(b"a").hexdigest(), sha256(b"b").hexdigest())


def test_api_key_in_the_query_string_is_not_read_as_the_key() -> None:
    request = RequestReader(0).feed(b"GET /v1/models?api-key=sk-1&key=sk-1 HTTP/1.1\r\nHost: gw\r\n\r\n")
    assert request is not None
    assert read_call_headers(request.head.headers).keys_sha256 == ()


def test_x_model_header_is_read_but_rejected_if_not_ascii() -> None:
    assert asked().model is None
    assert asked(x_model="").model is None
    assert asked(x_model="lab/m").model == "lab/m"
    error = asked(x_model="\xe9").error
    assert error is not None
    assert "x-model" in error.message


@pytest.mark.parametrize(
    "value", [TRACE[:-1], TRACE.upper(), b"01" + TRACE[2:], b"00-" + b"0" * 32 + TRACE[35:], b"", TRACE + b"-x"]
)
def test_trace_context_headers_are_forwarded_only_if_valid(value: bytes) -> None:
    good = asked(traceparent=TRACE.decode(), tracestate="a=1")
    assert good.upwards == b"content-type: application/json\r\ntraceparent: %b\r\ntracestate: a=1\r\n" % TRACE
    invalid = asked(traceparent=value.decode(), tracestate="a=1")
    assert invalid.upwards == b"content-type: application/json\r\n"


def sent(head: Head) -> bytes:
    """Return the head that an engine receives for a body of 42 bytes."""
    operation = find_operation(b"POST", b"/openai/v1/chat/completions")
    assert operation is not None
    return upstream_head(read_call_headers(head.headers).upwards, operation, b"127.0.0.1:9000", 42, b"id-1")


def test_engine_receives_only_allowed_headers() -> None:
    request = RequestReader(100).feed(
        b"POST /openai/v1/chat/completions?key=sk-1 HTTP/1.1\r\nHost: gw\r\nAuthorization: Bearer sk-1\r\n"
        b"X-Api-Key: sk-1\r\nApi-Key: sk-1\r\nCookie: a=b\r\nX-Forwarded-For: 1.2.3.4\r\nAccept-Encoding: gzip\r\n"
        b"Content-Type:  application/json\r\nAccept: text/event-stream\r\nUser-Agent: OpenAI/Python 1.0\r\n"
        b"OpenAI-Beta: a\r\nAnthropic-Version: 2023-06-01\r\nX-Pilotlight-Model: m\r\nProxy-Authorization: Basic x\r\n"
        b"X-Request-Id: forged\r\nTraceparent: "
        + TRACE
        + b"\r\nTE: trailers\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi"
    )
    assert request is not None
    assert sent(request.head) == (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:9000\r\ncontent-length: 42\r\nx-request-id: id-1\r\n"
        b"content-type: application/json\r\naccept: text/event-stream\r\nuser-agent: OpenAI/Python 1.0\r\n"
        b"anthropic-version: 2023-06-01\r\nopenai-beta: a\r\ntraceparent: " + TRACE + b"\r\n\r\n"
    )


@pytest.mark.parametrize("connection", ["user-agent", "close, User-Agent", "x ,\tuser-agent\t, y"])
def test_headers_named_in_connection_are_not_forwarded(connection: str) -> None:
    upwards = sent(head_with(user_agent="u", accept="a", connection=connection))
    assert b"user-agent" not in upwards
    assert b"\r\naccept: a\r\n" in upwards


def test_connection_header_cannot_remove_headers_that_the_gateway_sets() -> None:
    upwards = sent(head_with(connection="host, content-length, x-request-id"))
    assert upwards.count(b"\r\n") == 6
    assert b"content-length: 42" in upwards


def test_oversized_upstream_head_is_rejected_with_431() -> None:
    with pytest.raises(CallError) as caught:
        sent(head_with(user_agent="u" * UPSTREAM_HEAD_BYTES_MAX))
    assert caught.value.status == 431


SECRETS = ("authorization", "x-api-key", "api-key")
FOREIGN = st.sampled_from(
    [
        *sorted(name.decode() for name in KEPT - {b"x-priority", b"x-model"}),
        "cookie",
        "forwarded",
        "x-forwarded-for",
        "keep-alive",
    ]
)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(st.dictionaries(FOREIGN, st.text("abc ,;=\t\xff", min_size=1, max_size=12), max_size=12))
def test_upstream_head_never_contains_keys_or_injected_lines(headers: dict[str, str]) -> None:
    values = {name: "CANARY" if name in SECRETS else value for name, value in headers.items()}
    upwards = sent(head_with(**values))
    assert len(upwards) <= HEAD_BYTES_MAX
    assert b"CANARY" not in upwards
    names = [line.split(b":")[0] for line in upwards[:-4].split(b"\r\n")[1:]]
    assert len(set(names)) == len(names)
    assert not {b"authorization", b"connection", b"transfer-encoding", b"cookie", b"expect"} & set(names)

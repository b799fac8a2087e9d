"""What a request's headers say about its Call, and what of them an engine gets to see."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import (
    UPSTREAM_HEAD_BYTES_MAX,
    api_key,
    header_model,
    preferences,
    priority,
    request_id,
    traceparent,
    upstream_head,
)
from gateway.dialects import lookup
from gateway.errors import CallError
from gateway.head import HEAD_BYTES_MAX, KEPT, Request
from gateway.wire import RequestReader

TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request(**headers: str) -> Request:
    """A chat request with these headers (underscores for hyphens)."""
    return Request(
        b"POST",
        b"/v1/chat/completions",
        headers={name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()},
    )


@pytest.mark.parametrize(
    ("headers", "deadline_s", "wait_zero"),
    [
        ({}, 640.0, False),
        ({"prefer": "wait=10"}, 110.0, False),
        ({"prefer": "Wait = 10"}, 110.0, False),
        ({"prefer": 'respond-async, wait="10"; x=y, wait=99'}, 110.0, False),
        ({"prefer": 'a="x, wait=3", wait=10'}, 110.0, False),
        ({"prefer": "wait=0"}, 100.0, True),
        ({"prefer": "wait=9999999"}, 640.0, False),
        ({"prefer": "wait"}, 640.0, False),
        ({"prefer": "wait=-1"}, 640.0, False),
        ({"prefer": "wait=1.5"}, 640.0, False),
        ({"prefer": "wait=soon, wait=10"}, 640.0, False),
        ({"prefer": "handling=lenient;;a"}, 640.0, False),
        ({"prefer": "=,;"}, 640.0, False),
        ({"x_stainless_read_timeout": "600"}, 640.0, False),
        ({"x_stainless_read_timeout": "60"}, 154.0, False),
        ({"x_stainless_read_timeout": "1.5"}, 101.35, False),
        ({"x_stainless_read_timeout": "0"}, 640.0, False),
        ({"x_stainless_read_timeout": "None"}, 640.0, False),
        ({"x_stainless_read_timeout": "60", "prefer": "wait=70"}, 154.0, False),
        ({"x_stainless_read_timeout": "60", "prefer": "wait=7"}, 107.0, False),
    ],
)
def test_the_soonest_bound_is_the_deadline(headers: dict[str, str], deadline_s: float, wait_zero: bool) -> None:
    found = preferences(request(**headers), 100.0, 540.0)
    assert found.deadline_s == pytest.approx(deadline_s)
    assert found.wait_zero is wait_zero


def test_the_models_own_limit_holds() -> None:
    assert preferences(request(prefer="wait=10"), 0.0, 2.5).deadline_s == 2.5


@pytest.mark.parametrize(
    ("value", "priority_max", "expected"),
    [("5", 10, 5), ("50", 10, 10), ("-5", 10, -5), ("0", 0, 0), ("1", 0, 0), ("007", 10, 7), ("-100", 0, -100)],
)
def test_a_priority_is_at_most_what_the_tenant_may_ask_for(value: str, priority_max: int, expected: int) -> None:
    assert priority(request(x_priority=value), priority_max) == expected


def test_without_the_header_the_priority_is_zero() -> None:
    assert priority(request(), 10) == 0
    assert priority(request(), -3) == -3


@pytest.mark.parametrize("value", ["", "high", "1.5", "+1", "101", "-101", "1000", "--1", "1 2"])
def test_a_priority_that_is_no_small_number_is_refused(value: str) -> None:
    with pytest.raises(CallError, match="x-priority") as caught:
        priority(request(x_priority=value), 10)
    assert caught.value.status == 400


@pytest.mark.parametrize("value", ["a", "A-b_c.9", "x" * 128])
def test_a_good_request_id_is_kept(value: str) -> None:
    assert request_id(request(x_request_id=value), lambda: "made") == value


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a/b", "é", "a\n", 'a"'])
def test_any_other_request_id_is_replaced(value: str) -> None:
    assert request_id(request(x_request_id=value), lambda: "made") == "made"
    assert request_id(request(), lambda: "made") == "made"


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
def test_the_key_is_found_in_its_three_headers(headers: dict[str, str], key: bytes | None) -> None:
    assert api_key(request(**headers)) == key


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer a", "x_api_key": "b"},
        {"authorization": "Bearer a", "api_key": "b"},
        {"x_api_key": "a", "api_key": "b"},
    ],
)
def test_two_different_keys_are_refused_and_not_echoed(headers: dict[str, str]) -> None:
    with pytest.raises(CallError) as caught:
        api_key(request(**headers))
    assert (caught.value.status, caught.value.message) == (400, "two different API keys were sent; send one")


def test_a_key_in_the_query_is_no_key() -> None:
    asked = RequestReader(0).feed(b"GET /v1/models?api-key=sk-1&key=sk-1 HTTP/1.1\r\nHost: gw\r\n\r\n")
    assert asked is not None
    assert api_key(asked) is None


def test_the_model_header_is_text() -> None:
    assert header_model(request()) is None
    assert header_model(request(x_model="")) is None
    assert header_model(request(x_model="lab/m")) == "lab/m"
    with pytest.raises(CallError, match="x-model"):
        header_model(request(x_model="\xe9"))


@pytest.mark.parametrize(
    "value", [TRACE[:-1], TRACE.upper(), b"01" + TRACE[2:], b"00-" + b"0" * 32 + TRACE[35:], b"", TRACE + b"-x"]
)
def test_only_a_valid_trace_context_is_continued(value: bytes) -> None:
    assert traceparent(request(traceparent=TRACE.decode())) == TRACE
    assert traceparent(request(traceparent=value.decode())) is None
    assert traceparent(request()) is None


def head(asked: Request, trace: bytes | None = None) -> bytes:
    operation = lookup(b"POST", b"/openai/v1/chat/completions")
    assert operation is not None
    return upstream_head(asked, operation, "127.0.0.1:9000", 42, "id-1", traceparent=trace)


def test_the_engine_gets_a_head_of_our_own() -> None:
    asked = RequestReader(100).feed(
        b"POST /openai/v1/chat/completions?key=sk-1 HTTP/1.1\r\nHost: gw\r\nAuthorization: Bearer sk-1\r\n"
        b"X-Api-Key: sk-1\r\nApi-Key: sk-1\r\nCookie: a=b\r\nX-Forwarded-For: 1.2.3.4\r\nAccept-Encoding: gzip\r\n"
        b"Content-Type:  application/json\r\nAccept: text/event-stream\r\nUser-Agent: OpenAI/Python 1.0\r\n"
        b"OpenAI-Beta: a\r\nAnthropic-Version: 2023-06-01\r\nX-Pilotlight-Model: m\r\nProxy-Authorization: Basic x\r\n"
        b"X-Request-Id: forged\r\nTraceparent: forged\r\nTE: trailers\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi"
    )
    assert asked is not None
    assert head(asked, TRACE) == (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:9000\r\ncontent-length: 42\r\nx-request-id: id-1\r\n"
        b"content-type: application/json\r\naccept: text/event-stream\r\nuser-agent: OpenAI/Python 1.0\r\n"
        b"anthropic-version: 2023-06-01\r\nopenai-beta: a\r\ntraceparent: " + TRACE + b"\r\n\r\n"
    )


@pytest.mark.parametrize("connection", ["user-agent", "close, User-Agent", "x ,\tuser-agent\t, y"])
def test_headers_named_by_connection_do_not_travel(connection: str) -> None:
    asked = request(user_agent="u", accept="a", connection=connection)
    assert b"user-agent" not in head(asked)
    assert b"\r\naccept: a\r\n" in head(asked)


def test_connection_cannot_take_away_what_is_ours() -> None:
    asked = request(connection="host, content-length, x-request-id")
    assert head(asked).count(b"\r\n") == 5
    assert b"content-length: 42" in head(asked)


def test_an_endless_head_does_not_reach_an_engine() -> None:
    with pytest.raises(CallError) as caught:
        head(request(user_agent="u" * UPSTREAM_HEAD_BYTES_MAX))
    assert caught.value.status == 431


SECRETS = ("authorization", "x-api-key", "api-key")
FOREIGN = st.sampled_from(
    [*sorted(name.decode() for name in KEPT), "cookie", "forwarded", "x-forwarded-for", "keep-alive"]
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.dictionaries(FOREIGN, st.text("abc ,;=\t\xff", min_size=1, max_size=12), max_size=12))
def test_whatever_the_client_sends_no_key_goes_up_and_lines_stay_lines(headers: dict[str, str]) -> None:
    values = {name: ("CANARY" if name in SECRETS else "") + value for name, value in headers.items()}
    sent = head(request(**values))
    assert len(sent) <= HEAD_BYTES_MAX
    assert b"CANARY" not in sent
    names = [line.split(b":")[0] for line in sent[:-4].split(b"\r\n")[1:]]
    assert len(set(names)) == len(names)
    assert not {b"authorization", b"connection", b"transfer-encoding", b"cookie", b"expect"} & set(names)

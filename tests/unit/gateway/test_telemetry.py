"""Telemetry of a gateway: documented metrics, one event per request, no sensitive data, and no blocking."""

from __future__ import annotations

import json
import os

import pytest

from autoscaler.contract import ModelName, TenantName
from gateway import telemetry
from gateway.dispatch.call import Call, Outcome
from gateway.telemetry import Telemetry
from gateway.upstream.token_usage import parse_token_usage


def ended(metrics: Telemetry, number: int = 1, tenant: str = "acme", *, cold: bool = False) -> None:
    """Record one request of 2 s: 0.5 s in the queue, first byte after 1 s."""
    call = Call(id=f"id-{number}", tenant=TenantName(tenant), model=ModelName("m"), arrived_s=10.0, deadline_s=99.0)
    call.granted_s, call.sent_s, call.first_byte_s, call.cold = 10.5, 10.501, 11.0, cold
    call.tokens_in, call.tokens_out = 3, 4
    metrics.ended(call, Outcome.COMPLETED, "200", 12.0, 0.4)


def test_ended_and_rejected_requests_are_counted_in_each_gateway_metric() -> None:
    metrics = Telemetry()
    ended(metrics)
    ended(metrics, cold=True)
    metrics.turned_away("id-9", "invalid_api_key")
    metrics.retried("m", "reset")
    lines = metrics.text([("m", 5, 2)], 0.25).decode().splitlines()
    for line in (
        'pilotlight_calls_total{code="200",model="m",outcome="completed",tenant="acme"} 2.0',
        'pilotlight_calls_total{code="invalid_api_key",model="",outcome="failed",tenant=""} 1.0',
        'pilotlight_tokens_total{direction="in",model="m",tenant="acme"} 6.0',
        'pilotlight_tokens_total{direction="out",model="m",tenant="acme"} 8.0',
        'pilotlight_upstream_retries_total{model="m",reason="reset"} 1.0',
        'pilotlight_queue_seconds_count{cold="1",model="m"} 1.0',
        'pilotlight_queue_seconds_bucket{cold="0",le="0.5",model="m"} 1.0',
        'pilotlight_first_byte_seconds_sum{cold="0",model="m"} 1.0',
        "pilotlight_overhead_seconds_count 2.0",
        'pilotlight_calls_waiting{model="m"} 5.0',
        'pilotlight_calls_running{model="m"} 2.0',
        "pilotlight_routes_age_seconds 0.25",
    ):
        assert line in lines


def test_ended_request_writes_one_event_line_with_all_its_timings() -> None:
    read, write = os.pipe()
    metrics = Telemetry(write)
    ended(metrics)
    metrics.flush()
    os.close(write)
    with os.fdopen(read) as pipe:
        (line,) = pipe.read().splitlines()
    assert line == (
        '{"event":"call","id":"id-1","model":"m","tenant":"acme","outcome":"completed","code":"200","stream":false,'
        '"cold":false,"moves":0,"replica":null,"queued_us":500000,"start_us":400000,"first_byte_us":1000000,'
        '"total_us":2000000,"tokens_in":3,"tokens_out":4}'
    )


def test_blocked_event_sink_drops_and_counts_events_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "EVENTS_MAX", 3_000)
    read, write = os.pipe()
    metrics = Telemetry(write)
    for number in range(6_000):
        ended(metrics, number)
        metrics.flush()
    dropped = next(
        line for line in metrics.text((), None).decode().splitlines() if line.startswith("pilotlight_events_dropped_")
    )
    count = float(dropped.split()[1])
    assert 0 < count <= 3_000
    seen = b""
    while len(seen.splitlines()) < 6_000 - count:
        seen += os.read(read, 1 << 20)
        metrics.flush()
    ids = [json.loads(line)["id"] for line in seen.splitlines()]
    assert ids == [f"id-{number}" for number in range(len(ids))]  # whole lines, in order
    os.close(read)
    ended(metrics, 7_000)
    metrics.flush()  # the pipe has no reader
    os.close(write)


def test_tenants_above_the_series_limit_are_counted_as_tenant_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SERIES_MAX", 80)
    metrics = Telemetry()
    for number in range(30):
        ended(metrics, tenant=f"t{number}")
    text = metrics.text((), None)
    assert text.count(b"pilotlight_calls_total{") == 11
    assert b'outcome="completed",tenant="other"} 20.0' in text


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}', (3, 4)),
        (b'{"usage": {"prompt_tokens": 3, "total_tokens": 3}, "data": []}', (3, 0)),
        (b'"usage":{"input_tokens":5,"output_tokens":1}}}\n\n...\ndata: {"usage":{"output_tokens":9}}', (5, 9)),
        (b'{"content":"\\"usage\\": {\\"prompt_tokens\\": 1}"}', (0, 0)),
        (b'{"usage":null}', (0, 0)),
        (b"", (0, 0)),
    ],
)
def test_token_usage_of_a_response_is_read_from_its_tail_or_is_zero(tail: bytes, expected: tuple[int, int]) -> None:
    assert parse_token_usage(tail) == expected


def test_models_above_the_series_limit_share_the_latency_of_model_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SERIES_MAX", 4 * telemetry.TIMES_SERIES)
    metrics = Telemetry()
    for number in range(5):
        call = Call(f"id-{number}", TenantName("acme"), ModelName(f"m{number}"), 10.0, 99.0)
        metrics.ended(call, Outcome.COMPLETED, "200", 12.0, 0.0)
    text = metrics.text((), None).decode()
    assert text.count("pilotlight_queue_seconds_count{") == 3
    assert 'pilotlight_queue_seconds_count{cold="0",model="other"} 3.0' in text

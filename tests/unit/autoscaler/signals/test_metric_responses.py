"""Metrics of engines, Triton's statistics and results of queries: what is not a finite amount is unknown."""

from __future__ import annotations

import json

import pytest

from autoscaler.signals.metric_responses import (
    LINE_BYTES_MAX,
    SAMPLES_MAX,
    MetricReading,
    read_metric,
    read_query_result,
    read_queue_seconds,
)
from autoscaler.spec.engines import COMMAND, VLLM

VLLM_0_32 = b"""# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="ada"} 2.0
vllm:num_requests_waiting{engine="1",model_name="ada"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="ada",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="ada"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="ada"} 0.75
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="ada"} 1024.0
vllm:generation_tokens_created{engine="0",model_name="ada"} 1.7e+09
"""
OLDER = b'vllm:gpu_cache_usage_perc{model_name="ada"} 0.5\n'
assert VLLM.behavior.metrics is not None
METRICS = VLLM.behavior.metrics


def test_values_of_all_engines_are_summed_and_cache_use_is_averaged() -> None:
    assert read_metric(VLLM_0_32, METRICS.waiting).value == 5.0, "the metric with a longer name is another one"
    assert read_metric(VLLM_0_32, METRICS.tokens).value == 1024.0
    assert read_metric(VLLM_0_32, METRICS.cache_use, mean=True).value == 0.5


def test_older_metric_name_is_read_if_the_newer_one_is_missing() -> None:
    assert read_metric(OLDER, METRICS.cache_use, mean=True).value == 0.5
    both = OLDER + b"vllm:kv_cache_usage_perc 0.1\n"
    assert read_metric(both, METRICS.cache_use, mean=True).value == 0.1


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe\x00", b"vllm:num_requests_running 3\n"])
def test_missing_metric_is_unknown_and_not_zero(body: bytes) -> None:
    assert read_metric(body, METRICS.waiting) == MetricReading(None, "it is missing in the engine's metrics")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1"])
def test_metric_that_is_no_finite_amount_is_unknown(value: str) -> None:
    body = f'vllm:num_requests_waiting{{engine="0"}} 1\nvllm:num_requests_waiting{{engine="1"}} {value}\n'.encode()
    assert read_metric(body, METRICS.waiting).value is None


@pytest.mark.parametrize(
    "rest",
    [
        b'{engine="0" 1', b" one", b"", b"{} 1_0", b" " + b"9" * 2000, b'{a="' + b"\\" * LINE_BYTES_MAX + b'"} 1',
        b'{a="\xff"} 1', b"{,,} 1",
    ],
)  # fmt: skip
def test_unreadable_metric_is_unknown(rest: bytes) -> None:
    assert read_metric(b"vllm:num_requests_waiting" + rest + b"\n", METRICS.waiting).value is None


def test_metric_with_too_many_lines_is_unknown() -> None:
    lines = [b'vllm:num_requests_waiting{engine="%d"} 1' % number for number in range(SAMPLES_MAX + 1)]
    assert read_metric(b"\n".join(lines[:-1]), METRICS.waiting).value == SAMPLES_MAX
    assert read_metric(b"\n".join(lines), METRICS.waiting).value is None


def test_metrics_of_any_known_engine_are_read_for_engine_command() -> None:
    metrics = COMMAND.behavior.metrics
    assert metrics is not None
    assert read_metric(b"llamacpp:requests_deferred 4\n", metrics.waiting).value == 4.0
    assert read_metric(b"sglang:num_queue_reqs 5\n", metrics.waiting).value == 5.0


def triton(*ns: object) -> bytes:
    """Statistics of a model with one version for each time in the queue, in nanoseconds."""
    stats = [{"name": "ada", "version": "1", "inference_stats": {"queue": {"count": 1, "ns": one}}} for one in ns]
    return json.dumps({"model_stats": stats}).encode()


TRITON_2_51 = b"""{"model_stats":[{"name":"slow","version":"1","last_inference":1764549000000,"inference_count":24,
"execution_count":24,"inference_stats":{"success":{"count":24,"ns":42130519020},"fail":{"count":0,"ns":0},
"queue":{"count":24,"ns":30120402118},"compute_input":{"count":24,"ns":1201344},"compute_infer":{"count":24,
"ns":12008011202},"compute_output":{"count":24,"ns":904356},"cache_hit":{"count":0,"ns":0},
"cache_miss":{"count":0,"ns":0}},"response_stats":{},"batch_stats":[],"memory_usage":[]}]}"""


def test_time_in_the_queue_is_read_from_statistics_of_triton() -> None:
    assert read_queue_seconds(TRITON_2_51).value == pytest.approx(30.12, abs=0.01)


def test_time_in_the_queue_of_all_versions_of_a_triton_model_is_summed() -> None:
    assert read_queue_seconds(triton(1_500_000_000, 500_000_000)).value == 2.0


@pytest.mark.parametrize("body", [triton(), triton(-1), triton("1"), triton(None), b"", b"{}", b"[" * 9999, b"\xff"])
def test_unreadable_triton_statistics_are_unknown(body: bytes) -> None:
    assert read_queue_seconds(body).value is None


def result(kind: str, value: object) -> bytes:
    """A response of Prometheus."""
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": value}}).encode()


@pytest.mark.parametrize(
    "body",
    [result("scalar", [1.5, "42"]), result("vector", [{"metric": {"job": "x"}, "value": [1.5, "42"]}])],
)
def test_query_result_is_one_scalar_or_a_vector_with_one_element(body: bytes) -> None:
    assert read_query_result(body).value == 42.0


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (result("vector", []), "the query returned 0 numbers instead of one"),
        (result("vector", [{"value": [1, "1"]}] * 2), "the query returned 2 numbers instead of one"),
        (result("matrix", []), "the query must return a scalar or an instant vector"),
        (result("scalar", [1, "NaN"]), "the result of the query is not a number"),
        (result("scalar", [1, "+Inf"]), "the result of the query is not a number"),
        (result("scalar", [1, "-3"]), "the result of the query is not a number"),
        (result("scalar", [1, "x"]), "the result of the query cannot be read"),
        (b'{"status":"error"}', "the result of the query cannot be read"),
        (b"[" * 9999, "the result of the query cannot be read"),
    ],
)
def test_query_result_that_is_not_one_amount_is_unknown(body: bytes, problem: str) -> None:
    assert read_query_result(body) == MetricReading(None, problem)

"""Decodes metrics of engines, Triton's statistics and results of Prometheus queries. Pure.

A value that is missing, negative, infinite or not a number is unknown, and the reason is reported. It is never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Final, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

LINE_BYTES_MAX: Final = 2048
SAMPLES_MAX: Final = 512
"""Limits of the lines of one metric: the time to parse a line grows with the square of its length."""
NANOSECONDS: Final = 1e9


class MetricReading(NamedTuple):
    """A value, or why it is unknown."""

    value: float | None
    problem: str = ""


class _Labelled(msgspec.Struct):
    value: tuple[float, str]


class _QueryData(msgspec.Struct, rename="camel"):
    result_type: str
    result: msgspec.Raw


class _QueryResponse(msgspec.Struct):
    data: _QueryData


class _Queue(msgspec.Struct):
    ns: int


class _InferenceStats(msgspec.Struct):
    queue: _Queue


class _ModelStats(msgspec.Struct):
    inference_stats: _InferenceStats


class _Statistics(msgspec.Struct):
    model_stats: list[_ModelStats]


def read_metric(body: bytes, names: Iterable[str], *, mean: bool = False) -> MetricReading:
    """Return the first metric of `names` in a response in the text format of Prometheus: the sum over its labels (such
    as the engines of one server), or their mean.
    """
    for name in names:
        try:
            values = [float(sample.value) for sample in _samples(body, name)]
        except (ValueError, OverflowError, LookupError):
            return MetricReading(None, f"{name} cannot be read")
        if values:
            total = sum(values) / (len(values) if mean else 1)
            return MetricReading(total) if _is_amount(values) else MetricReading(None, f"{name} is not a number")
    return MetricReading(None, "it is missing in the engine's metrics")


def read_queue_seconds(body: bytes) -> MetricReading:
    """Return the seconds that requests have spent in the queue of a Triton model so far, in all its versions."""
    try:
        found = msgspec.json.decode(body, type=_Statistics).model_stats
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return MetricReading(None, "the engine's statistics cannot be read")
    times = [float(one.inference_stats.queue.ns) for one in found]
    if not times or not _is_amount(times):
        return MetricReading(None, "the engine's statistics have no time in the queue")
    return MetricReading(sum(times) / NANOSECONDS)


def read_query_result(body: bytes) -> MetricReading:
    """Return the one number of the result of a query: a scalar, or a vector with one element."""
    try:
        data = msgspec.json.decode(body, type=_QueryResponse).data
        if data.result_type == "scalar":
            values = [msgspec.json.decode(data.result, type=tuple[float, str])]
        elif data.result_type == "vector":
            values = [one.value for one in msgspec.json.decode(data.result, type=list[_Labelled])]
        else:
            return MetricReading(None, "the query must return a scalar or an instant vector")
        numbers = [float(text) for _, text in values]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return MetricReading(None, "the result of the query cannot be read")
    if len(numbers) != 1:
        return MetricReading(None, f"the query returned {len(numbers)} numbers instead of one")
    return (
        MetricReading(numbers[0])
        if _is_amount(numbers)
        else MetricReading(None, "the result of the query is not a number")
    )


def _samples(body: bytes, name: str) -> Iterator[Sample]:
    """Yield the samples of one metric. All other lines are skipped, because the parser is slow."""
    start = name.encode()
    lines = [line for line in body.splitlines() if line.startswith(start)]
    if len(lines) > SAMPLES_MAX or any(len(line) > LINE_BYTES_MAX for line in lines):
        raise ValueError(f"more than {SAMPLES_MAX} lines, or lines of more than {LINE_BYTES_MAX} bytes")
    for family in text_string_to_metric_families(b"\n".join(lines).decode()):
        yield from (sample for sample in family.samples if sample.name == name)


def _is_amount(values: Iterable[float]) -> bool:
    return all(isfinite(value) and value >= 0 for value in values)

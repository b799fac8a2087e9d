"""Merging the expositions of several processes: sums, maxima, and text that any scraper parses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.server.metrics import merge_metrics

openmetrics_families: Callable[[str], Iterable[Metric]] = parser.text_string_to_metric_families
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: bytes) -> Samples:
    """(name, labels) -> value, as a scraper parses them."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families), "each family stands once"
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def process(calls: Iterable[tuple[str, int]], seconds: Iterable[float] = (), waiting: int = 0) -> bytes:
    """The exposition of one process."""
    registry = CollectorRegistry()
    counter = Counter("pilotlight_calls", 'Calls that\nhave "ended" \\o/', ("model",), registry=registry)
    for model, count in calls:
        counter.labels(model).inc(count)
    histogram = Histogram("pilotlight_queue_seconds", "Waited", buckets=(0.1, 1.0), registry=registry)
    for value in seconds:
        histogram.observe(value)
    Gauge("pilotlight_calls_waiting", "Parked", registry=registry).set(waiting)
    return generate_latest(registry)


@settings(derandomize=True, deadline=None)
@given(
    counts=st.dictionaries(st.text(max_size=8), st.integers(0, 10**6), max_size=4),
    seconds=st.lists(st.floats(0, 10), max_size=5),
    times=st.integers(1, 4),
)
def test_merging_n_equal_metrics_texts_multiplies_the_values_by_n(
    counts: dict[str, int], seconds: list[float], times: int
) -> None:
    text = process(counts.items(), seconds, waiting=3)
    one, many = samples(merge_metrics([text])), samples(merge_metrics([text] * times))
    assert one == samples(text)
    assert one.keys() == many.keys()
    for key, value in one.items():
        expected = value if key[0].endswith("_created") else value * times
        assert math.isclose(many[key], expected, rel_tol=1e-9), key


def test_metric_series_of_only_one_process_is_kept_in_the_merge() -> None:
    merged = samples(merge_metrics([process([("a", 1), ("b", 2)]), process([("b", 5), ("c", 7)])]))
    assert [merged["pilotlight_calls_total", (("model", name),)] for name in "abc"] == [1, 7, 7]


def test_histogram_buckets_sums_and_counts_are_added() -> None:
    merged = samples(merge_metrics([process((), (0.05, 0.5)), process((), (0.07, 3.0))]))
    buckets = [merged["pilotlight_queue_seconds_bucket", (("le", bound),)] for bound in ("0.1", "1.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert merged["pilotlight_queue_seconds_count", ()] == 4
    assert math.isclose(merged["pilotlight_queue_seconds_sum", ()], 3.62)


def test_age_gauge_is_merged_by_its_maximum() -> None:
    texts = [f"# TYPE pilotlight_routes_age_seconds gauge\npilotlight_routes_age_seconds {age}\n" for age in (0.5, 2.0)]
    assert samples(merge_metrics(text.encode() for text in texts)) == {("pilotlight_routes_age_seconds", ()): 2.0}


def test_special_characters_in_label_values_are_preserved() -> None:
    odd = 'quote " backslash \\ newline \n end'
    assert samples(merge_metrics([process([(odd, 4)])]))["pilotlight_calls_total", (("model", odd),)] == 4


def test_merge_of_empty_texts_is_empty() -> None:
    assert samples(merge_metrics([])) == {}
    assert samples(merge_metrics([b""])) == {}
    assert merge_metrics([], openmetrics=True) == b"# EOF\n"


@settings(derandomize=True, deadline=None)
@given(
    counts=st.dictionaries(st.text(max_size=8), st.integers(0, 10**6), max_size=4), seconds=st.lists(st.floats(0, 9))
)
def test_merged_metrics_in_openmetrics_format_have_the_same_values(
    counts: dict[str, int], seconds: list[float]
) -> None:
    texts = [process(counts.items(), seconds, waiting=3)] * 2
    families = list(openmetrics_families(merge_metrics(texts, openmetrics=True).decode()))
    read = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    assert read == {
        key: value for key, value in samples(merge_metrics(texts)).items() if not key[0].endswith("_created")
    }
    calls = next(family for family in families if family.name == "pilotlight_calls")
    assert (calls.type, calls.documentation) == ("counter", 'Calls that\nhave "ended" \\o/')

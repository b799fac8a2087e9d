"""The verdict: exactly three outcomes hold, and no response was truncated silently."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.result import Ending, Result, server_timing
from loadtest.run_verdict import compute_spread, judge_run
from tests.support.example_budget import examples

WHOLE = Result(model="m", status=200, saw_done=True, finish_reason="stop")
REFUSED = Result(model="m", status=503, errors=1, code="model_starting")
ERROR = Result(model="m", status=200, errors=1, code="upstream_error")
LEFT = Result(model="m", abandoned=True, broken="given up")
CUT = Result(model="m", status=200, broken="the connection was reset")
TWICE = Result(model="m", status=200, errors=2, code="upstream_error")
ERROR_AND_DONE = Result(model="m", status=200, errors=1, code="upstream_error", saw_done=True)
NOTHING = Result(model="m", broken="no connection", code="transport")
REDIRECT = Result(model="m", status=302)
UNCLEAR = Result(model="m", status=502, errors=1, code="http_502", clear=False)


def test_results_are_classified_as_completed_failed_abandoned_or_lost() -> None:
    endings = {
        Ending.COMPLETED: [WHOLE],
        Ending.FAILED: [REFUSED, ERROR],
        Ending.ABANDONED: [LEFT],
        Ending.LOST: [CUT, TWICE, ERROR_AND_DONE, NOTHING, REDIRECT],
    }
    assert {ending: [result.ending for result in results] for ending, results in endings.items()} == {
        ending: [ending] * len(results) for ending, results in endings.items()
    }


def test_verdict_holds_with_completed_failed_and_abandoned_requests() -> None:
    verdict = judge_run(4, [WHOLE, REFUSED, ERROR, LEFT])
    assert verdict.holds
    assert verdict.line() == "verdict holds: 4 requests, 1 completed, 2 failed, 1 abandoned, 0 lost, 0 truncated"
    assert verdict.codes == {"model_starting": 1, "upstream_error": 1}


def test_run_without_requests_has_no_verdict() -> None:
    assert judge_run(0, []).line() == "no verdict: nothing was measured"


@pytest.mark.parametrize(
    ("admitted", "results", "expected"),
    [
        (2, [WHOLE, CUT], {"holds": False, "lost": 1, "truncated": 1, "broken": {"the connection was reset": 1}}),
        (1, [NOTHING], {"holds": False, "lost": 1, "truncated": 0}),
        (2, [WHOLE], {"holds": False, "lost": 1, "broken": {"no result": 1}}),
        (1, [UNCLEAR], {"holds": True, "failed": 1, "unclear": 1}),
    ],
    ids=["truncated stream", "no connection", "no result", "error status without error object"],
)
def test_verdict_holds_only_if_no_response_is_lost(
    admitted: int, results: list[Result], expected: dict[str, object]
) -> None:
    verdict = judge_run(admitted, results)
    assert {name: getattr(verdict, name) for name in expected} == expected


@settings(derandomize=True, deadline=None, max_examples=examples(100))
@given(st.lists(st.sampled_from([WHOLE, REFUSED, ERROR, LEFT, CUT, TWICE, NOTHING]), max_size=30))
def test_verdict_counts_each_admitted_request_in_exactly_one_outcome(results: list[Result]) -> None:
    verdict = judge_run(len(results), results)
    assert verdict.admitted == verdict.completed + verdict.failed + verdict.abandoned + verdict.lost
    assert verdict.holds == (verdict.lost == 0)


def test_spread_of_100_values_has_extremes_median_and_percentiles() -> None:
    found = compute_spread([float(value) for value in range(100, 0, -1)])
    assert found is not None
    assert msgspec.structs.asdict(found) == {
        "count": 100, "min": 1.0, "median": 50.5, "p95": 95.0, "p99": 99.0, "max": 100.0,
    }  # fmt: skip
    assert compute_spread([]) is None


def test_server_timing_is_parsed_and_invalid_entries_are_skipped() -> None:
    read = server_timing('queue;dur=1.5, load;desc="weights";dur=200, cache;desc=hit, ready;dur=abc, upstream;dur="3"')
    assert read == {"queue": 1.5, "load": 200.0, "upstream": 3.0}

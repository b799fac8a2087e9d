"""Replayed requests on a cluster that is too small for their peak: all are served, all capacity is released."""

from __future__ import annotations

from functools import cache
from math import inf
from pathlib import Path

import pytest

from bench.capacity import Mean, judged, mean
from tests.simulation.trace_replay import request_arrivals
from tests.simulation.trace_replay.capacity_market import MARKETS, Bill
from tests.simulation.trace_replay.capacity_policies import OURS, Policy, points
from tests.simulation.trace_replay.replay import Outcome, play

CALLS = request_arrivals.made(1, long_s=900.0)
HEAD = "gmt_create,exec_time_seconds,checkpoint_model_version_id\n"


@cache
def outcome(policy: Policy = OURS, market: str = "fabric cheaper", faults: float = 0.3) -> Outcome:
    """Results of a run; each combination runs once."""
    return play(CALLS, MARKETS[market], policy, faults=faults)


@pytest.mark.parametrize("market", MARKETS)
def test_trace_replay_serves_every_request_and_returns_added_capacity(market: str) -> None:
    done = outcome(market=market)
    assert not done.broken
    assert (len(done.waits_s), done.gave_up) == (len(CALLS), 0)
    assert done.bill.cost > 0, "the cluster is too small without"


def test_repeated_replay_gives_the_same_outcome() -> None:
    assert play(CALLS, MARKETS["fabric cheaper"], OURS, faults=0.3) == outcome()


def test_replay_that_keeps_added_capacity_costs_more_than_returning_it() -> None:
    kept = outcome(Policy("kept", keep=inf))
    assert not kept.broken
    assert kept.bill.cost > outcome().bill.cost


def test_ordering_nodes_first_uses_more_power_than_attaching_gpus() -> None:
    attached, added = (outcome(Policy(first, first, 120.0)) for first in ("gpu", "node"))
    watts = [one.bill.kwh / one.bill.device_hours for one in (attached, added)]
    assert watts[0] * 1.5 < watts[1], "a node takes more power than a Device"


def test_policies_compared_in_the_trace_replay_have_unique_names() -> None:
    names = [one.name for one in points()]
    assert len({*names}) == len(names)


def test_trace_requests_of_all_days_are_sorted_by_time_of_day(tmp_path: Path) -> None:
    rows = "2024-11-15 00:00:10,30,M1\n2024-11-16 00:00:05,20,\n2024-11-16 00:00:20,9,M1\n"
    (tmp_path / request_arrivals.FILE).write_text(HEAD + rows)
    all_days, busiest = request_arrivals.gentd26(tmp_path), request_arrivals.gentd26(tmp_path, 1)
    assert all_days == [(5.0, 20.0, "unnamed"), (10.0, 30.0, "m1"), (20.0, 9.0, "m1")]
    assert busiest == [(5.0, 20.0, "unnamed"), (20.0, 9.0, "m1")]
    assert (request_arrivals.peak(all_days), request_arrivals.names(all_days)) == (3, ["m1", "unnamed"])


def test_trace_file_with_unknown_columns_is_rejected(tmp_path: Path) -> None:
    (tmp_path / request_arrivals.FILE).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not that of GenTD26"):
        request_arrivals.gentd26(tmp_path)


def _point(cost: float, wait_s: float) -> Mean:
    return Mean("p", cost, cost, cost, (wait_s, wait_s, wait_s))


def test_cost_ratio_uses_our_cheapest_run_that_waits_no_longer() -> None:
    own = [(OURS, _point(8.0, 10.0)), (OURS, _point(4.0, 30.0))]
    found = [judged(own, _point(16.0, wait_s)) for wait_s in (5.0, 10.0, 40.0)]
    assert [one and one.cost for one in found] == [None, 0.5, 0.25]


def test_trace_replay_averages_the_results_of_several_seeds() -> None:
    runs = [Outcome("m", "p", 1, (wait_s,), 1, Bill(cost, 1.0, 2.0), 1) for cost, wait_s in ((2.0, 10.0), (4.0, 30.0))]
    assert mean(runs) == Mean("p", 3.0, 1.0, 2.0, (20.0, 20.0, 20.0), 2, (2.0, 4.0))

"""Ports of tests: each once, and two processes of tests never have the same."""

from __future__ import annotations

import pytest

from tests.kit.ports import Ports, part

AMONG = range(10_240, 10_340)


def test_two_workers_of_a_run_have_no_port_in_common_and_together_all() -> None:
    workers = [{"PYTEST_XDIST_WORKER": f"gw{n}", "PYTEST_XDIST_WORKER_COUNT": "3"} for n in range(3)]
    parts = [set(part(AMONG, worker)) for worker in workers]
    assert sum(map(len, parts)) == len(AMONG)
    assert set[int]().union(*parts) == set(AMONG)


def test_without_workers_all_are_there_and_a_worker_that_says_not_of_how_many_has_some() -> None:
    assert part(AMONG, {}) == AMONG
    assert set(part(AMONG, {"PYTEST_XDIST_WORKER": "gw4"})) <= set(AMONG)
    assert part(AMONG, {"PYTEST_XDIST_WORKER": "gw4"})


@pytest.mark.standard
def test_each_is_given_once() -> None:
    found = Ports(range(10_240, 20_480)).take(500)
    assert len(set(found)) == 500

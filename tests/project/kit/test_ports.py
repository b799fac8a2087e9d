"""Test ports are unique, within a test process and between two of them."""

from __future__ import annotations

import pytest

from tests.support.net.ports import Ports, part

AMONG = range(10_240, 10_340)


def test_workers_split_all_ports_without_overlap() -> None:
    workers = [{"PYTEST_XDIST_WORKER": f"gw{n}", "PYTEST_XDIST_WORKER_COUNT": "3"} for n in range(3)]
    parts = [set(part(AMONG, worker)) for worker in workers]
    assert sum(map(len, parts)) == len(AMONG)
    assert set[int]().union(*parts) == set(AMONG)


def test_pytest_process_outside_of_xdist_workers_gets_all_ports() -> None:
    assert part(AMONG, {}) == AMONG
    assert set(part(AMONG, {"PYTEST_XDIST_WORKER": "gw4"})) <= set(AMONG)
    assert part(AMONG, {"PYTEST_XDIST_WORKER": "gw4"})


@pytest.mark.standard
def test_ports_taken_in_one_call_are_all_different() -> None:
    found = Ports(range(10_240, 20_480)).take(500)
    assert len(set(found)) == 500

"""The queue of one model: order, fairness, limits, and heaps that stay proportional to the waiting requests."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import CatalogueDelta, ModelName, QueueLimits, TenantName, make_decoder
from gateway.dispatch.call import Call
from gateway.dispatch.fair_queue import COMPACT_MIN, DEFAULT_STEP, Deadlines, Queue, TenantQueue, compute_step
from gateway.dispatch.reports import Account
from tests.support.example_budget import examples
from tests.support.harness.gateway.dispatch_script import call_of

MODEL = ModelName("llama")


def line_of(queue: Queue, tenant: str, *, priority: int = 0, weight: float = 1.0) -> TenantQueue:
    name = TenantName(tenant)
    return queue.lines.get((name, priority)) or queue.open(name, priority, Account(MODEL, name), compute_step(weight))


def park(queue: Queue, id: str, tenant: str = "a", *, priority: int = 0, weight: float = 1.0) -> Call:
    call = call_of(id, tenant=tenant, priority=priority)
    queue.park(line_of(queue, tenant, priority=priority, weight=weight), call)
    return call


def pops(queue: Queue, count: int) -> list[str]:
    return [queue.pop()[1].id for _ in range(count)]


def test_requests_of_one_tenant_are_served_in_order() -> None:
    queue = Queue(MODEL)
    for id in ("a1", "a2", "a3"):
        park(queue, id)
    assert pops(queue, 3) == ["a1", "a2", "a3"]
    assert queue.waiting == 0
    assert queue.bytes == 0


def test_waiting_request_of_higher_priority_is_served_first() -> None:
    queue = Queue(MODEL)
    park(queue, "low", priority=0)
    park(queue, "high1", priority=5)
    park(queue, "high2", priority=5)
    park(queue, "lowest", priority=-1)
    assert pops(queue, 4) == ["high1", "high2", "low", "lowest"]


def test_waiting_requests_of_two_tenants_are_served_alternately() -> None:
    queue = Queue(MODEL)
    for id in ("a1", "a2", "a3"):
        park(queue, id, "a")
    for id in ("b1", "b2"):
        park(queue, id, "b")
    assert pops(queue, 5) == ["a1", "b1", "a2", "b2", "a3"]


def test_tenant_of_weight_three_gets_three_quarters_of_the_slots() -> None:
    queue = Queue(MODEL)
    for n in range(100):
        park(queue, f"a{n}", "a", weight=3.0)
        park(queue, f"b{n}", "b", weight=1.0)
    first = Counter(id[0] for id in pops(queue, 80))
    assert abs(first["a"] - 60) <= 1


@pytest.mark.parametrize("weight", [1e-6, 1e6])
def test_tenant_shares_stay_exact_after_a_million_grants_at_extreme_weight(weight: float) -> None:
    queue = Queue(MODEL)
    line_of(queue, "extreme", weight=weight)
    queue.charge(line_of(queue, "extreme"))
    queue.lines[TenantName("extreme"), 0].tag *= 1_000_000
    queue.charge(line_of(queue, "extreme"))
    for n in range(110):
        park(queue, f"a{n}", "a", weight=1e6)
        park(queue, f"b{n}", "b", weight=1e5)
    first = Counter(id[0] for id in pops(queue, 110))
    assert first == {"a": 100, "b": 10}


@pytest.mark.parametrize("weight", ["1e-310", "0", "1000001"])
def test_catalogue_with_a_weight_beyond_the_limits_is_rejected(weight: str) -> None:
    catalogue = f'{{"epoch": 1, "version": 1, "tenants": [{{"name": "a", "weight": {weight}}}]}}'
    with pytest.raises(msgspec.DecodeError, match="weight"):
        make_decoder(CatalogueDelta)(catalogue.encode())


def test_tenant_that_was_idle_alternates_with_a_tenant_that_was_busy() -> None:
    queue = Queue(MODEL)
    park(queue, "b0", "b")
    for n in range(50):
        park(queue, f"a{n}", "a")
    pops(queue, 41)
    for n in range(1, 5):
        park(queue, f"b{n}", "b")
    turns = [id[0] for id in pops(queue, 8)]
    assert turns == ["b", "a"] * 4, "level with the least served, so they alternate from here"


def test_tenant_served_without_waiting_is_queued_behind_an_unserved_tenant() -> None:
    queue = Queue(MODEL)
    for _ in range(4):
        queue.charge(line_of(queue, "a"))
    park(queue, "a1", "a")
    park(queue, "b1", "b")
    assert pops(queue, 2) == ["b1", "a1"]


def test_retried_request_is_served_first_at_no_cost_to_its_tenant() -> None:
    queue = Queue(MODEL)
    for id in ("a1", "a2", "a3", "b1", "b2", "b3"):
        park(queue, id, id[0])
    line, call = queue.pop()
    queue.park_first(line, call)
    assert pops(queue, 6) == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_retry_after_a_long_wait_gives_its_tenant_one_extra_turn_only() -> None:
    queue = Queue(MODEL)
    moved = park(queue, "a0", "a")
    line, _ = queue.pop()
    for n in range(30):
        park(queue, f"b{n}", "b")
    pops(queue, 20)
    queue.park_first(line, moved)
    for n in range(1, 5):
        park(queue, f"a{n}", "a")
    assert [id[0] for id in pops(queue, 6)] == ["a", "a", "b", "a", "b", "a"], "its own turn again, then one each"


def test_queue_is_full_at_request_or_byte_limit() -> None:
    queue = Queue(MODEL)
    park(queue, "a1")
    limits = QueueLimits(calls_max=2, bytes_max=25)
    assert not queue.full(call_of("x", body_bytes=15), limits)
    assert queue.full(call_of("x", body_bytes=16), limits)
    park(queue, "a2")
    assert queue.full(call_of("x", body_bytes=0), limits)


def test_removal_of_a_waiting_request_keeps_the_order_of_the_others() -> None:
    queue = Queue(MODEL)
    calls = [park(queue, f"a{n}") for n in range(4)]
    queue.remove(line_of(queue, "a"), calls[1])
    assert pops(queue, 3) == ["a0", "a2", "a3"]


def test_deadline_heap_stays_proportional_to_waiting_requests() -> None:
    queue = Queue(MODEL)
    line = line_of(queue, "a")
    for n in range(5000):
        call = park(queue, f"a{n}")
        if n % 50:
            queue.remove(line, call)
    assert queue.waiting == 100
    assert len(line.deadlines) <= 2 * 100 + COMPACT_MIN


def test_tenants_without_waiting_requests_are_removed_from_the_queue() -> None:
    queue = Queue(MODEL)
    park(queue, "a1")
    queue.pop()
    queue.forget()
    assert not queue.lines


def test_next_deadline_ignores_requests_that_left_the_queue() -> None:
    queue, deadlines = Queue(MODEL), Deadlines()
    waits = {"a1": 9.0, "a2": 5.0, "b1": 7.0}
    calls = {id: call_of(id, tenant=id[0], wait_s=wait_s) for id, wait_s in waits.items()}
    for id, call in calls.items():
        line = line_of(queue, id[0])
        queue.park(line, call)
        deadlines.watch(line, call.deadline_s)
    assert deadlines.next_s() == 5.0
    queue.remove(line_of(queue, "a"), calls["a2"])
    assert deadlines.next_s() == 7.0
    assert not list(deadlines.due(6.0))
    for line in deadlines.due(8.0):
        queue.remove(line, line.soonest())
    assert deadlines.next_s() == 9.0


def test_deadline_heap_stays_small_when_deadlines_decrease() -> None:
    queue, deadlines = Queue(MODEL), Deadlines()
    line = line_of(queue, "a")
    for n in range(5000):
        call = call_of(f"a{n}", wait_s=10_000.0 - n)
        queue.park(line, call)
        deadlines.watch(line, call.deadline_s)
    assert len(deadlines) <= COMPACT_MIN + 3
    assert deadlines.next_s() == 5001.0


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((0, 0, 1)), st.booleans()), max_size=60))
def test_random_requests_are_served_by_priority_and_tenant_turns(steps: list[tuple[str, int, bool]]) -> None:
    queue = Queue(MODEL)
    parked: list[Call] = []
    turns: Counter[str] = Counter()
    for n, (tenant, priority, pop) in enumerate(steps):
        if pop and parked:
            _, call = queue.pop()
            assert call.priority == max(other.priority for other in parked)
            rivals = [c for c in parked if (c.tenant, c.priority) == (call.tenant, call.priority)]
            assert call is rivals[0]
            parked.remove(call)
            turns[call.tenant] += 1
        else:
            parked.append(park(queue, f"{tenant}{n}", tenant, priority=priority))
        assert queue.waiting == len(parked)
        tags = [line.tag for line in queue.lines.values() if line.calls and line.lane.priority == 0]
        assert not tags or max(tags) - min(tags) <= DEFAULT_STEP

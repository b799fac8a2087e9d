"""Memory pressure: its levels, the limit that the kernel reports, and which requests are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.contract import ModelName, QueueLimits, TenantName
from gateway.dispatch.call import Call
from gateway.dispatch.fair_queue import DEFAULT_STEP, Parked, Queue
from gateway.dispatch.memory_pressure import Pressure, compute_pressure
from gateway.dispatch.reports import Account
from gateway.memory import process_memory
from gateway.memory.memory_sampler import MemoryGuard
from tests.support.fakes.engines.scripted_engine import HOLD, OK, ScriptedEngine
from tests.support.harness.gateway.dispatch_script import Script, warm
from tests.support.harness.gateway.gateway_rig import rig


@pytest.mark.parametrize(
    ("used", "before", "expected"),
    [
        (79, Pressure.NONE, Pressure.NONE),
        (80, Pressure.NONE, Pressure.NO_COLD),
        (89, Pressure.NO_COLD, Pressure.NO_COLD),
        (90, Pressure.NONE, Pressure.NO_CALLS),
        (86, Pressure.NO_CALLS, Pressure.NO_CALLS),
        (84, Pressure.NO_CALLS, Pressure.NO_COLD),
        (76, Pressure.NO_COLD, Pressure.NO_COLD),
        (74, Pressure.NO_COLD, Pressure.NONE),
        (74, Pressure.NO_CALLS, Pressure.NONE),
        (200, Pressure.NO_COLD, Pressure.NO_CALLS),
    ],
)
def test_memory_pressure_ends_at_a_lower_usage_than_it_starts(used: int, before: Pressure, expected: Pressure) -> None:
    assert compute_pressure(used, 100, before) is expected


def test_memory_pressure_rejects_requests_for_models_without_replicas() -> None:
    script = Script()
    script.dispatch.pressure = Pressure.NO_COLD
    assert script.arrive("c1") == ["refuse c1 overloaded", "report"]
    total = script.total()
    assert (total.refused_cold, total.admitted) == (1, 0), "it is demand for one start all the same"
    assert script.refused["c1"].error.retry_after_s
    ready = warm(1)
    ready.dispatch.pressure = Pressure.NO_COLD
    assert ready.arrive("c1") == ["grant c1 r1", "report"]


def test_high_memory_pressure_rejects_new_requests_and_keeps_running_ones() -> None:
    script = warm(1)
    script.arrive("c1")
    script.arrive("c2")
    script.dispatch.pressure = Pressure.NO_CALLS
    assert script.arrive("c3") == ["refuse c3 overloaded"]
    assert script.finish("c1") == ["grant c2 r1"], "who waits is served"
    assert script.finish("c2") == ["report"]
    script.dispatch.pressure = Pressure.NONE
    assert script.arrive("c4") == ["grant c4 r1", "report"]


@pytest.mark.standard
async def test_request_is_rejected_before_its_body_under_high_memory_pressure() -> None:
    async with ScriptedEngine((OK,)) as engine, rig() as one:
        one.routes(engine.address)
        one.front.dispatch.pressure = Pressure.NO_CALLS
        client = await one.client()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nContent-Type: application/json\r\n"
        client.send(head + b"Content-Length: 60000000\r\n\r\n{")
        status, fields, body = await client.answer()
        assert (status, fields["connection"]) == (503, "close")
        assert b'"overloaded"' in body


@pytest.mark.standard
async def test_running_request_completes_when_memory_pressure_rises() -> None:
    async with ScriptedEngine((HOLD, OK)) as engine, rig() as one:
        one.routes(engine.address)
        client = await one.client()
        client.call(stream=False)
        await engine.asked.wait()
        one.front.dispatch.pressure = Pressure.NO_CALLS
        engine.release.set()
        assert (await client.answer())[0] == 200
        status, fields, _ = await client.ask(stream=False)
        assert (status, fields["retry-after"]) == (503, "2")


def test_memory_limit_is_the_lowest_of_all_parent_cgroups(tmp_path: Path) -> None:
    inner = tmp_path / "pods" / "one"
    inner.mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pods/one\n")
    assert process_memory.limit_bytes(tmp_path, membership) is None
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.max").write_text("2097152\n")
    assert process_memory.limit_bytes(tmp_path, membership) == 1048576
    assert process_memory.limit_bytes(tmp_path, tmp_path / "none") is None


def test_memory_limit_is_read_from_cgroup_v1_when_the_host_has_only_v1(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "pod"
    folder.mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/pod\n4:memory:/pod\n0::/pod\n")
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert process_memory.limit_bytes(tmp_path, membership) is None
    (folder / "memory.limit_in_bytes").write_text("4096\n")
    assert process_memory.limit_bytes(tmp_path, membership) == 4096


def test_measured_resident_memory_of_the_test_process_exceeds_one_mib() -> None:
    used_bytes = process_memory.resident_bytes()
    assert used_bytes is not None
    assert used_bytes > 1 << 20


class Machine:
    """Fakes the figures of `gateway.memory.process_memory`, and counts how often memory was released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self.given_back = 0
        self.free_bytes = 0
        monkeypatch.setattr(process_memory, "resident_bytes", lambda: self.resident_bytes)
        monkeypatch.setattr(process_memory, "give_back", self.give_back)

    def give_back(self, pad: int) -> None:
        self.given_back += 1
        self.resident_bytes -= self.free_bytes + pad
        self.free_bytes = 0


MIB = 1 << 20


def test_free_allocator_memory_is_released_before_pressure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, scale = Machine(monkeypatch, 50 * MIB), MemoryGuard(256 * MIB)
    assert scale.weigh(0.0, 0, Pressure.NONE) is Pressure.NONE
    machine.resident_bytes, machine.free_bytes = 240 * MIB, 190 * MIB
    assert scale.weigh(0.5, 0, Pressure.NONE) is Pressure.NONE
    assert (machine.given_back, machine.resident_bytes) == (1, 50 * MIB)


def test_allocator_memory_counts_as_used_only_while_bodies_are_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, scale = Machine(monkeypatch, 50 * MIB), MemoryGuard(256 * MIB)
    scale.weigh(0.0, 0, Pressure.NONE)
    machine.resident_bytes = 240 * MIB
    assert scale.weigh(0.5, 200 * MIB, Pressure.NONE) is Pressure.NO_CALLS
    assert scale.weigh(1.0, 160 * MIB, Pressure.NO_CALLS) is Pressure.NO_COLD
    assert scale.weigh(1.5, 10 * MIB, Pressure.NO_COLD) is Pressure.NONE, "though the resident set is as it was"


def test_memory_is_released_after_growth_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, scale = Machine(monkeypatch, 50 * MIB), MemoryGuard(200 * MIB)
    for step in range(100):
        scale.weigh(step * 0.5, MIB, Pressure.NONE)
    assert machine.given_back == 0
    for step in range(100, 110):
        machine.resident_bytes += 20 * MIB
        scale.weigh(step * 0.5, MIB, Pressure.NONE)
    assert machine.given_back == 4, "above half of the limit, once a second"


def test_releasing_free_heap_memory_raises_no_exception() -> None:
    kept = [bytes(100_000) for _ in range(500)]
    del kept[::2]
    process_memory.give_back(0)


def test_small_waiting_bodies_of_all_models_share_one_byte_limit() -> None:
    parked = Parked()
    parked.bytes_max = 300 << 10
    one, two = Queue(ModelName("a"), parked), Queue(ModelName("b"), parked)
    line = one.open(TenantName("t"), 0, Account(ModelName("a"), TenantName("t")), DEFAULT_STEP)
    call = Call("c", TenantName("t"), ModelName("a"), 0.0, 9.0, body_bytes=200 << 10)
    one.park(line, call)
    assert two.full(call, QueueLimits())
    assert not two.full(Call("l", TenantName("t"), ModelName("b"), 0.0, 9.0, body_bytes=MIB), QueueLimits())
    one.remove(line, call)
    assert not two.full(call, QueueLimits())

"""Memory that runs short: the steps, the limit that the kernel tells, and what is refused then."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import memory
from gateway.pressure import Pressure, pressure
from tests.kit.dispatching import Script, warm
from tests.kit.engine import HOLD, OK, ScriptedEngine
from tests.kit.rig import rig


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
def test_a_step_begins_at_its_share_and_ends_a_little_below(used: int, before: Pressure, expected: Pressure) -> None:
    assert pressure(used, 100, before) is expected


def test_short_memory_refuses_cold_calls_and_serves_warm_ones() -> None:
    script = Script()
    script.dispatch.pressure = Pressure.NO_COLD
    assert script.arrive("c1") == ["refuse c1 overloaded", "report"]
    total = script.total()
    assert total is not None
    assert (total.refused_cold, total.admitted) == (1, 0), "it is demand for one start all the same"
    assert script.refused["c1"].error.retry_after_s
    ready = warm(1)
    ready.dispatch.pressure = Pressure.NO_COLD
    assert ready.arrive("c1") == ["grant c1 r1", "report"]


def test_very_short_memory_refuses_every_new_call_and_lets_run_what_runs() -> None:
    script = warm(1)
    script.arrive("c1")
    script.arrive("c2")
    script.dispatch.pressure = Pressure.NO_CALLS
    assert script.arrive("c3") == ["refuse c3 overloaded"]
    assert script.finish("c1") == ["grant c2 r1"], "who waits is served"
    assert script.finish("c2") == ["report"]
    script.dispatch.pressure = Pressure.NONE
    assert script.arrive("c4") == ["grant c4 r1", "report"]


async def test_a_body_is_not_even_read_when_memory_is_very_short() -> None:
    async with ScriptedEngine((OK,)) as engine, rig() as one:
        one.routes(engine.address)
        one.front.dispatch.pressure = Pressure.NO_CALLS
        client = await one.client()
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nContent-Length: 60000000\r\n\r\n{")
        status, fields, body = await client.answer()
        assert (status, fields["connection"]) == (503, "close")
        assert b'"overloaded"' in body


async def test_what_runs_goes_on_when_memory_becomes_short() -> None:
    async with ScriptedEngine((HOLD, OK)) as engine, rig() as one:
        one.routes(engine.address)
        client = await one.client()
        client.call(stream=False)
        await engine.asked.wait()
        one.front.dispatch.pressure = Pressure.NO_CALLS
        engine.release.set()
        assert (await client.answer())[0] == 200
        client.call(stream=False)
        status, fields, _ = await client.answer()
        assert (status, fields["retry-after"]) == (503, "2")


def test_the_limit_is_the_least_on_the_way_up(tmp_path: Path) -> None:
    inner = tmp_path / "pods" / "one"
    inner.mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pods/one\n")
    assert memory.limit_bytes(tmp_path, membership) is None
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.max").write_text("2097152\n")
    assert memory.limit_bytes(tmp_path, membership) == 1048576
    assert memory.limit_bytes(tmp_path, tmp_path / "none") is None


def test_the_limit_of_a_cgroup_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "pod"
    folder.mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/pod\n4:memory:/pod\n0::/pod\n")
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory.limit_bytes(tmp_path, membership) is None
    (folder / "memory.limit_in_bytes").write_text("4096\n")
    assert memory.limit_bytes(tmp_path, membership) == 4096


def test_our_own_memory_is_known() -> None:
    used_bytes = memory.resident_bytes()
    assert used_bytes is not None
    assert used_bytes > 1 << 20

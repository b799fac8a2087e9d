"""Reliability section 5 C in virtual time: replicas that share a device, devices that are lost (cases 21 and 22)."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from autoscaler.agent_contract import DeviceReport, NodeReport
from autoscaler.contract import ReplicaId
from autoscaler.spec.model import Model
from autoscaler.state.events import NodeReported, Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica
from tests.simulation.case_harness import GIB, Stage, model, play, simulated
from tests.simulation.environment.machine import Manners
from tests.support.fakes.driver import FakeEngine, Fate

START_S = 3.0


def alone_or_dead(stage: Stage) -> None:
    """From now on an engine takes all free memory when it starts, as vLLM does.
    A second one that starts on its device at the same time finds none and dies.
    """
    machine = stage.town.machine

    def fate(replica: Replica, model: Model) -> Fate:
        del model
        others = (e for e in machine.engines.values() if e.seen is Seen.STARTING and e.replica.id != replica.id)
        beside = any({*e.replica.resources.slices} & {*replica.resources.slices} for e in others)
        return Fate(
            ready_after_s=START_S, dies_after_s=0.1 if beside else None, last_words="no memory left for the cache"
        )

    machine.fate = fate


@pytest.mark.case("21")
@pytest.mark.parametrize("models", [2, 4])
def test_replicas_on_one_device_start_one_after_the_other(models: int) -> None:
    """One plan starts all of them on one shared device with room for all.
    Each is ready at its first try, and the memory claimed never exceeds the device's.
    """
    names = [f"m{number}" for number in range(models)]

    async def act(stage: Stage) -> None:
        alone_or_dead(stage)
        town, moved, begun = stage.town, list[tuple[str, S]](), list[str]()
        stage.loop.listeners.append(lambda step: moved.extend((t.replica, t.after) for t in step.transitions))

        def see(engine: FakeEngine, what: str) -> None:
            begun.extend([engine.replica.id] if what == "start" else [])
            starting = [e for e in town.machine.engines.values() if e.seen is Seen.STARTING]
            assert len(starting) <= 1, "one start at a time on the Device"
            assert sum(e.replica.resources.memory_bytes for e in town.machine.engines.values()) <= 16 * GIB

        stage.watcher.listen(see)
        began_s = town.now()
        calls = [town.call(name) for name in names]
        assert await stage.answered(calls, within_s=60) == {"completed": models}
        assert town.now() - began_s >= models * START_S, "one after the other"
        assert town.now() - began_s <= models * START_S + 2.0, "and no longer than that"
        assert len(begun) == models, "each is ready at its first try"
        assert S.FAILED not in {after for _, after in moved}

    play(act, *(model(name, memory_gib=4, idle_s=60.0) for name in names), manners=Manners(serve_s=(0.05, 0.1)))


@pytest.mark.case("21")
@simulated(model("a", memory_gib=10), model("b", memory_gib=10), devices=2, manners=Manners(serve_s=(0.05, 0.1)))
async def test_replicas_on_different_devices_start_in_parallel(stage: Stage) -> None:
    alone_or_dead(stage)
    town = stage.town
    calls = [town.call(name) for name in ("a", "b")]
    began_s = town.now()
    assert await stage.answered(calls, within_s=60) == {"completed": 2}
    assert town.now() - began_s <= START_S + 1.0, "they start at once"


LOOK_S = 3.0
"""Interval between two reports of an agent."""


async def watched(stage: Stage, lost: set[str]) -> None:
    """The agent of the node reports its Devices."""
    for sequence in count(1):
        devices = tuple(
            DeviceReport(id=one.device, healthy=one.device not in lost) for one in stage.town.machine.slices
        )
        report = NodeReport(node="local", boot="b", sequence=sequence, devices=devices)
        stage.loop.observe([NodeReported(report=report)])
        await asyncio.sleep(LOOK_S)


def on_device(stage: Stage, name: str) -> set[str]:
    """Engines on that Device."""
    return {id for id, engine in stage.town.machine.engines.items() if name in engine.replica.resources.slices}


@pytest.mark.case("22")
@pytest.mark.parametrize("engines", ["die with it", "answer on"])
def test_device_lost_with_three_replicas_gets_no_request_after_10_seconds(engines: str) -> None:
    """The device has three replicas: their MPS server and they die, or they still answer their probes.
    Within 10 s no request is sent there, and each request on it moved or failed with one error.
    """

    async def act(stage: Stage) -> None:
        town, lost = stage.town, {"gpu1"}
        agent = town.task(watched(stage, lost))
        names = ["a", "b", "c"]
        await asyncio.sleep(0.1)
        for name in names:
            await stage.answered([town.call(name)])
        calls = [town.call(name) for name in names]
        await stage.until(lambda: all(j.granted_to for j in calls))
        there = on_device(stage, "gpu0")
        assert len(there) == 3, "they share one Device, for the other is lost"
        lost.remove("gpu1")
        lost.add("gpu0")
        lost_s = town.now()
        if engines == "die with it":
            for id in sorted(there):
                town.machine.kill(ReplicaId(id))
        for _ in range(60):
            calls += [town.call(name) for name in names]
            await asyncio.sleep(0.5)
        outcomes = await stage.answered(calls, within_s=120)
        assert outcomes["completed"] >= len(calls) - 3, "at most those that had begun have an error"
        late = [to for j in calls for to, at_s in zip(j.granted_to, j.granted_s, strict=True) if at_s > lost_s + 10.0]
        assert late
        assert not there & {*late}, "no Call goes there"
        assert on_device(stage, "gpu0") == set()
        assert all(len(on_device(stage, "gpu1") & {*j.granted_to}) == 1 for j in calls[-3:]), "served elsewhere"
        agent.cancel()

    three = (model(name, memory_gib=4, idle_s=60.0) for name in ("a", "b", "c"))
    play(act, *three, devices=2, manners=Manners(start_s=(0.5, 0.5), serve_s=(1.0, 2.0)))


@pytest.mark.case("22")
def test_lost_device_gets_no_replica_until_it_recovers() -> None:
    async def act(stage: Stage) -> None:
        town, lost = stage.town, {"gpu0"}
        agent = town.task(watched(stage, lost))
        await asyncio.sleep(0.1)
        calls = [town.call("a"), town.call("b")]
        await asyncio.sleep(30.0)
        assert on_device(stage, "gpu0") == set()
        assert sum(bool(j.ended) for j in calls) == 1, "there is one Device for the two"
        lost.clear()
        assert await stage.answered(calls, within_s=10) == {"completed": 2}
        agent.cancel()

    two = (model(name, memory_gib=10, idle_s=60.0, residency_s=300.0) for name in ("a", "b"))
    play(act, *two, devices=2, manners=Manners(start_s=(0.5, 0.5), serve_s=(1.0, 2.0)))


@pytest.mark.case("22")
def test_device_of_a_dead_mps_server_gets_one_trial_start_before_others() -> None:
    """No start is placed there for a while, then one is tried; the others follow when it is ready."""

    async def act(stage: Stage) -> None:
        town, names, begun_s = stage.town, ["a", "b", "c"], list[float]()
        machine, dead = town.machine, [True]
        machine.fate = lambda replica, model: Fate(ready_after_s=0.5, dies_after_s=0.1 if dead[0] else None)
        dead[0] = False
        for name in names:
            await stage.answered([town.call(name)])
        there = on_device(stage, "gpu0")
        assert len(there) == 3
        agent = town.task(watched(stage, set()))
        dead[0] = True
        fell_s = town.now()
        stage.watcher.listen(lambda engine, what: begun_s.extend([town.now()] if what == "start" else []))
        for id in sorted(there):
            machine.kill(ReplicaId(id))
        calls = [town.call(name) for name in names]
        await asyncio.sleep(4.0)
        assert begun_s == [], "it is closed, although its agent reports a healthy device"
        await asyncio.sleep(4.0)
        assert len(begun_s) == 1, "one start is tried"
        dead[0] = False
        assert await stage.answered(calls, within_s=60) == {"completed": 3}
        assert begun_s[1] - fell_s >= 15.0, "the pause was doubled"
        agent.cancel()

    three = (model(name, memory_gib=4, idle_s=60.0) for name in ("a", "b", "c"))
    play(act, *three, manners=Manners(serve_s=(0.05, 0.1)), shared="mps")

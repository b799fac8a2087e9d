"""Reliability section 5 B and C in virtual time: stopping, moving, dying (cases 10 to 13 and 16)."""

from __future__ import annotations

import asyncio
import random

import pytest

from autoscaler.states import ReplicaState
from gateway.call import Outcome
from tests.kit.fakedriver import FakeEngine
from tests.sim.machine import Manners
from tests.sim.stage import Stage, model, play

STREAMS = Manners(start_s=(0.5, 0.5), serve_s=(8.0, 20.0))
SEEDS = 1000


def test_case_10_scale_from_four_to_one_cuts_no_stream() -> None:
    async def act(stage: Stage) -> None:
        town = stage.town
        calls = [town.call("a") for _ in range(80)]
        await stage.until(lambda: sum(p.ready for p in town.machine.engines.values()) == 4, within_s=30)
        last: dict[str, float] = {}
        stopped: list[tuple[str, int]] = []

        def on_change(engine: FakeEngine, what: str) -> None:
            if what == "stop":
                stopped.append((engine.replica.id, len(town.machine.calls[engine.replica.id])))

        stage.watcher.listen(on_change)
        assert town.autoscaler is not None

        def on_step(step: object) -> None:
            del step
            for replica in town.autoscaler.loop.world.replicas.values() if town.autoscaler else ():
                if replica.state == ReplicaState.STOPPING:
                    last.setdefault(replica.id, town.now())

        town.autoscaler.loop.listeners.append(on_step)
        for _ in range(200):  # one Call after another keeps one Replica wanted
            calls.append(town.call("a"))
            await asyncio.sleep(0.5)
        await stage.answered(calls)
        assert {j.ended[0].outcome for j in calls} == {Outcome.COMPLETED}, "no stream is cut"
        assert len(stopped) >= 2
        assert all(running == 0 for _, running in stopped), "stopped only when nothing runs"
        for journey in calls:
            for replica in journey.granted_to:
                assert journey.first_byte_s is not None
                assert journey.first_byte_s < last.get(replica, float("inf")) + 1e-9, "nothing granted after the stop"

    play(act, model(slots=20, replicas=4, memory_gib=4, idle_s=2.0), gateways=3, manners=STREAMS)


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_case_11_a_call_around_the_last_drain(first: int) -> None:
    """A Call arrives 0 to 5 ms around the moment in which the idle Replica is drained, in 1000 seeds."""
    for seed in range(first, first + 100):

        async def act(stage: Stage, seed: int = seed) -> None:
            town = stage.town
            rng = random.Random(seed)
            await stage.answered([town.call("a", gateway=0)])
            done_s = town.now()
            await asyncio.sleep(max(0.0, done_s + 2.0 + rng.uniform(-0.005, 0.005) - town.now()))
            call = town.call("a", gateway=rng.randrange(2))
            assert await stage.answered([call], within_s=5) == {"completed": 1}
            assert stage.starts() <= 2, "at most one start more"

        play(act, model(idle_s=2.0), seed=seed, gateways=2, manners=Manners(start_s=(0.3, 0.3), serve_s=(0.05, 0.1)))


def test_case_11_a_draining_replica_is_revived() -> None:
    """While an acknowledgement is still missing (a gateway is cut off), a new Call brings the Replica back."""

    async def act(stage: Stage) -> None:
        town = stage.town
        await stage.answered([town.call("a", gateway=0)])
        assert town.autoscaler is not None
        loop = town.autoscaler.loop

        def draining() -> bool:
            return any(r.state == ReplicaState.DRAINING for r in loop.world.replicas.values())

        await stage.until(draining, within_s=10, step_s=0.0001)
        cut = town.gateways[1]
        cut.link.reachable = False
        cut.link.cut()
        await asyncio.sleep(1.0)
        assert draining(), "the drain waits for the gateway that is cut off"
        call = town.call("a", gateway=0)
        assert await stage.answered([call], within_s=5) == {"completed": 1}
        assert stage.starts() == 1, "revived, not started anew"
        assert not draining()

    play(act, model(idle_s=2.0), gateways=2, manners=Manners(start_s=(0.3, 0.3), serve_s=(0.05, 0.1)))


def test_case_12_one_generation_longer_than_three_idle_windows() -> None:
    async def act(stage: Stage) -> None:
        town = stage.town
        call = town.call("a")
        drained: list[float] = []
        assert town.autoscaler is not None
        town.autoscaler.loop.listeners.append(
            lambda step: drained.extend(town.now() for t in step.transitions if t.after == ReplicaState.DRAINING)
        )
        assert await stage.answered([call]) == {"completed": 1}
        assert not drained, "never counted idle while it runs"
        finished_s = town.now()
        await stage.until(lambda: bool(drained), within_s=10)
        assert drained[0] - finished_s == pytest.approx(2.0, abs=0.05), "the window runs from the last finish"
        await stage.until(lambda: stage.replicas() == 0, within_s=10)

    play(act, model(idle_s=2.0), manners=Manners(serve_s=(7.0, 7.0)))


def test_case_12_an_idle_window_as_long_as_the_start() -> None:
    async def act(stage: Stage) -> None:
        town = stage.town
        for _ in range(3):
            assert await stage.answered([town.call("a")]) == {"completed": 1}
            await stage.until(lambda: stage.replicas() == 0, within_s=20)
        assert stage.starts() == 3

    play(act, model(idle_s=3.0), manners=Manners(start_s=(3.0, 3.0)))


def test_case_13_a_gateway_cut_off_during_a_drain() -> None:
    async def act(stage: Stage) -> None:
        town = stage.town
        calls = [town.call("a", gateway=number % 2) for number in range(4)]
        await stage.answered(calls)
        cut = town.gateways[1]
        cut.link.reachable = False
        cut.link.cut()
        began_s = town.now()
        await stage.until(lambda: stage.replicas() == 0, within_s=60)
        assert town.now() - began_s >= 10.0, "a silent gateway is not taken for an idle one"
        assert town.now() - began_s <= 2.0 + 10.0 + 20.0 + 5.0, "and blocks the stop for drainSecondsMax at most"
        cut.link.reachable = True
        assert await stage.answered([town.call("a", gateway=1)], within_s=30) == {"completed": 1}

    play(act, model(idle_s=2.0, drain_s=20.0), gateways=2, strict=False)


@pytest.mark.parametrize("moment", ["before the first byte", "mid-stream", "after the last byte"])
def test_case_16_a_replica_is_killed(moment: str) -> None:
    async def act(stage: Stage) -> None:
        town = stage.town
        warm = town.call("a")
        await stage.until(lambda: bool(warm.granted_to))
        call = warm
        if moment == "mid-stream":
            await stage.until(lambda: call.first_byte_s is not None)
            await asyncio.sleep(0.1)
        elif moment == "after the last byte":
            await stage.answered([call])
        victim = next(iter(town.machine.engines))
        town.machine.kill(victim)
        counted = await stage.answered([call], within_s=30)
        if moment == "mid-stream":
            assert counted == {"failed": 1}
            assert call.served_by == {victim}
        else:
            assert counted == {"completed": 1}, "moved once; its client sees nothing"
        assert await stage.answered([town.call("a")], within_s=30) == {"completed": 1}
        assert len(call.served_by) == 1

    play(act, model(), manners=Manners(start_s=(0.5, 0.5), serve_s=(2.0, 2.0)), strict=False)

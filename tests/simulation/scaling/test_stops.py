"""Reliability section 5 B, C and F in virtual time: stops, moves, crashes, departures (cases 10 to 13, 16 and 34).

Times are exact here: limits that a case states in seconds are asserted in virtual ones.
"""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from msgspec.structs import replace

from autoscaler.controller.loop import LoopStep
from autoscaler.queries.gateway_reports import STALLED_GRACE_S
from autoscaler.spec.model import ReplicaRange
from autoscaler.state.actions import DrainReplica
from autoscaler.state.events import DocumentsSeen
from autoscaler.state.lifecycle import ReplicaState
from gateway.dispatch.call import Outcome
from tests.simulation.case_harness import Stage, cut_off, model, play, simulated
from tests.simulation.environment.machine import Manners
from tests.simulation.installations.installation import Journey
from tests.support.fakes.driver import FakeEngine

STREAMS = Manners(start_s=(0.5, 0.5), serve_s=(8.0, 20.0))
HEARD_S = 0.01
"""From a decision until every gateway has received it: Routes take at most 2 ms."""
SEEDS = 1000
SILENT_S = 600.0
"""The default of `responseSecondsMax`, which is longer than `firstByteSecondsMax`."""


class Drains:
    """Drains as the machine sees them: the requests on each engine when its drain was decided, and when it ended."""

    def __init__(self, stage: Stage) -> None:
        self.drained: dict[str, int] = {}
        self.drained_s: dict[str, float] = {}
        self.stopped: dict[str, int] = {}
        self._town = stage.town
        stage.watcher.listen(self._on_change)
        stage.loop.listeners.append(self._on_step)

    def _on_step(self, step: LoopStep) -> None:
        for action in step.actions:
            if isinstance(action, DrainReplica):
                self.drained[action.replica] = len(self._town.machine.calls[action.replica])
                self.drained_s[action.replica] = self._town.now()

    def _on_change(self, engine: FakeEngine, what: str) -> None:
        if what == "stop":
            self.stopped[engine.replica.id] = len(self._town.machine.calls[engine.replica.id])

    def nothing_is_cut(self, calls: list[Journey]) -> None:
        """Every stream is complete, every stop met an idle engine, nothing was granted after a drain was received."""
        assert {j.ended[0].outcome for j in calls} == {Outcome.COMPLETED}, "no stream is cut"
        assert not any(self.stopped.values()), "stopped only when nothing runs"
        for journey in calls:
            drained_s = self.drained_s.get(journey.granted_to[-1], math.inf)
            assert journey.granted_s[-1] <= drained_s + HEARD_S, "granted by a gateway that knew of the drain"


async def four_full(stage: Stage) -> list[Journey]:
    """Four replicas with 20 streams on each."""
    town = stage.town
    calls = [town.call("a") for _ in range(80)]
    await stage.until(lambda: sorted(map(len, town.machine.calls.values())) == [20] * 4, within_s=10)
    return calls


@pytest.mark.case("10")
@simulated(model(slots=20, replicas=4, memory_gib=4, idle_s=2.0), gateways=3, manners=STREAMS)
async def test_lowered_replica_maximum_stops_replicas_after_their_streams_end(stage: Stage) -> None:
    """The document allows only one: three drain with all their streams on them, and the fourth keeps serving."""
    town, drains = stage.town, Drains(stage)
    calls = await four_full(stage)
    (a,) = town.models
    town.models = (replace(a, spec=replace(a.spec, replicas=ReplicaRange(max=1))),)
    stage.loop.observe([DocumentsSeen(models=town.models)])
    await stage.until(lambda: len(drains.drained) == 3, within_s=HEARD_S)
    assert list(drains.drained.values()) == [20] * 3
    for _ in range(100):  # one request after another keeps one replica wanted
        calls.append(town.call("a"))
        await asyncio.sleep(0.5)
        assert stage.replicas() >= 1
    assert len(drains.stopped) == 3, "no more and no fewer, while it is called"
    await stage.answered(calls)
    drains.nothing_is_cut(calls)


@pytest.mark.case("10")
@simulated(model(slots=20, replicas=4, memory_gib=4, idle_s=2.0), gateways=3, manners=STREAMS)
async def test_scale_down_from_four_to_one_replica_interrupts_no_stream(stage: Stage) -> None:
    """As 80 concurrent streams become 20 at most, three of four replicas end; those with streams drain first."""
    town, drains = stage.town, Drains(stage)
    calls = await four_full(stage)
    for _ in range(80):  # 8 to 20 s each: fewer than 20 at once
        calls.append(town.call("a"))
        await asyncio.sleep(1.25)
    assert len(drains.stopped) == 3, "no more and no fewer, while it is called"
    assert max(drains.drained.values()) > 0, "some had streams when their drain began"
    await stage.answered(calls)
    drains.nothing_is_cut(calls)


@pytest.mark.case("11")
@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_request_arriving_within_5_ms_of_a_drain_is_completed(first: int) -> None:
    """A request arrives 0 to 5 ms around the time at which the idle replica is drained, in 1000 seeds."""
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


@pytest.mark.case("11")
@simulated(model(idle_s=2.0), gateways=2, manners=Manners(start_s=(0.3, 0.3), serve_s=(0.05, 0.1)))
async def test_draining_replica_is_revived_by_a_new_request(stage: Stage) -> None:
    """While an acknowledgement is still missing (a gateway is cut off), a new request revives the Replica."""
    town = stage.town
    await stage.answered([town.call("a", gateway=0)])
    loop = stage.loop

    def draining() -> bool:
        return any(r.state == ReplicaState.DRAINING for r in loop.world.replicas.values())

    await stage.until(draining, within_s=10, step_s=0.0001)
    cut_off(stage, 1)
    await asyncio.sleep(1.0)
    assert draining(), "the drain waits for the gateway that is cut off"
    call = town.call("a", gateway=0)
    assert await stage.answered([call], within_s=5) == {"completed": 1}
    assert stage.starts() == 1, "revived, not started again"
    assert not draining()


@pytest.mark.case("12")
@simulated(model(idle_s=2.0), manners=Manners(serve_s=(7.0, 7.0)))
async def test_replica_with_a_long_generation_is_idle_only_after_it_ends(stage: Stage) -> None:
    town = stage.town
    call = town.call("a")
    drained: list[float] = []
    stage.loop.listeners.append(
        lambda step: drained.extend(town.now() for t in step.transitions if t.after == ReplicaState.DRAINING)
    )
    assert await stage.answered([call]) == {"completed": 1}
    assert not drained, "never counted idle while it runs"
    finished_s = town.now()
    await stage.until(lambda: bool(drained), within_s=10)
    assert drained[0] - finished_s == pytest.approx(2.0, abs=0.05), "the window runs from the last finish"
    await stage.until(lambda: stage.replicas() == 0, within_s=10)


@pytest.mark.case("12")
@simulated(model(idle_s=3.0), manners=Manners(start_s=(3.0, 3.0)))
async def test_every_request_is_served_if_idle_timeout_equals_the_start_time(stage: Stage) -> None:
    town = stage.town
    for _ in range(3):
        assert await stage.answered([town.call("a")]) == {"completed": 1}
        await stage.until(lambda: stage.replicas() == 0, within_s=20)
    assert stage.starts() == 3


@pytest.mark.case("13")
@simulated(model(idle_s=2.0, drain_s=20.0), gateways=2, strict=False)
async def test_unreachable_gateway_delays_a_replica_stop_at_most_37_seconds(stage: Stage) -> None:
    town = stage.town
    calls = [town.call("a", gateway=number % 2) for number in range(4)]
    await stage.answered(calls)
    cut_off(stage, 1)
    began_s = town.now()
    await stage.until(lambda: stage.replicas() == 0, within_s=60)
    assert town.now() - began_s >= 10.0, "a silent gateway is not taken for an idle one"
    assert town.now() - began_s <= 2.0 + 10.0 + 20.0 + 5.0, "and blocks the stop for drainSecondsMax at most"
    town.gateways[1].link.reachable = True
    assert await stage.answered([town.call("a", gateway=1)], within_s=30) == {"completed": 1}


@pytest.mark.case("13")
@pytest.mark.parametrize("new_leader", [False, True])
@simulated(
    model(idle_s=2.0, drain_s=20.0), gateways=2, manners=Manners(start_s=(0.5, 0.5), serve_s=(50.0, 50.0)), strict=False
)
async def test_engine_used_by_a_silent_gateway_is_not_stopped(stage: Stage, new_leader: bool) -> None:
    """Cut off for longer than a report's expiry, an idle timeout and a drain's grace together; unknown is not zero."""
    town = stage.town
    stream = town.call("a", gateway=1)
    await stage.until(lambda: stream.first_byte_s is not None, within_s=30)
    await asyncio.sleep(1.0)
    cut_off(stage, 1)
    if new_leader:
        town.crash_autoscaler()
        town.start_autoscaler()
    while not stream.ended:
        world = stage.loop.world
        assert not any(r.state == ReplicaState.DRAINING for r in world.replicas.values())
        await asyncio.sleep(0.1)
    assert await stage.answered([stream]) == {"completed": 1}
    town.gateways[1].link.reachable = True
    await stage.until(lambda: stage.replicas() == 0, within_s=2.0 + 2.0)
    assert stage.starts() == 1


@pytest.mark.case("16")
@pytest.mark.parametrize("moment", ["before the first byte", "mid-stream", "after the last byte"])
@simulated(model(), manners=Manners(start_s=(0.5, 0.5), serve_s=(2.0, 2.0)), strict=False)
async def test_killed_replica_fails_only_a_request_in_mid_stream(stage: Stage, moment: str) -> None:
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
    killed_s = town.now()
    counted = await stage.answered([call], within_s=30)
    if moment == "mid-stream":
        assert counted == {"failed": 1}
        assert call.served_by == {victim}
        assert call.ended[0].at_s == killed_s, "failed at once; two seconds are promised"
    else:
        assert counted == {"completed": 1}, "moved once; its client sees nothing"
        assert call.call.moves == (moment == "before the first byte")
    assert await stage.answered([town.call("a")], within_s=30) == {"completed": 1}
    assert len(call.served_by) == 1


@pytest.mark.case("34")
@pytest.mark.parametrize("moment", ["parked", "before the first byte", "mid-stream"])
@simulated(model(slots=1), manners=Manners(start_s=(0.5, 0.5), serve_s=(5.0, 5.0)))
async def test_abandoned_request_is_removed_at_once_and_frees_its_slot(stage: Stage, moment: str) -> None:
    """Its slot goes to the next request at the same instant, and the leader knows within 100 ms."""
    town = stage.town
    first, second, third = (town.call("a") for _ in range(3))
    leaver = second if moment == "parked" else first
    await stage.until(lambda: bool(first.granted_to))
    if moment == "mid-stream":
        await stage.until(lambda: first.first_byte_s is not None)
    await asyncio.sleep(0.2)
    town.leave(leaver)
    left_s = town.now()
    assert leaver.ended[0].outcome == Outcome.ABANDONED
    assert not any(leaver.call.id in served for served in town.machine.calls.values()), "its engine works no more"
    assert second.granted_s == ([] if moment == "parked" else [left_s])
    await asyncio.sleep(0.1)
    load = stage.loop.world.loads[model().name]
    assert (load.waiting, load.running) == (1, 1), "two are left"
    assert await stage.answered([first, second, third]) == {"completed": 2, "abandoned": 1}
    assert len(leaver.granted_to) == (moment != "parked"), "nothing is granted to who left"


@simulated(model(slots=4, replicas=1, idle_s=3600.0), manners=Manners(start_s=(2.0, 2.0), serve_s=(0.5, 1.0)))
async def test_silent_engine_is_replaced_and_its_requests_move_to_the_new_one(stage: Stage) -> None:
    town = stage.town
    assert await stage.answered([town.call("a")]) == {"completed": 1}
    (stuck,) = town.machine.engines
    town.machine.mute.add(stuck)
    calls = [town.call("a", wait_s=2 * SILENT_S) for _ in range(4)]
    took_s = await stage.until(lambda: stuck not in town.machine.engines, within_s=SILENT_S + 60.0)
    assert SILENT_S <= took_s <= SILENT_S + STALLED_GRACE_S + 2.0
    assert await stage.answered(calls) == {"completed": 4}
    assert all(len(call.granted_to) == 2 and call.granted_to[0] == stuck != call.granted_to[1] for call in calls)
    assert stage.starts() == 2


@simulated(model(slots=4, replicas=1, idle_s=3600.0), gateways=2)
async def test_engine_that_sends_to_another_gateway_is_not_replaced(stage: Stage) -> None:
    """One gateway gets nothing, as with a broken network between it and the engine."""
    town = stage.town
    assert await stage.answered([town.call("a", gateway=0), town.call("a", gateway=1)]) == {"completed": 2}
    (engine,) = town.machine.engines
    town.machine.mute.add(engine)
    waits = [town.call("a", gateway=0) for _ in range(2)]
    await asyncio.sleep(HEARD_S)
    town.machine.mute.clear()
    for _ in range(80):
        assert await stage.answered([town.call("a", gateway=1)]) == {"completed": 1}
        await asyncio.sleep(10.0)
    assert not any(one.ended for one in waits)
    assert set(town.machine.engines) == {engine}

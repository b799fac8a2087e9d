"""Reliability section 5 A in virtual time: oscillating demand, and reported demand that expires (cases 6 and 7)."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from autoscaler.contract import REPORT_EXPIRY_S, GatewayId, Report
from autoscaler.server.gateways import accept_report
from autoscaler.state.lifecycle import ReplicaState
from tests.simulation.case_harness import Stage, cut_off, model, simulated
from tests.simulation.checks.gateway_reports import COUNTS_S
from tests.simulation.environment.machine import Manners
from tests.simulation.environment.network import CALM, Rates
from tests.support.fakes.driver import FakeEngine

RESIDENCY_S = 30.0
EXACT_S = 0.05
"""Tolerance in virtual seconds: reports and Routes take some milliseconds, and conditions are polled."""


class Lives:
    """The times at which each engine of a Stage became ready and ended."""

    def __init__(self, stage: Stage) -> None:
        self.ready_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.changes: list[float] = []
        """Times of starts and ends."""
        self._stage = stage
        stage.watcher.listen(self._on_change)

    def _on_change(self, engine: FakeEngine, what: str) -> None:
        now_s = self._stage.town.now()
        if what == "ready":
            self.ready_s[engine.replica.id] = now_s
        elif what in {"stop", "kill"}:
            self.ended_s[engine.replica.id] = now_s
        if what in {"start", "clean"}:
            self.changes.append(now_s)

    def stayed_s(self) -> list[float]:
        """Seconds from ready to the end, of ended engines; negative infinity for one that never was ready."""
        return [end_s - self.ready_s.get(id, math.inf) for id, end_s in self.ended_s.items()]


@pytest.mark.case("6")
@pytest.mark.parametrize(
    "shape", ["square", pytest.param("sine", marks=pytest.mark.deep), pytest.param("poisson", marks=pytest.mark.deep)]
)
@simulated(
    model(slots=4, replicas=2, memory_gib=4, idle_s=60.0, residency_s=RESIDENCY_S),
    manners=Manners(start_s=(10.0, 10.0), serve_s=(0.5, 1.5)),
    strict=False,
)
async def test_oscillating_demand_causes_at_most_six_replica_changes_an_hour(stage: Stage, shape: str) -> None:
    """Demand crosses the threshold between one and two replicas; changes of the number of replicas are counted."""
    town = stage.town
    rng = random.Random(7)
    lives = Lives(stage)
    began_s = town.now()
    while town.now() < began_s + 7200:
        phase = (town.now() - began_s) / 60.0
        rate = {
            "sine": 4.0 + 3.0 * math.sin(phase * math.pi),
            "square": 7.0 if int(phase) % 2 else 1.0,
            "poisson": 4.0,
        }[shape]
        town.call("a")
        await asyncio.sleep(rng.expovariate(rate))
    per_hour = len(lives.changes) / 2
    assert per_hour <= 6, f"{per_hour} changes an hour"
    assert lives.ready_s
    assert lives.ended_s or shape != "square", "on and off at the length of the window does stop some"
    assert all(stayed_s >= RESIDENCY_S for stayed_s in lives.stayed_s()), "none ends before its minimum residency"


async def keep_one_running(stage: Stage) -> None:
    """Send one request after another, so that one replica is wanted all the time."""
    while True:
        await stage.answered([stage.town.call("a")])


@pytest.mark.case("6")
@simulated(
    model(slots=4, replicas=2, memory_gib=4, idle_s=2.0, residency_s=1.0),
    manners=Manners(start_s=(10.0, 10.0), serve_s=(0.5, 0.5)),
)
async def test_demand_drop_stops_the_starting_replica_and_keeps_the_ready_one(stage: Stage) -> None:
    """Two are wanted and the second starts slowly; most clients leave before it is ready."""
    town, lives = stage.town, Lives(stage)
    await stage.answered([town.call("a")])
    (first,) = town.machine.engines
    steady = town.task(keep_one_running(stage))
    calls = [town.call("a") for _ in range(200)]
    await stage.until(lambda: stage.starts() == 2, within_s=10)
    for journey in calls:
        town.leave(journey)
    left_s = town.now()
    await stage.until(lambda: bool(lives.ended_s), within_s=10)
    assert first not in lives.ended_s, "the ready one serves on"
    assert lives.stayed_s() == [-math.inf], "the other one was never ready"
    assert town.now() - left_s == pytest.approx(2.0, abs=0.5), "once the idle timeout has no peak that needs it"
    await asyncio.sleep(20.0)
    steady.cancel()
    assert (stage.starts(), stage.replicas()) == (2, 1)


@pytest.mark.case("6")
@simulated(
    model(slots=4, replicas=2, memory_gib=4, idle_s=0.5, residency_s=RESIDENCY_S),
    manners=Manners(start_s=(1.0, 1.0), serve_s=(0.5, 0.5)),
)
async def test_idle_replica_is_not_stopped_before_its_minimum_residency(stage: Stage) -> None:
    """With an idle timeout of 0.5 s and a shorter residency, the second replica would end 10 s after its start."""
    town, lives = stage.town, Lives(stage)
    calls = [town.call("a") for _ in range(60)]
    await stage.answered(calls)
    assert len(lives.ready_s) == 2
    steady = town.task(keep_one_running(stage))
    await stage.until(lambda: bool(lives.ended_s), within_s=RESIDENCY_S + 1.0)
    steady.cancel()
    (stayed_s,) = lives.stayed_s()
    assert RESIDENCY_S <= stayed_s <= RESIDENCY_S + 0.5 + 2 * EXACT_S, "its residency, its last answer and its stop"
    await stage.until(lambda: stage.replicas() == 1, within_s=EXACT_S)


def believed(stage: Stage, name: str = "a") -> tuple[int, int]:
    """(waiting, running) of a Model as the leader knows it."""
    load = stage.loop.world.loads.get(model(name).name)
    return (load.waiting, load.running) if load is not None else (0, 0)


def true(stage: Stage, name: str = "a") -> tuple[int, int]:
    """(waiting, running) of a Model at all living gateways."""
    counts = [(w, r) for g in stage.town.gateways if g.alive for m, w, r in g.dispatch.counts() if m == name]
    return sum(w for w, _ in counts), sum(r for _, r in counts)


@pytest.mark.case("7")
@simulated(model(slots=64), gateways=2, manners=Manners(serve_s=(5.0, 8.0)), strict=False)
async def test_demand_of_a_silent_gateway_expires_ten_seconds_after_its_report(stage: Stage) -> None:
    """Not proven dead: its demand counts for ten seconds after its last report, and no longer.

    At the next quiet point the sum is the truth, and remains so while late reports still arrive.
    """
    town = stage.town
    calls = [town.call("a", gateway=0) for _ in range(50)]
    await stage.until(lambda: sum(bool(j.granted_to) for j in calls) == 50)
    await asyncio.sleep(0.1)
    town.machine.manners = town.machine.manners._replace(serve_s=(70.0, 70.0))
    others = [town.call("a", gateway=1) for _ in range(5)]
    await stage.until(lambda: all(j.granted_to for j in others))
    await stage.until(lambda: believed(stage) == true(stage) == (0, 55))
    town.network.rates = Rates(doubled=0.3, late=0.2, late_s=(0.1, 30.0))
    await asyncio.sleep(1.0)
    cut_off(stage, 0)
    last_s = town.reports.heard_s(town.gateways[0].id)
    assert last_s is not None
    await stage.until(lambda: believed(stage) != (0, 55), step_s=0.001)
    assert believed(stage) == (0, 5)
    assert town.now() - last_s == pytest.approx(COUNTS_S, abs=EXACT_S)
    assert {j.ended[0].outcome.value for j in calls if j.ended} == {"completed"}, "it serves without a leader"
    await stage.answered(calls)
    town.gateways[0].link.reachable = True
    await asyncio.sleep(1.0)
    town.network.rates = CALM
    await asyncio.sleep(3.0)
    for _ in range(30):
        assert believed(stage) == true(stage) == (0, 5)
        await asyncio.sleep(1.0)
    assert await stage.answered(others) == {"completed": 5}
    await stage.until(lambda: stage.replicas() == 0, within_s=5.5)


@pytest.mark.case("7")
@simulated(model(slots=16, idle_s=5.0), gateways=2, manners=Manners(serve_s=(8.0, 9.0)), strict=False)
async def test_demand_of_a_dead_gateway_is_removed_at_once(stage: Stage) -> None:
    """And keeps no engine for longer than the idle timeout, however late its reports arrive."""
    town = stage.town
    for _ in range(50):
        town.call("a", gateway=0)
    await stage.until(lambda: believed(stage)[1] == 16)
    town.network.rates = Rates(doubled=0.3, late=0.2, late_s=(0.1, 30.0))
    await asyncio.sleep(0.5)
    town.gateways[0].crash()
    died_s = town.now()
    await stage.until(lambda: believed(stage) == (0, 0), step_s=0.001)
    assert town.now() - died_s < EXACT_S
    await stage.until(lambda: stage.replicas() == 0, within_s=10.0)
    assert town.now() - died_s == pytest.approx(5.0, abs=0.5)
    await asyncio.sleep(35.0)
    assert (stage.starts(), believed(stage)) == (1, (0, 0)), "late reports of the dead start nothing"
    assert await stage.answered([town.call("a", gateway=1)]) == {"completed": 1}
    await stage.until(lambda: stage.replicas() == 0, within_s=10.0)


@pytest.mark.case("7")
@simulated(
    model("a", residency_s=25.0),
    model("b"),
    gateways=2,
    manners=Manners(start_s=(0.5, 0.5), serve_s=(40.0, 40.0)),
    strict=False,
)
async def test_expired_demand_of_an_unreachable_gateway_evicts_no_replica(stage: Stage) -> None:
    """Clients of the other Model leave a gateway that is cut off.

    When the residency of the running Model is over, ten seconds have passed as well: it is not drained for them.
    """
    town = stage.town
    stream = town.call("a", gateway=1)
    await stage.until(lambda: stream.first_byte_s is not None, within_s=20)
    removed = [town.call("b", gateway=0) for _ in range(5)]
    await stage.until(lambda: believed(stage, "b") == (5, 0))
    cut_off(stage, 0)
    for journey in removed:
        town.leave(journey)
    await stage.until(lambda: believed(stage, "b") == (0, 0), within_s=COUNTS_S + EXACT_S)
    world = stage.loop.world
    while not stream.ended:
        assert not any(r.state == ReplicaState.DRAINING for r in world.replicas.values())
        world = stage.loop.world
        await asyncio.sleep(0.1)
    assert (stage.starts("a"), stage.starts("b")) == (1, 0)


@simulated(model(idle_s=600.0))
async def test_slots_allocated_to_unknown_gateways_are_returned_after_expiry(stage: Stage) -> None:
    """A client with a gateway's token, or of another version, reports once under each of eight names."""
    town, slots = stage.town, 4
    await stage.answered([town.call("a")])

    def hold() -> int:
        (use,) = town.gateways[0].dispatch.report(town.now()).replicas
        return use.hold

    await stage.until(lambda: hold() == slots)
    loop = stage.loop
    for n in range(8):
        world, stranger = loop.world, GatewayId(f"stranger-{n}")
        odd = Report(gateway=stranger, boot="b", sequence=1, epoch=world.epoch, version=world.version)
        accept_report(loop, odd)
    await stage.until(lambda: hold() < slots)
    calls = [town.call("a") for _ in range(32)]
    assert await stage.until(lambda: hold() == slots, REPORT_EXPIRY_S + 2.0) > 0.0
    assert await stage.answered(calls) == {"completed": len(calls)}
